"""Shared memory with an owner: a memfd mapped by every local rank, alive as long as any tensor in it.

A memfd has no name, so there is nothing in /dev/shm to leave behind, however a process ends, and the size of
/dev/shm (64 MB in a default container) does not limit it. It counts as memory of the processes that touch it.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from hvdlite.errors import StartupError


class Segment:
    """``nbytes`` of zeroed shared memory at ``address``.

    Arrays and tensors made from ``memory`` keep the mapping through the buffer protocol; it is never unmapped
    under them, and goes when the last of them goes.

    Raises:
        StartupError: the machine refuses; says how much was asked for.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            mapping = mmap.mmap(fd, max(nbytes, 1))
        except (OSError, OverflowError) as error:
            raise _refused(nbytes, error) from error
        self.memory = np.frombuffer(mapping, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)


def create_memory_file(nbytes: int) -> int:
    """A file descriptor of ``nbytes`` of anonymous memory; the caller closes it once everybody has mapped it.

    Raises:
        StartupError: the machine refuses; says how much was asked for.
    """
    fd = -1
    try:
        fd = os.memfd_create("hvdlite")
        os.ftruncate(fd, max(nbytes, 1))
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise _refused(nbytes, error) from error
    return fd


def _refused(nbytes: int, error: Exception) -> StartupError:
    return StartupError(
        f"cannot create {nbytes} bytes of shared memory ({error}); "
        "raise the limits on open files and memory, or lower HVDLITE_STAGING_BYTES"
    )
