"""Shared memory with an owner: a memory file mapped by every local rank, alive as long as any tensor in it.

A process that is forked gets private copies of what it has inherited: what it writes to gradients, a barrier or a
doorbell stays its own.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np

from hvdlite import _native
from hvdlite.memory.memory_file import refused


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
            raise refused(nbytes, error) from error
