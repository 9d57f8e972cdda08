"""What each rank tells all others: some numbers, and bytes where there is room for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from hvdlite.dtypes import DType
from hvdlite.memory.base import Memory
from hvdlite.memory.layout import Layout, align_up

_NUMBER = np.dtype(np.int64)

Piece = tuple[int, int]
"""(where it begins, bytes)."""


class Packets:
    """Packets of ``size`` ranks, as tensors of an allreduce: each rank adds its own to zeros for those of the others.

    Args:
        width: how many numbers each rank tells.
        room: bytes that have place beside them.

    Attributes:
        room: the same.
        layout: of what is summed.
        sources, targets: the tensors.
    """

    def __init__(self, memory: Memory, rank: int, size: int, width: int, room: int) -> None:
        self.layout = self.layout_of(size, width, room)
        packet_bytes = self.layout.numels[0]
        self._memory = memory
        self._start = width * _NUMBER.itemsize
        self.room = room
        self._own = np.zeros(packet_bytes, np.uint8)
        self._all = np.zeros((size, packet_bytes), np.uint8)
        self._own_numbers = self._own[: self._start].view(_NUMBER)
        self._numbers = self._all[:, : self._start].view(_NUMBER)
        self._own_address = self._own.ctypes.data
        self._addresses = [self._all.ctypes.data + packet_bytes * other for other in range(size)]
        own = [self._own_address if other == rank else 0 for other in range(size)]
        self.sources = memory.tensors(own, self.layout.numels, self.layout.offsets)
        self.targets = memory.tensors(self._addresses[:1], [self._all.nbytes], [0])

    @staticmethod
    @lru_cache
    def layout_of(size: int, width: int, room: int) -> Layout:
        """See `layout`."""
        packet_bytes = align_up(width * _NUMBER.itemsize + room)
        return Layout.of([packet_bytes] * size, DType.UINT8, DType.UINT8)

    def write(self, numbers: Sequence[int], pieces: Sequence[Piece]) -> None:
        """This rank's packet; without its bytes if there is no room for them."""
        self._own_numbers[:] = numbers
        if sum(nbytes for _, nbytes in pieces) <= self.room:
            at = self._own_address + self._start
            for address, nbytes in pieces:
                if nbytes:
                    self._memory.copy(at, address, nbytes)
                    at += nbytes

    @property
    def numbers(self) -> list[list[int]]:
        """Those of all ranks."""
        told: list[list[int]] = self._numbers.tolist()
        return told

    def read(self, target: int, pieces: Sequence[Piece]) -> None:
        """Put one piece of each rank's bytes after the other at ``target``; a piece begins somewhere in these."""
        for address, (start, nbytes) in zip(self._addresses, pieces, strict=True):
            if nbytes:
                self._memory.copy(target, address + self._start + start, nbytes)
                target += nbytes
