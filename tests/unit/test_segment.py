"""Memory that ranks share: as long as it is used, and private in a forked child."""

from __future__ import annotations

import gc
import mmap
import os
import select
import traceback
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from hvdlite.errors import StartupError
from hvdlite.memory.memory_file import create_memory_file
from hvdlite.memory.segment import Segment

PATIENCE_S = 60


def made(nbytes: int, *, reserved: bool = False) -> Segment:
    fd = create_memory_file(nbytes, reserved=reserved)
    try:
        return Segment(fd, nbytes)
    finally:
        os.close(fd)


def in_child(work: Callable[[], str]) -> str:
    """What ``work`` returns in a forked process."""
    out, end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads and fork
        child = os.fork()
    if child == 0:
        try:
            text = work()
        except BaseException:
            text = traceback.format_exc()
        os.write(end, text.encode())
        os._exit(0)
    os.close(end)
    assert select.select([out], [], [], PATIENCE_S)[0], "the child hangs"
    text = os.read(out, 1 << 16).decode()
    os.close(out)
    os.waitpid(child, 0)
    return text


def test_memory_lives_as_long_as_an_array_in_it() -> None:
    fd = create_memory_file(8192)
    segment = Segment(fd, 8192)
    os.close(fd)
    array = segment.memory[4096:4128].view(np.float32)
    del segment
    gc.collect()
    array[:] = 3.0
    assert array.sum() == 24.0


def test_memory_that_the_machine_refuses_is_an_error_with_its_size() -> None:
    with pytest.raises(StartupError, match=f"cannot create {1 << 62} bytes .*HVDLITE_CHUNK_BYTES"):
        Segment(create_memory_file(1 << 62), 1 << 62)


def test_a_child_has_copies_of_its_own() -> None:
    """Of gradients, above all: `p.grad.zero_()` in a child must not reach the parent, nor the other ranks."""
    segments = [made(nbytes) for nbytes in (4096, 3 * 4096 + 5, 1)]
    other = mmap.mmap(-1, 4096)  # shared with the child on purpose
    for number, segment in enumerate(segments):
        segment.memory[:] = number + 1

    def work() -> str:
        for number, segment in enumerate(segments):
            assert (segment.memory == number + 1).all()
            segment.memory[:] = 77
        other[0] = 9
        return str([int(segment.memory[-1]) for segment in segments])

    assert in_child(work) == "[77, 77, 77]"
    for number, segment in enumerate(segments):
        assert (segment.memory == number + 1).all()
        segment.memory[:] = 5
        assert (segment.memory == 5).all()
    assert other[0] == 9


def test_a_child_of_a_child_has_copies_of_its_own_as_well() -> None:
    segment = made(4096)

    def work() -> str:
        segment.memory[:] = 2
        told = in_child(lambda: (segment.memory.fill(3), str(int(segment.memory[0])))[1])
        return f"{told} {segment.memory[0]}"

    assert in_child(work) == "3 2"
    assert not segment.memory.any()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_one_descriptor_for_each_and_none_is_left() -> None:
    gc.collect()
    before = open_files()
    segments = [made(100) for _ in range(5)]
    assert open_files() == before + 5
    arrays = [segment.memory[:10] for segment in segments]
    del segments
    assert open_files() == before + 5
    del arrays
    gc.collect()
    assert open_files() == before
