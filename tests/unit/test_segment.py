"""Memory that ranks share: sealed, reserved where it must be there, private in a forked child."""

from __future__ import annotations

import errno
import fcntl
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
from hvdlite.memory import segment as module
from hvdlite.memory.segment import Segment, create_memory_file

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
    with pytest.raises(StartupError, match=f"cannot create {1 << 62} bytes of shared memory"):
        Segment(create_memory_file(1 << 62), 1 << 62)


@pytest.mark.parametrize("nbytes", [1, 4096, 100_000])
def test_nobody_who_has_it_open_can_shrink_it(nbytes: int) -> None:
    """Whoever has it mapped would be killed at the next touch."""
    fd = create_memory_file(nbytes)
    for size in (0, nbytes - 1, nbytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # nor take away that it can be written
    os.write(fd, b"x")
    os.close(fd)


def test_it_cannot_become_a_program() -> None:
    fd = create_memory_file(4096)
    try:
        if not os.fstat(fd).st_mode & 0o111:  # since Linux 6.3
            with pytest.raises(PermissionError):
                os.fchmod(fd, 0o777)
            with pytest.raises(PermissionError):
                os.execve(fd, ["x"], {})
    finally:
        os.close(fd)


def test_an_older_kernel_has_no_such_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create

    def older(name: str, flags: int) -> int:
        if flags & module._NOEXEC_SEAL:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", older)
    fd = create_memory_file(10)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    os.close(fd)


def test_reserved_memory_is_there_before_it_is_touched() -> None:
    for reserved, expected in [(True, 1 << 20), (False, 0)]:
        fd = create_memory_file(1 << 20, reserved=reserved)
        assert os.fstat(fd).st_blocks * 512 == expected
        os.close(fd)


def test_memory_that_cannot_be_reserved_is_an_error_and_not_a_signal_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", short)
    before = open_files()
    with pytest.raises(StartupError, match="cannot create 8192 bytes of shared memory .*No space left"):
        create_memory_file(8192, reserved=True)
    assert open_files() == before


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
