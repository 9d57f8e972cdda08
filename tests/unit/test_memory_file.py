"""Memory files: sealed, and reserved where the memory must be there."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from hvdlite.errors import StartupError
from hvdlite.memory import memory_file
from hvdlite.memory.memory_file import create_memory_file


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
    try:
        os.close(os.memfd_create("x", memory_file._NOEXEC_SEAL))
    except OSError:
        pytest.skip("since Linux 6.3")
    fd = create_memory_file(4096)
    try:
        with pytest.raises(PermissionError):
            os.fchmod(fd, 0o777)
        with pytest.raises(PermissionError):
            os.execve(fd, ["x"], {})
    finally:
        os.close(fd)


def test_an_older_kernel_has_no_such_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create

    def older(name: str, flags: int) -> int:
        if flags & memory_file._NOEXEC_SEAL:
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
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StartupError, match="cannot create 8192 bytes of shared memory .*No space left"):
        create_memory_file(8192, reserved=True)
    assert os.listdir("/proc/self/fd") == before
