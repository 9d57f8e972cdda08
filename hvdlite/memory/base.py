"""What a kind of memory must offer: buffers with a copy per local rank, and ways in and out of them for tensors.

Backends and operations know no other memory than this; another kind, such as that of a GPU, is another `Memory`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdlite.dtypes import DType
from hvdlite.memory.views import Buffer, TensorView

if TYPE_CHECKING:
    from hvdlite._native import TensorList


class Region(NamedTuple):
    """Bytes of memory of this rank.

    Attributes:
        owner: keeps them alive; on the host an array that begins at or before them.
        ordinal: of the GPU that has them; None on the host.
    """

    address: int
    nbytes: int
    owner: object
    ordinal: int | None = None

    @classmethod
    def of_numpy(cls, array: np.ndarray) -> Region:
        """The bytes of a C-contiguous array."""
        return cls(array.ctypes.data, array.nbytes, array)

    def narrow(self, start: int, nbytes: int) -> Region:
        """``nbytes`` from byte ``start`` on."""
        assert 0 <= start <= self.nbytes - nbytes, (start, nbytes, self.nbytes)
        return self._replace(address=self.address + start, nbytes=nbytes)

    def buffer(self, numel: int, dtype: DType) -> Buffer:
        """The first ``numel`` elements, as private memory."""
        return Buffer((self.address,), 0, numel, dtype, self.owner)


class FusionBuffer:
    """``nbytes`` per local rank, divided into slots; a tensor that lives in its slot is reduced where it is.

    Args:
        buffer_id: the same on every rank.
        copies: address of every local rank's copy.
        index: of this rank's own.
        owner: keeps the copies alive; on the host (bytes of all copies,) uint8, beginning at the first.
        ordinal: of the GPU that has this rank's copy; None on the host.

    Attributes:
        multicast: the address of all copies together, see `DeviceMemory.add_multicast`; 0: there is none.
        no_multicast: why there is none, if it was asked for.
    """

    __slots__ = ("address", "buffer_id", "copies", "index", "multicast", "nbytes", "no_multicast", "ordinal", "owner")

    def __init__(
        self,
        buffer_id: int,
        copies: tuple[int, ...],
        index: int,
        nbytes: int,
        owner: object,
        ordinal: int | None,
    ) -> None:
        self.buffer_id = buffer_id
        self.copies = copies
        self.index = index
        self.nbytes = nbytes
        self.owner = owner
        self.ordinal = ordinal
        self.address = copies[index]  # of this rank's own copy
        self.multicast = 0
        self.no_multicast = ""

    @property
    def region(self) -> Region:
        """This rank's copy; tensors made from it keep the buffer alive."""
        return Region(self.address, self.nbytes, self.owner, self.ordinal)

    @property
    def memory(self) -> np.ndarray:
        """`region` on the host, as (nbytes,) uint8."""
        assert isinstance(self.owner, np.ndarray)
        start = self.address - self.copies[0]
        return self.owner[start : start + self.nbytes]

    def buffer(self, offset_bytes: int, numel: int, dtype: DType) -> Buffer:
        """``numel`` elements of every local rank's copy, from ``offset_bytes`` on."""
        assert offset_bytes + numel * dtype.itemsize <= self.nbytes, (offset_bytes, numel, dtype, self.nbytes)
        copies = tuple([address + offset_bytes for address in self.copies])
        return Buffer(copies, self.index, numel, dtype, self.owner)


@dataclass(frozen=True, slots=True)
class Home:
    """Where a group of tensors lives: from ``offset_bytes`` of ``buffer`` on, each in its slot, see `Layout`."""

    buffer: FusionBuffer
    offset_bytes: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """(buffer id, offset in bytes): equal on every rank where the tensors live at the same place."""
        return self.buffer.buffer_id, self.offset_bytes


class Memory(ABC):
    """The memory of one device that the ranks of a node share.

    Attributes:
        is_on_device: whether it is that of a GPU.

    Args:
        index: of this rank's copies.
        ordinal: of the GPU that has them; None on the host.
    """

    is_on_device: bool

    def __init__(self, index: int, ordinal: int | None = None) -> None:
        self._index = index
        self._ordinal = ordinal
        self._made = 0
        # (id, owner, copies, bytes of a copy). Replaced as a whole: user threads search it while another one adds.
        self._known: tuple[tuple[int, weakref.ref[Any], tuple[int, ...], int], ...] = ()

    @abstractmethod
    def allocate(self, nbytes: int) -> FusionBuffer:
        """A zeroed buffer of ``nbytes`` per local rank. Collective in the node, in the same order on every rank of it.

        It lives as long as any tensor in it. Buffers are numbered in the order in which they are made.
        """

    def find(self, address: int, nbytes: int) -> Home | None:
        """The home of a tensor by its address; None where it lives elsewhere. From any thread."""
        index = self._index
        for buffer_id, reference, copies, size in self._known:
            offset = address - copies[index]
            if 0 <= offset <= size - nbytes:
                owner = reference()
                if owner is not None:
                    return Home(FusionBuffer(buffer_id, copies, index, size, owner, self._ordinal), offset)
        return None

    def _new_buffer(self, copies: tuple[int, ...], nbytes: int, owner: Any) -> FusionBuffer:
        """The next buffer, which `find` knows as long as somebody else keeps ``owner``."""
        buffer_id = self._made
        alive = [entry for entry in self._known if entry[1]() is not None]
        self._known = (*alive, (buffer_id, weakref.ref(owner), copies, nbytes))
        self._made += 1
        return FusionBuffer(buffer_id, copies, self._index, nbytes, owner, self._ordinal)

    @abstractmethod
    def filled(self, shape: tuple[int, ...], dtype: DType, value: float) -> TensorView:
        """A new private tensor with ``value`` in every element, of a type that holds it exactly or rounds it."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between two addresses."""

    @abstractmethod
    def tensors(self, addresses: Sequence[int], numels: Sequence[int], offsets: Sequence[int]) -> TensorList:
        """Tensors as they lie in a buffer, see `Layout`. Address 0: zeros that nobody stored, a result nobody wants."""

    @abstractmethod
    def pack(self, tensors: TensorList, dtype: DType, part: Buffer, begin: int) -> None:
        """Fill this rank's copy of ``part``, which is the layout of ``tensors`` from element ``begin`` on.

        Elements are cast from ``dtype`` to that of ``part``, gaps become 0, and a tensor that lives at its place is not
        touched.
        """

    @abstractmethod
    def unpack(self, part: Buffer, begin: int, tensors: TensorList, dtype: DType) -> None:
        """The mirror of `pack`."""
