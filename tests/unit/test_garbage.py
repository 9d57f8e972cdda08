"""Imports without collections, whatever comes before and after."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hvdlite.garbage import uncollected


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [False, True])
def test_it_leaves_collections_as_they_were(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() == enabled


def test_importing_hvdlite_looks_for_no_garbage() -> None:
    """But once or twice at the end of each block: without these there are thirty."""
    program = """
import gc, torch
gc.set_threshold(700, 10, 10)  # Python's own
looks = []
gc.callbacks.append(lambda phase, what: looks.append(phase))
import hvdlite.torch
print(gc.isenabled(), looks.count("start"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    is_enabled, looks = done.stdout.split()
    assert is_enabled == "True"
    assert int(looks) < 10
