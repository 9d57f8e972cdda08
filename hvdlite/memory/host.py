"""Memory of the host: memfds that every rank of a node maps; casts and copies in native code without the GIL."""

from __future__ import annotations

import weakref
from typing import Protocol

import numpy as np

from hvdlite import _native
from hvdlite.dtypes import DType
from hvdlite.memory.base import FusionBuffer, Home, Memory
from hvdlite.memory.layout import align_up
from hvdlite.memory.segment import Segment
from hvdlite.memory.views import Buffer, TensorView

_PAGE_BYTES = 4096


class Sharer(Protocol):
    """The ranks of a node, as far as memory is concerned."""

    local_rank: int
    local_size: int

    def share(self, nbytes: int) -> Segment:
        """A zeroed segment that every local rank maps; collective."""


class HostMemory(Memory):
    """What the ranks of ``node`` share; it keeps no buffer alive."""

    device = "cpu"

    def __init__(self, node: Sharer) -> None:
        self._node = node
        self._made = 0
        # (id, segment, copies, bytes of a copy). Replaced as a whole: user threads search it while another one adds.
        self._known: tuple[tuple[int, weakref.ref[np.ndarray], tuple[int, ...], int], ...] = ()

    def allocate(self, nbytes: int) -> FusionBuffer:
        node = self._node
        stride = max(_PAGE_BYTES, align_up(nbytes, _PAGE_BYTES))
        segment = node.share(node.local_size * stride)
        copies = tuple(range(segment.address, segment.address + node.local_size * stride, stride))
        alive = [entry for entry in self._known if entry[1]() is not None]
        self._known = (*alive, (self._made, weakref.ref(segment.memory), copies, nbytes))
        self._made += 1
        return FusionBuffer(self._made - 1, copies, node.local_rank, nbytes, segment.memory)

    def find(self, address: int, nbytes: int) -> Home | None:
        index = self._node.local_rank
        for buffer_id, reference, copies, size in self._known:
            offset = address - copies[index]
            if 0 <= offset <= size - nbytes:
                memory = reference()
                if memory is not None:
                    return Home(FusionBuffer(buffer_id, copies, index, size, memory), offset)
        return None

    def filled(self, shape: tuple[int, ...], dtype: DType, value: float) -> TensorView:
        if dtype is DType.BFLOAT16:  # the upper half of a float32
            array = np.full(shape, np.array([value], np.float32).view(np.uint32)[0] >> 16, np.uint16)
        else:
            array = np.full(shape, value, dtype.label)
        return TensorView(array.ctypes.data, shape, dtype, array)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        _native.copy(target, source, nbytes)

    tensors = staticmethod(_native.TensorList)

    def pack(self, tensors: _native.TensorList, dtype: DType, part: Buffer, begin: int) -> None:
        tensors.pack(part.copies[part.index], begin, begin + part.numel, dtype, part.dtype)

    def unpack(self, part: Buffer, begin: int, tensors: _native.TensorList, dtype: DType) -> None:
        tensors.unpack(part.copies[part.index], begin, begin + part.numel, part.dtype, dtype)
