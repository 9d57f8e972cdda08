"""Between nodes: recursive doubling, recursive halving and doubling, or a ring, over MPI point-to-point.

Messages are raw bytes of at most one segment, so MPI's counts never overflow and MPI need not know 16-bit floats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

from hvdlite import _native
from hvdlite.collectives import algorithms
from hvdlite.collectives.across_nodes import AcrossNodes
from hvdlite.collectives.adder import Adder
from hvdlite.collectives.base import DONE, LARGEST_MESSAGE_BYTES, Completion
from hvdlite.collectives.bound import BoundSchedule, BoundSchedules
from hvdlite.collectives.bound_pipeline import BoundPipeline
from hvdlite.collectives.pipeline import Pipeline
from hvdlite.collectives.requests import Endpoint
from hvdlite.collectives.schedule import WINDOW, Schedule, scaling
from hvdlite.collectives.thresholds import Limits, limits_of
from hvdlite.config import Config
from hvdlite.counters import Traffic
from hvdlite.dtypes import SUM, Reduction
from hvdlite.memory.base import Memory, Region
from hvdlite.memory.layout import ALIGNMENT, Range
from hvdlite.memory.views import Buffer
from hvdlite.recorder import Lane, Recorder

_LANES = {
    "allreduce": Lane.RING,
    "reduce_scatter": Lane.RING,
    "allgather": Lane.ALLGATHER,
    "broadcast": Lane.BROADCAST,
}


class RingBackend(AcrossNodes):
    """Collectives between the ranks of ``endpoint``, one per node; each owns its copy alone.

    A large operation has only put its first messages on their way when its call returns, so that the node can work
    meanwhile; the network does the rest of it in `Completion.wait`, or when the next operation begins.

    Args:
        endpoint: its ranks stand in the order of the ring.
        adder: of ``memory``, and of nobody else.
        segment_bytes: unit of overlap: messages of one segment, or of so many as ``adder`` says, travel while those
            before them are reduced.
        limits: up to which size each algorithm is taken.

    Attributes:
        endpoint: by which it sends and receives.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        memory: Memory,
        adder: Adder,
        *,
        segment_bytes: int,
        limits: Limits,
        recorder: Recorder,
    ) -> None:
        self.rank = endpoint.rank
        self.size = endpoint.size
        self.memory = memory
        self.recorder = recorder
        self.endpoint = endpoint
        self._adder = adder
        self._in_flight: Completion = DONE
        self._scratch = Region(0, 0, None)
        self._use(segment_bytes, limits)

    def configure(self, config: Config) -> None:
        super().configure(config)
        self._in_flight.wait()
        self._bound.close()
        self._use(config.segment_bytes, limits_of(config.small_bytes, self.size))

    def _use(self, segment_bytes: int, limits: Limits) -> None:
        self._message_bytes = max(ALIGNMENT, min(segment_bytes * self._adder.segments, LARGEST_MESSAGE_BYTES))
        self._limits = limits
        if WINDOW * self._message_bytes > self._scratch.nbytes:
            self._scratch = self._adder.scratch(WINDOW * self._message_bytes)
        self._bound = BoundSchedules(self.endpoint, self._scratch.address, self._message_bytes)

    @property
    def traffic(self) -> Traffic:
        return self.endpoint.traffic

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        """By the algorithm that ``limits`` give; 16-bit floats are rounded after every addition."""
        if self.size == 1:
            return self._scale(buf, reduction)
        return self._perform("allreduce", buf, reduction, lambda: self._schedule(buf, reduction), label)

    def bound_allreduce(self, buf: Buffer, reduction: Reduction) -> BoundSchedule:
        """What `begin_allreduce` begins, which is called after everything else has come to its end."""
        assert self._adder.is_immediate
        self._in_flight.wait()
        call = _call("allreduce", buf, reduction)
        return self._bound.get(call) or self._bound.bind(call, self._schedule(buf, reduction), buf)

    def begin_allreduce(
        self,
        buf: Buffer,
        reduction: Reduction,
        label: str,
        by: Callable[[_native.BoundMessages], int] | None = None,
    ) -> BoundSchedule:
        """`allreduce` of up to `at_once_bytes`, which the caller brings to its end before anything else is called.

        Args:
            by: see `BoundSchedule.start`.
        """
        bound = self.bound_allreduce(buf, reduction)
        bound.start("allreduce", label, buf.owner, self._scratch, by=by)
        return bound

    def _schedule(self, buf: Buffer, reduction: Reduction) -> Schedule:
        algorithm, itemsize = self._limits.algorithm(buf.nbytes), buf.dtype.itemsize
        return algorithms.allreduce(
            algorithm, buf.numel, itemsize, self.rank, self.size, self._message_bytes, reduction
        )

    def reduce_scatter(
        self,
        buf: Buffer,
        blocks: Sequence[Sequence[Range]],
        reduction: Reduction = SUM,
        *,
        stays_open: bool = False,
        label: str = "",
    ) -> Completion:
        """By recursive halving, or around the ring; each rank sends every block but its own."""
        assert len(blocks) == self.size, (len(blocks), self.size)
        if self.size == 1:
            return self._scale(buf, reduction)
        piece_numel = self._message_bytes // buf.dtype.itemsize
        algorithm = self._limits.algorithm(_total(blocks) * buf.dtype.itemsize)
        return self._perform(
            "reduce_scatter",
            buf,
            (_hashable(blocks), reduction),
            lambda: algorithms.reduce_scatter(algorithm, blocks, self.rank, piece_numel, reduction),
            label,
        )

    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        """By recursive doubling of what a rank has, or around the ring.

        Recursive doubling sends a block log2(n) times from its own rank, so the largest one counts.
        """
        assert len(blocks) == self.size, (len(blocks), self.size)
        itemsize = buf.dtype.itemsize
        largest = max(_total([ranges]) for ranges in blocks)
        algorithm = self._limits.algorithm(largest * itemsize * self.size)
        return self._perform(
            "allgather",
            buf,
            _hashable(blocks),
            lambda: algorithms.allgather(algorithm, blocks, self.rank, self._message_bytes // itemsize),
            label,
        )

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        """Down a binomial tree, log2(n) steps; what is large, along a pipelined chain: nbytes per rank."""
        is_small = buf.nbytes <= self._limits.tree_bytes
        make = algorithms.tree_broadcast if is_small else algorithms.chain_broadcast
        piece_numel = self._message_bytes // buf.dtype.itemsize
        return self._perform(
            "broadcast", buf, root, lambda: make(buf.numel, root, self.rank, self.size, piece_numel), label
        )

    def barrier(self) -> None:
        """Dissemination: log2(n) rounds (Hensgen, Finkel & Manber 1988, doi:10.1007/BF01379320)."""
        self._in_flight.wait()
        self._adder.settle()
        with self.endpoint.operation("barrier", ""):
            distance = 1
            while distance < self.size:
                ahead = (self.rank + distance) % self.size
                behind = (self.rank - distance) % self.size
                arrival = self.endpoint.receive(0, 0, behind)
                departure = self.endpoint.send(0, 0, ahead)
                self.endpoint.wait(behind, arrival)
                self.endpoint.wait(ahead, departure)
                distance *= 2

    def close(self) -> None:
        self.early = None  # which refers to this backend
        self._bound.close()

    def _scale(self, buf: Buffer, reduction: Reduction) -> Completion:
        """What a reduction over this rank alone is."""
        self._adder.begin(scaling(buf, reduction))
        self._adder.end()
        return DONE

    def _perform(
        self, operation: str, buf: Buffer, details: Hashable, make: Callable[[], Schedule], label: str
    ) -> Completion:
        """``operation`` as ``make`` schedules it, which is the same whenever ``details`` and memory are.

        By what is bound of it, from the third time on.
        """
        self._in_flight.wait()  # it has the scratch memory
        call = _call(operation, buf, details)
        bound = self._bound.get(call)
        if bound is not None:
            with self._span(_LANES[operation], buf.nbytes, buf.dtype, label):
                bound.run(operation, label, buf.owner, self._scratch)
            return DONE
        pipeline = self._bound.pipeline(call)
        if pipeline is not None:
            self._in_flight = _InFlight(self, pipeline, operation, buf, label)
            return self._in_flight
        schedule = make()
        scratch = self._scratch.address
        unbound = Pipeline(schedule, buf, self.endpoint, self._adder, scratch, self._message_bytes)
        self._in_flight = _InFlight(self, unbound, operation, buf, label)
        if self._adder.is_immediate:
            self._bound.called(call, schedule, buf)
        return self._in_flight


class _InFlight(Completion):
    """An operation of ``ring`` of which the first messages are on their way."""

    def __init__(
        self,
        ring: RingBackend,
        pipeline: Pipeline | BoundPipeline,
        operation: str,
        buf: Buffer,
        label: str,
    ) -> None:
        self._endpoint = ring.endpoint
        self._adder = ring._adder
        self._recorder = ring.recorder
        self._lane, self._label = _LANES[operation], label
        self._buf, self._scratch = buf, ring._scratch
        self._began_ns = time.monotonic_ns()
        self._is_over = False
        self._pipeline = pipeline
        self._endpoint.begin(operation, label)
        self._attempt(self._pipeline.start)

    def wait(self) -> None:
        if self._is_over:
            return
        self._attempt(self._pipeline.finish)
        self._is_over = True
        self._endpoint.done()
        buf = self._buf
        now_ns = time.monotonic_ns()
        self._recorder.add(self._lane, self._label, self._began_ns, now_ns, buf.nbytes, buf.dtype.label)
        del self._pipeline, self._buf, self._scratch  # which would live until the next operation

    def _attempt(self, work: Callable[[], None]) -> None:
        with self._adder.context():
            try:
                work()
            except BaseException as error:
                self._is_over = True
                self._endpoint.fail(error, self._pipeline.receives, self._pipeline, self._buf.owner, self._scratch)


def _call(operation: str, buf: Buffer, details: Hashable) -> Hashable:
    return operation, buf.address, buf.numel, buf.dtype, details


def _hashable(blocks: Sequence[Sequence[Range]]) -> Hashable:
    return tuple(map(tuple, blocks))


def _total(blocks: Sequence[Sequence[Range]]) -> int:
    return sum(stop - start for ranges in blocks for start, stop in ranges)
