"""The contract of every backend; one test module, tests/mpi/test_backends.py, runs against each of them.

A backend moves and reduces the bytes of buffers that come from its own `allocate`, between its `size` ranks:

- Every rank of the backend calls the same methods in the same order with equal arguments (the coordinator
  sees to that). A call returns when this rank's copy of the result is complete and may be overwritten.
- The result is the same to the last bit on every rank, and does not depend on timing.
- Sizes of 0 and 1 element work. Element counts are 64-bit.
- 16-bit floats are summed in fp32 and rounded once in a node and after every addition across nodes; integers wrap;
  integer scales are applied in fp64 and truncated.
- Only one thread calls a backend. Where a peer does not come, the call raises `CollectiveError` (naming the
  ranks) once the runtime is aborted or ``collective_timeout_s`` has passed; it never waits silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlite.counters import Traffic
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.memory import Buffer

if TYPE_CHECKING:
    from hvdlite._native import TensorList
    from hvdlite.config import Config

LARGEST_MESSAGE_BYTES = 1 << 30  # MPI counts are 32-bit before MPI 4

Range = tuple[int, int]
"""[start, stop) in elements of a buffer."""


class Backend(ABC):
    """Collectives between ``size`` ranks, of which this one is ``rank``."""

    rank: int
    size: int
    label: str
    """What the next operation works on; for errors and the timeline."""

    @abstractmethod
    def allocate(self, numel: int, dtype: DType) -> Buffer:
        """A buffer that the methods below accept; a collective call. The contents are undefined."""

    @abstractmethod
    def allreduce(
        self, buf: Buffer, *, op: ReduceOp = ReduceOp.SUM, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        """``buf = postscale * op over ranks(prescale * buf)``, in place. ``op`` is never AVERAGE or ADASUM."""

    def allreduce_tensors(
        self,
        inputs: TensorList,
        outputs: TensorList,
        numel: int,
        dtype: DType,
        wire_dtype: DType,
        *,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> bool:
        """Allreduce private memory, where the backend has a faster way than `allreduce` between pack and unpack.

        Args:
            inputs: of a fused layout of ``numel`` elements of ``dtype``, which travel as ``wire_dtype``.
            outputs: of the same layout; may be the same memory.

        Returns:
            Whether it was done.
        """
        return False

    @abstractmethod
    def reduce_scatter(
        self,
        buf: Buffer,
        *,
        parts: int,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """Reduce in place so that rank r < parts holds `memory.shard_bounds(numel, parts, r, itemsize)`.

        The rest of every copy is undefined afterwards. 1 <= parts <= size.
        """

    @abstractmethod
    def allgather(self, buf: Buffer, blocks: Sequence[Sequence[Range]]) -> None:
        """Fill every copy: rank r has written the ranges ``blocks[r]`` of its own copy, and all get all of them.

        Ranges do not overlap and need not cover the buffer; a rank may have none, or several.
        """

    @abstractmethod
    def broadcast(self, buf: Buffer, root: int) -> None:
        """Copy rank ``root``'s copy to every rank's."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    def configure(self, config: Config) -> None:
        """Take over what of ``config`` may change between two operations; the same on every rank."""

    @property
    def traffic(self) -> Traffic:
        """What this rank has exchanged with other nodes."""
        return Traffic()

    def close(self) -> None:
        """Release what the backend owns; a collective call."""
