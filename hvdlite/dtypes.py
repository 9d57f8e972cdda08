"""The element types and reductions that hvdlite knows; the integers are shared with csrc/ and the wire."""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np


class DType(IntEnum):
    """Element type of a tensor. `BOOL` moves (allgather, broadcast) but does not reduce."""

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    INT32 = 3
    INT64 = 4
    FLOAT16 = 5
    BFLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BOOL = 9

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def label(self) -> str:
        """The name that users know, e.g. ``float32``."""
        return self.name.lower()

    @property
    def is_floating(self) -> bool:
        return self in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)

    @property
    def is_half(self) -> bool:
        """16-bit floats: summed in fp32, rounded once per reduction."""
        return self in (DType.FLOAT16, DType.BFLOAT16)

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest value; infinite for floats."""
        if self.is_floating:
            return -math.inf, math.inf
        info = np.iinfo(self.label)
        return int(info.min), int(info.max)

    @classmethod
    def of_numpy(cls, dtype: np.dtype) -> DType:
        """The DType of a numpy dtype (numpy has no bfloat16).

        Raises:
            TypeError: hvdlite has no such element type.
        """
        try:
            return _OF_NUMPY[np.dtype(dtype).name]
        except KeyError:
            raise TypeError(f"hvdlite cannot communicate numpy dtype {dtype}; convert the array first") from None


_ITEMSIZE = {
    DType.UINT8: 1, DType.INT8: 1, DType.INT16: 2, DType.INT32: 4, DType.INT64: 8,
    DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT32: 4, DType.FLOAT64: 8, DType.BOOL: 1,
}  # fmt: skip
_OF_NUMPY = {dtype.label: dtype for dtype in DType if dtype is not DType.BFLOAT16}


class ReduceOp(IntEnum):
    """How contributions are combined; Horovod's numbers. `AVERAGE` is `SUM` and a scale by then."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    @property
    def label(self) -> str:
        return self.name.capitalize()
