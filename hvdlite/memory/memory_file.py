"""Anonymous memory as a file (memfd), which processes hand to one another.

It has no name, so there is nothing in /dev/shm to leave behind, however a process ends, and the size of /dev/shm (64 MB
in a default container) does not limit it. It counts as memory of the processes that touch it. It is sealed: nobody who
has it open can shrink it, which would kill whoever touches it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from typing import BinaryIO

from hvdlite.errors import StartupError

_NOEXEC_SEAL = 0x0008  # linux/memfd.h; since Linux 6.3
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FINAL = _SEALS | fcntl.F_SEAL_WRITE


def create_memory_file(nbytes: int, *, reserved: bool = False) -> int:
    """A file descriptor of ``nbytes`` of anonymous memory; the caller closes it once everybody has mapped it.

    Args:
        reserved: have all of the memory now, so that nobody is killed for want of it when it is touched.

    Raises:
        StartupError: the machine refuses; says how much was asked for.
    """
    fd = -1
    try:
        fd = _memory_file()
        os.ftruncate(fd, max(nbytes, 1))
        if reserved:
            os.posix_fallocate(fd, 0, max(nbytes, 1))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise refused(nbytes, error) from error
    return fd


def write_memory_file(write: Callable[[BinaryIO], object]) -> int:
    """A file descriptor of anonymous memory with what ``write`` puts there, which nobody can change any more.

    Raises:
        StartupError: the machine refuses a file.
    """
    try:
        fd = _memory_file()
    except OSError as error:
        raise refused(0, error) from error
    try:
        with open(fd, "wb", closefd=False) as file:
            write(file)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FINAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_final(fd: int) -> bool:
    """Whether nobody can change this memory file, and it is one."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FINAL == _FINAL
    except OSError:
        return False


def _memory_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("hvdlite", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("hvdlite", flags)  # an older kernel


def refused(nbytes: int, error: Exception) -> StartupError:
    """What to raise where the machine has not given ``nbytes``, or a descriptor for them."""
    return StartupError(
        f"cannot create {nbytes} bytes of shared memory ({error}); "
        "raise the limits on open files and memory, or lower HVDLITE_STAGING_BYTES and HVDLITE_CHUNK_BYTES"
    )
