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


def test_importing_hvdlite_looks_through_none_of_torchs_objects() -> None:
    program = """
import gc, torch
collected = []
gc.callbacks.append(lambda phase, what: collected.append(what["generation"]))
import hvdlite.torch
print(gc.isenabled(), 2 in collected)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False"]
