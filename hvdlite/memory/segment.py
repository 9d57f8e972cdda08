"""Shared memory with an owner: a memfd mapped by every local rank, alive as long as any tensor in it.

A memfd has no name, so there is nothing in /dev/shm to leave behind, however a process ends, and the size of
/dev/shm (64 MB in a default container) does not limit it. It counts as memory of the processes that touch it. It is
sealed: nobody who has it open can shrink it, which would kill whoever touches it.

A process that is forked gets private copies of what it has inherited: what it writes to gradients, a barrier or a
doorbell stays its own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

import numpy as np

from hvdlite import _native
from hvdlite.errors import StartupError

_NOEXEC_SEAL = 0x0008  # linux/memfd.h; since Linux 6.3
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FINAL = _SEALS | fcntl.F_SEAL_WRITE


class _Mapped(NamedTuple):
    address: int
    nbytes: int
    file: int


# What this process shares with others. Of the process and nobody's: forks know no owner.
_mapped: weakref.WeakKeyDictionary[mmap.mmap, _Mapped] = weakref.WeakKeyDictionary()


def _make_private() -> None:
    """In a forked child."""
    for mapped in list(_mapped.values()):
        _native.map_file(*mapped, True)
    _mapped.clear()  # a child of this child inherits private copies


os.register_at_fork(after_in_child=_make_private)


class Segment:
    """``nbytes`` of zeroed shared memory at ``address``.

    Arrays and tensors made from ``memory`` keep the mapping through the buffer protocol; it is never unmapped
    under them, and goes when the last of them goes.

    Raises:
        StartupError: the machine refuses; says how much was asked for.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        length = max(nbytes, 1)
        try:
            # Addresses with an owner, at which the file is mapped then: mmap would keep a descriptor of its own.
            mapping = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.memory = np.frombuffer(mapping, dtype=np.uint8)
            self.address = int(self.memory.ctypes.data)
            mapped = _Mapped(self.address, length, os.dup(fd))
            weakref.finalize(mapping, os.close, mapped.file).atexit = False
            _native.map_file(*mapped, False)
            _mapped[mapping] = mapped
        except (OSError, OverflowError) as error:
            raise _refused(nbytes, error) from error


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
        raise _refused(nbytes, error) from error
    return fd


def write_memory_file(write: Callable[[BinaryIO], object]) -> int:
    """A file descriptor of anonymous memory with what ``write`` puts there, which nobody can change any more.

    Raises:
        StartupError: the machine refuses a file.
    """
    try:
        fd = _memory_file()
    except OSError as error:
        raise _refused(0, error) from error
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


def _refused(nbytes: int, error: Exception) -> StartupError:
    return StartupError(
        f"cannot create {nbytes} bytes of shared memory ({error}); "
        "raise the limits on open files and memory, or lower HVDLITE_STAGING_BYTES"
    )
