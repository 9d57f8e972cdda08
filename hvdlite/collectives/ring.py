"""Between nodes: recursive doubling, recursive halving and doubling, or a ring, over MPI point-to-point.

Messages are raw bytes of at most one segment, so MPI's counts never overflow and MPI need not know 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from hvdlite import _native
from hvdlite.collectives import pipeline, plans
from hvdlite.collectives.base import LARGEST_MESSAGE_BYTES, Backend, Range
from hvdlite.collectives.bound import BoundPlans
from hvdlite.collectives.requests import Endpoint
from hvdlite.collectives.select import Limits, limits_of
from hvdlite.config import Config
from hvdlite.counters import Traffic
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.memory import ALIGNMENT, Buffer, align_up, shard_bounds
from hvdlite.timeline.recorder import Lane, Recorder

if TYPE_CHECKING:
    from mpi4py import MPI

    from hvdlite.collectives.pipeline import Plan


class RingBackend(Backend):
    """Collectives between the ranks of ``comm``, one per node; each owns its buffer alone.

    Args:
        comm: private to the thread that calls; its ranks stand in the order of the ring.
        ranks: what errors call the ranks of ``comm``; their number there, if None.
        segment_bytes: largest message: one travels while the one before it is reduced.
        limits: up to which size each algorithm is taken.
        timeout_s: the longest wait for one message.
        check: raises once the job has failed.

    Attributes:
        label: what the next operation works on, for errors and the timeline.
    """

    def __init__(
        self,
        comm: MPI.Comm,
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
        self.label = ""
        self._endpoint = Endpoint(
            comm, ranks=range(comm.size) if ranks is None else ranks, timeout_s=timeout_s, check=check
        )
        self._recorder = recorder
        self._use(segment_bytes, limits)

    def configure(self, config: Config) -> None:
        self._bound.close()
        self._use(config.segment_bytes, limits_of(config.small_bytes, self.size))

    def _use(self, segment_bytes: int, limits: Limits) -> None:
        self._segment_bytes = max(ALIGNMENT, min(segment_bytes, LARGEST_MESSAGE_BYTES))
        self._limits = limits
        self._scratch = _aligned_memory(pipeline.WINDOW * self._segment_bytes)
        self._bound = BoundPlans(self._endpoint, self._scratch.ctypes.data, self._segment_bytes)

    @property
    def traffic(self) -> Traffic:
        return self._endpoint.traffic

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        memory = _aligned_memory(numel * dtype.itemsize)
        return Buffer((memory.ctypes.data,), 0, numel, dtype, memory)

    def allreduce(
        self, buf: Buffer, *, op: ReduceOp = ReduceOp.SUM, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        """By the algorithm that ``limits`` give; 16-bit floats are rounded after every addition.

        Raises:
            CollectiveError: MPI failed, or a rank did not come; ``buf`` is undefined.
        """
        if self.size == 1:
            _scale(buf, prescale, postscale)
            return
        call = (buf.address, buf.numel, buf.dtype, op, prescale, postscale)
        bound = self._bound.get(call)
        if bound is not None:
            if not self._recorder.enabled:
                bound.run("allreduce", self.label, buf.owner, self._scratch)
                return
            with self._span(Lane.RING, buf):
                bound.run("allreduce", self.label, buf.owner, self._scratch)
            return
        plan = self._allreduce_plan(buf, op, prescale, postscale)
        self._run(plan, Lane.RING, "allreduce", buf)
        self._bound.called(call, plan, buf)

    def allreduce_each(
        self,
        bufs: Sequence[Buffer],
        *,
        op: ReduceOp = ReduceOp.SUM,
        postscale: float = 1.0,
        prepare: Callable[[int], None],
        deliver: Callable[[int], None],
    ) -> None:
        """Allreduce each of ``bufs``, and while one is on its way prepare the next and deliver the one before.

        Args:
            prepare: called with the number of a buffer before it is sent.
            deliver: called with the number of a buffer once it is reduced, after the next has been prepared.

        Raises:
            CollectiveError: as `allreduce`; or what the two raise.
        """
        if len(bufs) == 1:
            prepare(0)
            self.allreduce(bufs[0], op=op, postscale=postscale)
            deliver(0)
            return
        memory, first = self._scratch, bufs[0]
        with (
            self._recorder.span(Lane.RING, self.label, sum(buf.nbytes for buf in bufs), first.dtype.label),
            self._endpoint.operation("allreduce", self.label, first.owner, memory),
        ):
            on_its_way: pipeline.Run | None = None
            for number, buf in enumerate(bufs):
                plan = self._allreduce_plan(buf, op, 1.0, postscale)
                prepare(number)
                if on_its_way is not None:
                    on_its_way.finish()
                following = pipeline.Run(plan, buf, self._endpoint, memory.ctypes.data, self._segment_bytes)
                following.start()
                if on_its_way is not None:
                    deliver(number - 1)
                on_its_way = following
            assert on_its_way is not None
            on_its_way.finish()
            deliver(len(bufs) - 1)

    def reduce_scatter(
        self,
        buf: Buffer,
        *,
        parts: int,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """By recursive halving, or around the ring; each rank sends every shard but its own."""
        assert 1 <= parts <= self.size, (parts, self.size)
        if self.size == 1:
            _scale(buf, prescale, postscale)
            return
        itemsize = buf.dtype.itemsize
        shards = [shard_bounds(buf.numel, parts, part, itemsize) for part in range(parts)]
        shards += [(0, 0)] * (self.size - parts)
        algorithm, piece_numel = self._limits.algorithm(buf.nbytes), self._segment_bytes // itemsize
        plan = plans.reduce_scatter(algorithm, shards, self.rank, piece_numel, op, prescale, postscale)
        self._run(plan, Lane.RING, "reduce_scatter", buf)

    def allgather(self, buf: Buffer, blocks: Sequence[Sequence[Range]]) -> None:
        """By recursive doubling of what a rank has, or around the ring.

        Recursive doubling sends a block log2(n) times from its own rank, so the largest one counts.
        """
        assert len(blocks) == self.size, (len(blocks), self.size)
        itemsize = buf.dtype.itemsize
        largest = max(sum(stop - start for start, stop in ranges) for ranges in blocks)
        algorithm = self._limits.algorithm(largest * itemsize * self.size)
        plan = plans.allgather(algorithm, blocks, self.rank, self._segment_bytes // itemsize)
        self._run(plan, Lane.ALLGATHER, "allgather", buf)

    def broadcast(self, buf: Buffer, root: int) -> None:
        """Down a binomial tree, log2(n) steps; what is large, along a pipelined chain: nbytes per rank."""
        make = plans.tree_broadcast if buf.nbytes <= self._limits.tree_bytes else plans.chain_broadcast
        plan = make(buf.numel, root, self.rank, self.size, self._segment_bytes // buf.dtype.itemsize)
        self._run(plan, Lane.BROADCAST, "broadcast", buf)

    def barrier(self) -> None:
        """Dissemination: log2(n) rounds (Hensgen, Finkel & Manber 1988, doi:10.1007/BF01379320)."""
        with self._endpoint.operation("barrier", self.label):
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

    def _allreduce_plan(self, buf: Buffer, op: ReduceOp, prescale: float, postscale: float) -> Plan:
        algorithm, itemsize = self._limits.algorithm(buf.nbytes), buf.dtype.itemsize
        return plans.allreduce(
            algorithm, buf.numel, itemsize, self.rank, self.size, self._segment_bytes, op, prescale, postscale
        )

    def _run(self, plan: Plan, lane: Lane, operation: str, buf: Buffer) -> None:
        memory = self._scratch
        with self._span(lane, buf), self._endpoint.operation(operation, self.label, buf.owner, memory):
            pipeline.run(plan, buf, self._endpoint, memory.ctypes.data, self._segment_bytes)

    def _span(self, lane: Lane, buf: Buffer) -> AbstractContextManager[None]:
        return self._recorder.span(lane, self.label, buf.nbytes, buf.dtype.label)


def _scale(buf: Buffer, prescale: float, postscale: float) -> None:
    if prescale != 1.0 or postscale != 1.0:
        _native.reduce([buf.address], [buf.address], buf.numel, buf.dtype, ReduceOp.SUM, prescale, postscale)


def _aligned_memory(nbytes: int) -> np.ndarray:
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + align_up(max(nbytes, 1))]
