"""All ranks of a world, once it is at work: values of any kind travel by its own backend."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from hvdlite import _native
from hvdlite.collectives.base import Backend
from hvdlite.dtypes import DType
from hvdlite.memory.views import Buffer

_SIZE_BYTES = 8


class Everybody:
    """`hvdlite.agreement.Ranks` over ``backend``, for who is at work on the coordinator's part.

    Args:
        staging: bytes that it may use, of the backend's memory, which is that of the host: some for each rank.
    """

    def __init__(self, backend: Backend, staging: Buffer) -> None:
        self.rank = backend.rank
        self.size = backend.size
        self._backend = backend
        self._staging = staging.as_dtype(DType.UINT8)

    def allgather(self, value: Any, /) -> list[Any]:
        """Every rank's ``value``, by rank. Collective."""
        data = pickle.dumps(value)
        told = [int.from_bytes(size, "little") for size in self._gather(len(data).to_bytes(_SIZE_BYTES, "little"))]
        rows = self._gather(data.ljust(max(told), b"\0"))
        return [pickle.loads(row[:nbytes]) for row, nbytes in zip(rows, told, strict=True)]

    def _gather(self, data: bytes) -> list[bytes]:
        """``data`` of every rank, of the same length on all."""
        own = np.frombuffer(data, np.uint8)
        gathered = np.zeros((self.size, len(data)), np.uint8)
        step = self._staging.numel // self.size
        for begin in range(0, len(data), step):
            width = min(step, len(data) - begin)
            part = self._staging.narrow(0, self.size * width)
            _native.copy(part.address + self.rank * width, own.ctypes.data + begin, width)
            self._backend.allgather(part, [[(rank * width, (rank + 1) * width)] for rank in range(self.size)]).wait()
            for rank, row in enumerate(gathered):
                _native.copy(row.ctypes.data + begin, part.address + rank * width, width)
        return [row.tobytes() for row in gathered]
