"""Where programs of GCC's sanitizers are loaded."""

from __future__ import annotations

import platform

import pytest

from compiler import run


@pytest.fixture(scope="module")
def fixed_addresses() -> list[str]:
    """What goes before a command to load it at addresses that are not random, where that is allowed.

    With vm.mmap_rnd_bits of 32, which newer distributions set, programs of GCC's sanitizers end at their start, always
    or now and then (google/sanitizers issues 1614 and 1716).
    """
    command = ["setarch", platform.machine(), "--addr-no-randomize"]
    try:
        return command if run(*command, "true").returncode == 0 else []
    except FileNotFoundError:
        return []
