"""For tests that start Ray."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="module")
def ray_environ() -> Iterator[dict[str, str]]:
    """The environment of a program that starts Ray, which then leaves no files; skips where Ray is not installed."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'hvdlite[ray]'")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:  # short: Ray has its sockets there
        yield os.environ | {"RAY_TMPDIR": directory, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
