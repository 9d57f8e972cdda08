"""Memory of the host: memfds that every rank of a node maps; casts and copies in native code without the GIL."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hvdlite import _native
from hvdlite.dtypes import DType
from hvdlite.memory.base import FusionBuffer, Memory
from hvdlite.memory.layout import align_up
from hvdlite.memory.segment import Segment
from hvdlite.memory.views import Buffer, TensorView

_PAGE_BYTES = 4096


class Sharer(Protocol):
    """The ranks of a node, as far as memory is concerned."""

    local_rank: int
    local_size: int

    def share(self, nbytes: int, *, reserved: bool = True) -> Segment:
        """A zeroed segment that every local rank maps; collective."""


class HostMemory(Memory):
    """What the ranks of ``node`` share; it keeps no buffer alive."""

    is_on_device = False

    def __init__(self, node: Sharer) -> None:
        super().__init__(node.local_rank)
        self._node = node

    def allocate(self, nbytes: int) -> FusionBuffer:
        node = self._node
        stride = max(_PAGE_BYTES, align_up(nbytes, _PAGE_BYTES))
        segment = node.share(node.local_size * stride, reserved=False)  # it may never be touched
        copies = tuple(range(segment.address, segment.address + node.local_size * stride, stride))
        return self._new_buffer(copies, nbytes, segment.memory)

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
