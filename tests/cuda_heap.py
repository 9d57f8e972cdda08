"""Memory of a simulated GPU as torch's caching allocator gives it out, see cuda_torch.py."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache

from cuda_lab import Cuda

_UNIT = 512  # bytes; what is freed serves requests of as many units, as torch's does


class Heap:
    """Memory of the device, cached as torch does: what a stream is done with is there at once for the same stream."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._free: dict[tuple[int, int], list[int]] = {}  # addresses, by stream and bytes
        self._late: deque[tuple[int, int, ctypes.c_void_p]] = deque()

    def take(self, nbytes: int, stream: ctypes.c_void_p) -> ctypes.Array[ctypes.c_char]:
        """NaN when ``stream`` comes to what is enqueued afterwards; freed when nobody has it any more."""
        self.settle()
        size = max(1, -(-nbytes // _UNIT)) * _UNIT
        free = self._free.get((_number(stream), size))
        address = free.pop() if free else self._cuda.allocate(size)
        memory = (ctypes.c_char * size).from_address(address)
        memory.block = _Block(self, address, size, stream)  # type: ignore[attr-defined]
        return memory

    def give(self, address: int, size: int, stream: ctypes.c_void_p) -> None:
        self._late.append((address, size, stream))
        if not self._cuda.is_in_kernel():  # where Python's garbage collector may come along
            self.settle()

    def settle(self) -> None:
        """Free what kernels have left."""
        while True:
            try:
                address, size, stream = self._late.popleft()
            except IndexError:
                return
            with self._cuda.current():
                self._cuda.fill(address, 0xFF, size, stream)
            self._free.setdefault((_number(stream), size), []).append(address)


class _Block:
    """Memory that is freed with this."""

    def __init__(self, heap: Heap, address: int, size: int, stream: ctypes.c_void_p) -> None:
        self._heap, self._place = heap, (address, size, stream)

    def __del__(self) -> None:
        self._heap.give(*self._place)


def _number(stream: ctypes.c_void_p) -> int:
    return stream.value or 0


@cache
def heap_of(cuda: Cuda) -> Heap:
    return Heap(cuda)
