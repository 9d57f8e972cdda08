"""The element types and reductions that hvdlite knows; the integers are shared with csrc/ and the wire."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np


class DType(IntEnum):
    """Element type of a tensor. `BOOL` moves (allgather, broadcast) but does not reduce.

    Attributes:
        itemsize: bytes per element.
        label: the name that users know, e.g. ``float32``.
        is_half: 16-bit floats: summed in fp32, rounded once per reduction.
    """

    UINT8 = 0, 1
    INT8 = 1, 1
    INT16 = 2, 2
    INT32 = 3, 4
    INT64 = 4, 8
    FLOAT16 = 5, 2
    BFLOAT16 = 6, 2
    FLOAT32 = 7, 4
    FLOAT64 = 8, 8
    BOOL = 9, 1

    itemsize: int
    label: str
    is_floating: bool
    is_half: bool

    def __new__(cls, number: int, itemsize: int) -> DType:
        member = int.__new__(cls, number)
        member._value_ = number
        member.itemsize = itemsize
        return member

    def __init__(self, *_: int) -> None:
        self.label = self.name.lower()
        self.is_floating = "float" in self.label
        self.is_half = self.is_floating and self.itemsize == 2

    __hash__ = int.__hash__  # Enum's is written in Python, and types are looked up for every operation

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


_OF_NUMPY = {dtype.label: dtype for dtype in DType if dtype is not DType.BFLOAT16}


class ReduceOp(IntEnum):
    """How contributions are combined; Horovod's numbers. `AVERAGE` is `SUM` and a scale by then."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    __hash__ = int.__hash__

    @property
    def label(self) -> str:
        return self.name.capitalize()


class Reduction(NamedTuple):
    """``postscale * op over ranks(prescale * contribution)``."""

    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0

    def split(self) -> tuple[Reduction, Reduction]:
        """(within the nodes, then between them)."""
        return self._replace(postscale=1.0), self._replace(prescale=1.0)


SUM = Reduction()
