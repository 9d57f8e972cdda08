"""What each rank tells all others: some numbers, and bytes where there is room for them."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np

from hvdlite._native import PacketRoom
from hvdlite.dtypes import DType
from hvdlite.memory.base import Memory
from hvdlite.memory.layout import Layout, align_up

_NUMBER = np.dtype(np.int64)
_REMEMBERED = 1024  # operations
_DROPPED = -1  # instead of numbers, by who tells nothing

Piece = tuple[int, int]
"""(where it begins, bytes)."""


class Packets:
    """Packets of ``size`` ranks, as tensors of an allreduce: each rank adds its own to zeros for those of the others.

    Args:
        width: how many numbers each rank tells.
        room: bytes that have place beside them.

    Attributes:
        rank, room: the same.
        layout: of what is summed.
        sources, targets: the tensors.
    """

    def __init__(self, memory: Memory, rank: int, size: int, width: int, room: int) -> None:
        self.layout = self.layout_of(size, width, room)
        packet_bytes = self.layout.numels[0]
        self._memory = memory
        self.rank = rank
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
        self.places = self._own_address, self._addresses[0], packet_bytes, room
        """For native code: of this rank's packet, of all, the bytes of one, and ``room``."""

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

    def write_dropped(self) -> None:
        """This rank's packet, which tells nothing."""
        self._own_numbers[:] = _DROPPED

    def are_all_at(self, address: int) -> bool:
        """Of a sum that lies there: whether every rank has told something."""
        packets = np.ctypeslib.as_array((ctypes.c_uint8 * self._all.nbytes).from_address(address))
        firsts = packets.reshape(self._all.shape)[:, : _NUMBER.itemsize].view(_NUMBER)
        return bool((firsts != _DROPPED).all())

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


class Rooms:
    """How much room ranks make beside their numbers, for what they gave the last times.

    The same on all ranks, also in what is forgotten: an operation that all do enters once, whoever looks at it.
    """

    def __init__(self) -> None:
        self._rooms: dict[Hashable, PacketRoom] = {}

    def of(self, operation: Hashable) -> PacketRoom | None:
        """None where that is not known."""
        return self._rooms.get(operation)

    def note(self, operation: Hashable, nbytes: int) -> None:
        """All ranks have done ``operation``, and that which gave most gave so many."""
        room = self._rooms.get(operation)
        if room is None:
            room = self._rooms[operation] = PacketRoom()
            if len(self._rooms) > _REMEMBERED:
                self._rooms.pop(next(iter(self._rooms))).forget()
        room.note(nbytes)
