"""Fresh memory in large pages, where the kernel gives them: only whole ones within what was asked for."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from hvdlite.memory.large_pages import prefer_large_pages

PAGE = 2 << 20


def advised(address: int) -> bool:
    """Whether the mapping that has ``address`` was asked to be of large pages."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            begin, end = (int(word, 16) for word in words[0].split("-"))
            found = begin <= address < end
        elif found and words[0] == "VmFlags:":
            return "hg" in words
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="the kernel has no large pages to give"
)
def test_whole_pages_are_asked_for() -> None:
    array = np.frombuffer(mmap.mmap(-1, 5 * PAGE), np.uint8)
    first = -(-array.ctypes.data // PAGE) * PAGE
    prefer_large_pages(first + 1, 3 * PAGE)  # two whole ones
    assert [advised(first + i * PAGE) for i in range(4)] == [False, True, True, False]
    array[:] = 1
    assert array.sum() == array.size


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE])
def test_less_than_a_page_is_left_alone(nbytes: int) -> None:
    array = np.frombuffer(mmap.mmap(-1, 3 * PAGE), np.uint8)
    prefer_large_pages(-(-array.ctypes.data // PAGE) * PAGE + 1, nbytes)
    assert not advised(array.ctypes.data + PAGE)
