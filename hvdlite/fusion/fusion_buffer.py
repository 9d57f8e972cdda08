"""Fusion buffers: a shared segment in which every local rank owns one copy, divided into slots.

A tensor that lives in its slot is reduced where it is. The slots of a bucket of gradients are its *home*.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.dtypes import DType
from hvdlite.memory import ALIGNMENT, Buffer, align_up
from hvdlite.node import Node

_PAGE_BYTES = 4096


def slot_offsets(numels: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """Where tensors of ``numels`` elements lie when they share a buffer, each on a cache line; and the total.

    Returns:
        (offsets, numel), both in elements. The same on every rank, since it depends on the arguments only.
    """
    per_line = ALIGNMENT // itemsize
    offsets = []
    end = 0
    for numel in numels:
        offsets.append(end)
        end += align_up(numel, per_line)
    return offsets, end


class FusionBuffer:
    """``nbytes`` per local rank. Made by `Runtime.allocate`, on all ranks alike.

    Args:
        segment_memory: (local_size * stride,) uint8, the whole segment.
        index: of this rank's own copy.
        stride: bytes from one copy to the next.
    """

    def __init__(self, buffer_id: int, segment_memory: np.ndarray, index: int, stride: int, nbytes: int) -> None:
        self.buffer_id = buffer_id
        self.nbytes = nbytes
        self._segment_memory = segment_memory
        self._index = index
        self._stride = stride
        self._start = int(segment_memory.ctypes.data)

    @property
    def memory(self) -> np.ndarray:
        """This rank's copy, (nbytes,) uint8; arrays and tensors made from it keep the segment alive."""
        start = self._index * self._stride
        return self._segment_memory[start : start + self.nbytes]

    @property
    def address(self) -> int:
        """Of this rank's own copy."""
        return self._start + self._index * self._stride

    def buffer(self, offset_bytes: int, numel: int, dtype: DType) -> Buffer:
        """``numel`` elements of every local rank's copy, from ``offset_bytes`` on."""
        assert offset_bytes + numel * dtype.itemsize <= self.nbytes, (offset_bytes, numel, dtype, self.nbytes)
        start = self._start + offset_bytes
        copies = tuple(range(start, start + len(self._segment_memory), self._stride))
        return Buffer(copies, self._index, numel, dtype, self._segment_memory)


@dataclass(frozen=True, slots=True)
class Home:
    """Where a group of tensors lives: from ``offset_bytes`` of ``buffer`` on, laid out by `slot_offsets`."""

    buffer: FusionBuffer
    offset_bytes: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """(buffer id, offset in bytes): equal on every rank where the tensors live at the same place."""
        return self.buffer.buffer_id, self.offset_bytes


class FusionBuffers:
    """The fusion buffers of one process set; numbered in the order in which all ranks made them.

    It keeps none of them alive: a buffer goes when the last tensor in it goes.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._made = 0
        # (id, segment, address of this rank's copy, stride, nbytes). Replaced as a whole: user threads search it while
        # the coordinator adds.
        self._known: tuple[tuple[int, weakref.ref[np.ndarray], int, int, int], ...] = ()

    def make(self, nbytes: int) -> FusionBuffer:
        """A collective call of the coordinator threads, in the agreed order."""
        stride = max(_PAGE_BYTES, align_up(nbytes, _PAGE_BYTES))
        memory = self._node.share(self._node.local_size * stride).memory
        buffer = FusionBuffer(self._made, memory, self._node.local_rank, stride, nbytes)
        alive = [entry for entry in self._known if entry[1]() is not None]
        self._known = (*alive, (self._made, weakref.ref(memory), buffer.address, stride, nbytes))
        self._made += 1
        return buffer

    def find(self, address: int, nbytes: int) -> Home | None:
        """The home of a tensor by its address; None where it lives elsewhere."""
        for buffer_id, reference, start, stride, size in self._known:
            offset = address - start
            if 0 <= offset <= size - nbytes:
                memory = reference()
                if memory is not None:
                    return Home(FusionBuffer(buffer_id, memory, self._node.local_rank, stride, size), offset)
        return None
