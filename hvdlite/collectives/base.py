"""The contract of every backend; one test module, tests/mpi/test_backends.py, runs against each of them.

A backend moves and reduces the bytes of buffers of its `memory`, between its `size` ranks:

- Every rank of the backend calls the same methods in the same order with equal arguments (the coordinator
  sees to that).
- A call begins an operation and returns its `Completion`. Once `Completion.wait` has returned, this rank's copy of the
  result is complete and may be overwritten; where the memory is that of a GPU, by what is enqueued from then on, since
  the host need not wait for a GPU. Operations that are begun complete in the order in which they began.
- The result is the same to the last bit on every rank, and does not depend on timing.
- Sizes of 0 and 1 element work. Element counts are 64-bit.
- 16-bit floats are summed in fp32 and rounded once in a node and after every addition across nodes; integers wrap;
  integer scales are applied in fp64 and truncated, but for the division of an average, which is exact before it is.
- Only one thread calls a backend, but for `wake`. Where a peer does not come, the call or the wait raises
  `CollectiveError` (naming the ranks) once the world has failed or ``collective_timeout_s`` has passed; it never waits
  silently.

``label`` says what an operation works on, for errors and the timeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hvdlite.counters import Traffic
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.memory.base import Memory
from hvdlite.memory.layout import ALIGNMENT, Layout, Range, align_up, windows
from hvdlite.memory.views import Buffer
from hvdlite.recorder import NO_SPAN, Lane, Recorder

if TYPE_CHECKING:
    from hvdlite._native import DirectCall, Moment, ReadyCounts, TensorList
    from hvdlite.collectives.node_gather import NodeGather
    from hvdlite.config import Config

LARGEST_MESSAGE_BYTES = 1 << 30  # MPI counts are 32-bit before MPI 4
LATE_GPU = "this rank's GPU did not come so far"


class Completion(ABC):
    """The end of an operation that a backend has begun."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the operation is complete. May be called again.

        Raises:
            CollectiveError: it did not complete; the buffer is undefined.
        """


class Done(Completion):
    """Of an operation that was complete when its call returned."""

    def poll(self) -> bool:
        """It is complete."""
        return True

    def wait(self) -> None:
        """Return at once."""


DONE = Done()


class TensorReduction(NamedTuple):
    """What is reduced over ranks: tensors as they lie in ``layout``, and how.

    Attributes:
        outputs: may be the same memory as ``inputs``.
    """

    inputs: TensorList
    outputs: TensorList
    layout: Layout
    reduction: Reduction = SUM


class ScatterReduction(NamedTuple):
    """What is reduced so that each rank gets another part: this rank's, and how.

    Attributes:
        inputs: addresses of what this rank gives to each rank; 0: zeros that nobody stored.
        output: address of what it gets; 0: nobody wants it.
        numels: elements that each rank gets.
    """

    inputs: Sequence[int]
    output: int
    numels: Sequence[int]
    dtype: DType
    reduction: Reduction = SUM


class PreparedCall(Protocol):
    """See `Backend.prepare_allreduce`, and `hvdlite._native.DirectCall` for what it returns."""

    @property
    def direct(self) -> DirectCall | None:
        """What does the same without Python, if there is something."""

    def run(self, inputs: Sequence[int], outputs: Sequence[int], plan: int, count: int, heard: int, /) -> int: ...

    def last(self) -> tuple[int, int, int]: ...

    def ready_ns(self) -> int:
        """When all were ready; 0 where the call has recorded all that it did."""

    def resume(self, result: int, /) -> int:
        """Go on where `run` or `direct` has returned ``result``, which is neither done nor late; what one of these is
        now. Raises CollectiveError, or why the job has failed."""

    def count_done(self, times: int, /) -> None:
        """So often `run` or `direct` has returned that it was done."""


class EnqueuingCall(PreparedCall, Protocol):
    """See `Backend.prepare_enqueuing`."""

    def use_stream(self, stream: int, /) -> None:
        """The driver's handle of the stream on which the caller of the next `run` works."""

    def take_done(self) -> Moment | None:
        """Reached once the GPU has done the last that was enqueued; once for each."""


class Backend(ABC):
    """Collectives between ``size`` ranks, of which this one is ``rank``."""

    rank: int
    size: int
    memory: Memory
    recorder: Recorder
    small_bytes: int = 0
    """Up to so many it takes `allreduce_tensors` less time than `allreduce`, wherever the tensors are."""
    gather: NodeGather | None = None
    """By which the ranks of a node tell one another how much they give."""

    @abstractmethod
    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        """Reduce ``buf`` over all ranks, in place. The op of ``reduction`` is never AVERAGE or ADASUM."""

    def allreduce_tensors(self, job: TensorReduction, *, staging: Buffer, label: str = "") -> Completion:
        """Allreduce tensors that live anywhere, by way of a buffer.

        Args:
            staging: of the type in which they travel. As much as it holds is on its way at a time.
        """
        inputs, outputs, layout, reduction = job
        for begin, end in windows(layout.end, staging.numel):
            part = staging.narrow(0, end - begin)
            with self._span(Lane.PACK, part.nbytes, part.dtype, label):
                self.memory.pack(inputs, layout.dtype, part, begin)
            self.allreduce(part, reduction, label=label).wait()
            with self._span(Lane.UNPACK, part.nbytes, part.dtype, label):
                self.memory.unpack(part, begin, outputs, layout.dtype)
        return DONE

    def prepare_allreduce(
        self,
        counts: ReadyCounts,
        layout: Layout,
        reduction: Reduction,
        home: Buffer | None,
        patience_s: float,
        label: str,
    ) -> PreparedCall | None:
        """`allreduce_tensors`, or `allreduce` of ``home``, as one call that also waits until all ranks are ready.

        It does what those do, so that ranks may do the one or the other. None: there is no such call.

        Args:
            home: of tensors as they lie in ``layout``; None where they live elsewhere.
            patience_s: how long the call waits for ranks to be ready, before it returns.
        """
        return None

    def prepare_enqueuing(
        self, counts: ReadyCounts, layout: Layout, reduction: Reduction, staging: Buffer, patience_s: float
    ) -> EnqueuingCall | None:
        """Likewise `allreduce_tensors` on GPUs, after and before what the caller's stream does."""
        return None

    def prepare_gather(
        self,
        counts: ReadyCounts,
        numbers: Sequence[int],
        column: int,
        row_bytes: int,
        is_alltoall: bool,
        patience_s: float,
        label: str,
    ) -> PreparedCall | None:
        """Likewise what `gather` tells and gives, where that is expected to be what it was the last time.

        Args:
            numbers: of rows that this rank gives, one after the other.
            column: of the numbers of each rank, whose rows this rank gets.
            row_bytes: of a row.
            is_alltoall: there is a number for each rank; else all get the same rows.
        """
        return None

    def prepare_reduce_scatter(
        self,
        counts: ReadyCounts,
        numels: Sequence[int],
        dtype: DType,
        wire_dtype: DType,
        reduction: Reduction,
        patience_s: float,
        label: str,
    ) -> PreparedCall | None:
        """Likewise `reduce_scatter_tensors` of one tensor, of which each rank gets so many elements."""
        return None

    def prepare_broadcast(
        self, counts: ReadyCounts, nbytes: int, root: int, patience_s: float, label: str
    ) -> PreparedCall | None:
        """Likewise `broadcast_tensors` of one tensor of rank ``root`` of this backend; other ranks give address 0."""
        return None

    def prepare_barrier(self, counts: ReadyCounts, patience_s: float, label: str) -> PreparedCall | None:
        """Likewise of nothing: it is done once all ranks are ready."""
        return None

    @abstractmethod
    def reduce_scatter(
        self,
        buf: Buffer,
        blocks: Sequence[Sequence[Range]],
        reduction: Reduction = SUM,
        *,
        stays_open: bool = False,
        label: str = "",
    ) -> Completion:
        """Reduce in place so that rank r holds the ranges ``blocks[r]``; the rest of every copy is undefined then.

        Ranges do not overlap and need not cover the buffer; a rank may have none, or several.

        Args:
            stays_open: the next operation on ``buf`` here is an `allgather` that closes it. Until then a rank changes
                nothing of its copy but its own ranges, since other ranks may still read all else in it.
        """

    @abstractmethod
    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        """Fill every copy: rank r has written the ranges ``blocks[r]`` of its own copy, and all get all of them.

        Ranges do not overlap and need not cover the buffer; a rank may have none, or several.

        Args:
            closes: no rank has touched its copy since the last operation on ``buf`` here, but for its own ranges.
        """

    @abstractmethod
    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        """Copy rank ``root``'s copy to every rank's."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    # Tensors that live anywhere, by way of ``staging``. As much as it holds is on its way at a time.

    def broadcast_tensors(
        self, tensors: TensorList, nbytes: int, root: int, *, staging: Buffer, label: str = ""
    ) -> None:
        """Make ``tensors``, single bytes in a layout of ``nbytes``, those of rank ``root``."""
        byte = DType.UINT8
        for begin, end in windows(nbytes, staging.numel):
            part = staging.narrow(0, end - begin)
            if self.rank == root:
                with self._span(Lane.PACK, part.nbytes, byte, label):
                    self.memory.pack(tensors, byte, part, begin)
            self.broadcast(part, root, label=label).wait()
            if self.rank != root:
                with self._span(Lane.UNPACK, part.nbytes, byte, label):
                    self.memory.unpack(part, begin, tensors, byte)

    def allgather_tensors(
        self, source: int, targets: Sequence[int], nbytes: Sequence[int], *, staging: Buffer, label: str = ""
    ) -> None:
        """Rank r gives nbytes[r] bytes, which it has at ``source``, and all others get at targets[r].

        Args:
            targets: 0 where this rank does not want them.
        """
        byte, rank, memory = DType.UINT8, self.rank, self.memory
        bounds = [0, *accumulate(nbytes)]
        results = memory.tensors(list(targets), list(nbytes), bounds[:-1])
        own = memory.tensors([source], [nbytes[rank]], [0])
        for begin, end in windows(bounds[-1], staging.numel):
            part = staging.narrow(0, end - begin)
            clipped = [min(max(bound, begin), end) - begin for bound in bounds]
            blocks = [[(start, stop)] if stop > start else [] for start, stop in pairwise(clipped)]
            with self._span(Lane.PACK, part.nbytes, byte, label):
                for start, stop in blocks[rank]:
                    memory.pack(own, byte, part.narrow(start, stop), begin + start - bounds[rank])
            self.allgather(part, blocks, label=label).wait()
            with self._span(Lane.UNPACK, part.nbytes, byte, label):
                memory.unpack(part, begin, results, byte)

    def reduce_scatter_tensors(self, job: ScatterReduction, *, staging: Buffer, label: str = "") -> None:
        """Reduce what all ranks give to each, into what each gets. Block r of ``staging`` is the next part of rank r's.

        Args:
            staging: of the type in which they travel.
        """
        inputs, output, numels, dtype, reduction = job
        memory, rank, size, wire_dtype = self.memory, self.rank, self.size, staging.dtype
        per_line = ALIGNMENT // wire_dtype.itemsize
        for begin, end in windows(max(numels), staging.numel // size // per_line * per_line):
            step = align_up(end - begin, per_line)
            part = staging.narrow(0, size * step)
            counts = [max(0, min(numel, end) - begin) for numel in numels]
            addresses = [address and address + begin * dtype.itemsize for address in inputs]
            with self._span(Lane.PACK, part.nbytes, wire_dtype, label):
                memory.pack(memory.tensors(addresses, counts, [step * r for r in range(size)]), dtype, part, 0)
            blocks = [[(step * r, step * r + count)] if count else [] for r, count in enumerate(counts)]
            self.reduce_scatter(part, blocks, reduction, label=label).wait()
            own = part.narrow(step * rank, step * (rank + 1))
            with self._span(Lane.UNPACK, counts[rank] * wire_dtype.itemsize, wire_dtype, label):
                result = memory.tensors([output and output + begin * dtype.itemsize], [counts[rank]], [0])
                memory.unpack(own, 0, result, dtype)

    def prepare(self, buf: Buffer) -> None:
        """Take notice of new shared memory, ``buf`` as a whole, in which operations will be; a collective call."""

    def withdraw(self) -> None:
        """What prepared calls have begun on some ranks, and not done, will not be; all ranks call it at one place."""

    def configure(self, config: Config) -> None:
        """Take over what of ``config`` may change between two operations; the same on every rank."""

    @property
    def traffic(self) -> Traffic:
        """What this rank has exchanged with other nodes."""
        return Traffic()

    def supports(self, dtype: DType) -> bool:
        """Whether it reduces ``dtype``, one of those that reduce; it moves every type."""
        return True

    def late(self) -> Sequence[int]:
        """Ranks of this backend that are behind this one, as far as it can tell where calls do not wait."""
        return ()

    def check_health(self) -> None:
        """Raise CollectiveError if something has failed that no call has met yet."""

    def wake(self) -> None:
        """Wake whoever waits in a call, so that it sees that the world has failed. From any thread."""

    def close(self) -> None:
        """Release what the backend owns; a collective call."""

    def _span(self, lane: Lane, nbytes: int, dtype: DType, label: str) -> AbstractContextManager[None]:
        """Records how long a ``with`` block takes, where that is asked for."""
        recorder = self.recorder
        return recorder.span(lane, label, nbytes, dtype.label) if recorder.enabled else NO_SPAN
