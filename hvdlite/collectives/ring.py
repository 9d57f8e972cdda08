"""Between nodes: recursive doubling, recursive halving and doubling, or a ring, over MPI point-to-point.

Messages are raw bytes of at most one segment, so MPI's counts never overflow and MPI need not know 16-bit floats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvdlite.collectives import algorithms
from hvdlite.collectives.base import DONE, LARGEST_MESSAGE_BYTES, Backend, Completion, scale
from hvdlite.collectives.bound import BoundSchedules
from hvdlite.collectives.pipeline import Pipeline
from hvdlite.collectives.requests import Endpoint
from hvdlite.collectives.schedule import WINDOW, Schedule
from hvdlite.collectives.thresholds import Limits, limits_of
from hvdlite.config import Config
from hvdlite.counters import Traffic
from hvdlite.dtypes import SUM, Reduction
from hvdlite.memory.base import Memory
from hvdlite.memory.layout import ALIGNMENT, Range, align_up
from hvdlite.memory.views import Buffer
from hvdlite.recorder import Lane, Recorder

if TYPE_CHECKING:
    from mpi4py import MPI


class RingBackend(Backend):
    """Collectives between the ranks of ``comm``, one per node; each owns its copy alone.

    A large operation has only put its first messages on their way when its call returns, so that the node can work
    meanwhile; the network does the rest of it in `Completion.wait`, or when the next operation begins.

    Args:
        comm: private to the thread that calls; its ranks stand in the order of the ring.
        ranks: what errors call the ranks of ``comm``; their number there, if None.
        segment_bytes: largest message: one travels while the one before it is reduced.
        limits: up to which size each algorithm is taken.
        timeout_s: the longest wait for one message.
        check: raises once the world has failed.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        memory: Memory,
        *,
        ranks: Sequence[int] | None = None,
        segment_bytes: int,
        limits: Limits,
        timeout_s: float,
        check: Callable[[], None],
        recorder: Recorder,
    ) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.memory = memory
        self.recorder = recorder
        self._endpoint = Endpoint(
            comm, ranks=range(comm.size) if ranks is None else ranks, timeout_s=timeout_s, check=check
        )
        self._in_flight: Completion = DONE
        self._use(segment_bytes, limits)

    def configure(self, config: Config) -> None:
        self._bound.close()
        self._use(config.segment_bytes, limits_of(config.small_bytes, self.size))

    def _use(self, segment_bytes: int, limits: Limits) -> None:
        self._segment_bytes = max(ALIGNMENT, min(segment_bytes, LARGEST_MESSAGE_BYTES))
        self._limits = limits
        self._scratch = _aligned_memory(WINDOW * self._segment_bytes)
        self._bound = BoundSchedules(self._endpoint, self._scratch.ctypes.data, self._segment_bytes)

    @property
    def traffic(self) -> Traffic:
        return self._endpoint.traffic

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        """By the algorithm that ``limits`` give; 16-bit floats are rounded after every addition."""
        if self.size == 1:
            scale(buf, reduction)
            return DONE
        call = (buf.address, buf.numel, buf.dtype, reduction)
        bound = self._bound.get(call)
        if bound is not None:
            self._in_flight.wait()
            with self._span(Lane.RING, buf.nbytes, buf.dtype, label):
                bound.run("allreduce", label, buf.owner, self._scratch)
            return DONE
        algorithm, itemsize = self._limits.algorithm(buf.nbytes), buf.dtype.itemsize
        schedule = algorithms.allreduce(
            algorithm, buf.numel, itemsize, self.rank, self.size, self._segment_bytes, reduction
        )
        completion = self._begin(schedule, Lane.RING, "allreduce", buf, label)
        self._bound.called(call, schedule, buf)
        return completion

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
            scale(buf, reduction)
            return DONE
        itemsize = buf.dtype.itemsize
        algorithm = self._limits.algorithm(_total(blocks) * itemsize)
        schedule = algorithms.reduce_scatter(algorithm, blocks, self.rank, self._segment_bytes // itemsize, reduction)
        return self._begin(schedule, Lane.RING, "reduce_scatter", buf, label)

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
        schedule = algorithms.allgather(algorithm, blocks, self.rank, self._segment_bytes // itemsize)
        return self._begin(schedule, Lane.ALLGATHER, "allgather", buf, label)

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        """Down a binomial tree, log2(n) steps; what is large, along a pipelined chain: nbytes per rank."""
        is_small = buf.nbytes <= self._limits.tree_bytes
        make = algorithms.tree_broadcast if is_small else algorithms.chain_broadcast
        schedule = make(buf.numel, root, self.rank, self.size, self._segment_bytes // buf.dtype.itemsize)
        return self._begin(schedule, Lane.BROADCAST, "broadcast", buf, label)

    def barrier(self) -> None:
        """Dissemination: log2(n) rounds (Hensgen, Finkel & Manber 1988, doi:10.1007/BF01379320)."""
        self._in_flight.wait()
        with self._endpoint.operation("barrier", ""):
            distance = 1
            while distance < self.size:
                ahead = (self.rank + distance) % self.size
                behind = (self.rank - distance) % self.size
                arrival = self._endpoint.receive(0, 0, behind)
                departure = self._endpoint.send(0, 0, ahead)
                self._endpoint.wait(behind, arrival)
                self._endpoint.wait(ahead, departure)
                distance *= 2

    def close(self) -> None:
        self._bound.close()

    def _begin(self, schedule: Schedule, lane: Lane, operation: str, buf: Buffer, label: str) -> Completion:
        self._in_flight.wait()  # it has the scratch memory
        self._in_flight = _InFlight(self, schedule, lane, operation, buf, label)
        return self._in_flight


class _InFlight(Completion):
    """An operation of ``ring`` of which the first messages are on their way."""

    def __init__(
        self, ring: RingBackend, schedule: Schedule, lane: Lane, operation: str, buf: Buffer, label: str
    ) -> None:
        self._endpoint = ring._endpoint
        self._recorder = ring.recorder
        self._lane, self._label = lane, label
        self._buf, self._scratch = buf, ring._scratch
        self._began_ns = time.monotonic_ns()
        self._is_over = False
        self._pipeline = Pipeline(schedule, buf, self._endpoint, self._scratch.ctypes.data, ring._segment_bytes)
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
        try:
            work()
        except BaseException as error:
            self._is_over = True
            self._endpoint.fail(error, (), self._buf.owner, self._scratch)


def _total(blocks: Sequence[Sequence[Range]]) -> int:
    return sum(stop - start for ranges in blocks for start, stop in ranges)


def _aligned_memory(nbytes: int) -> np.ndarray:
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + align_up(max(nbytes, 1))]
