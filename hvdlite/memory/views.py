"""Memory as hvdlite sees it: a tensor of the user (TensorView), and a range with a copy per local rank (Buffer)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdlite.dtypes import DType

if TYPE_CHECKING:
    from hvdlite._native import Moment


class OnDevice(NamedTuple):
    """Where a tensor in the memory of a GPU is.

    Attributes:
        ordinal: of the GPU in this process.
        ready: its contents are what they should be, and may be overwritten, once this is reached.
        current_stream: the driver's handle of the stream on which the thread that asks works with this GPU.
    """

    ordinal: int
    ready: Moment
    current_stream: Callable[[], int]


class TensorView(NamedTuple):
    """A contiguous tensor: where it is, what it holds, and who keeps it alive.

    Args:
        address: of the first element; 0 stands for a tensor of zeros that nobody stored.
        shape: in elements.
        owner: any object whose life keeps ``address`` valid.
        device: of a tensor that is not in the host's memory.
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    owner: object
    device: OnDevice | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @classmethod
    def of_numpy(cls, array: np.ndarray) -> TensorView:
        """The view of a C-contiguous array.

        Raises:
            ValueError: ``array`` is not C-contiguous.
        """
        if not array.flags.c_contiguous:
            raise ValueError("hvdlite needs a C-contiguous array; pass numpy.ascontiguousarray(array)")
        return cls(array.ctypes.data, array.shape, DType.of_numpy(array.dtype), array)


@dataclass(frozen=True, slots=True)
class Buffer:
    """``numel`` elements of which every rank of a backend owns one copy; the copies this process can reach.

    In shared memory ``copies`` lists the address of every local rank's copy, in the order of local ranks;
    in private memory it has one entry, this rank's own.
    """

    copies: tuple[int, ...]
    index: int  # of this rank's own copy
    numel: int
    dtype: DType
    owner: object

    @property
    def address(self) -> int:
        """Address of this rank's own copy."""
        return self.copies[self.index]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def narrow(self, start: int, stop: int) -> Buffer:
        """Elements [start, stop) of every copy."""
        assert 0 <= start <= stop <= self.numel, (start, stop, self.numel)
        shift = start * self.dtype.itemsize
        return Buffer(tuple([a + shift for a in self.copies]), self.index, stop - start, self.dtype, self.owner)

    def as_dtype(self, dtype: DType) -> Buffer:
        """The same bytes as elements of another type of the same total size."""
        numel, rest = divmod(self.nbytes, dtype.itemsize)
        assert rest == 0, (self.nbytes, dtype)
        return Buffer(self.copies, self.index, numel, dtype, self.owner)

    @classmethod
    def of_numpy(cls, array: np.ndarray) -> Buffer:
        """Private memory: one copy, this rank's own."""
        view = TensorView.of_numpy(array)
        return cls((view.address,), 0, view.numel, view.dtype, array)
