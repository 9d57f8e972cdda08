"""Between nodes: a ring for large messages, recursive doubling for small ones, over MPI point-to-point.

Messages are raw bytes of at most one segment, so MPI's counts never overflow and MPI need not know 16-bit floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from hvdlite import _native
from hvdlite.collectives import pipeline
from hvdlite.collectives.base import LARGEST_MESSAGE_BYTES, Backend, Range
from hvdlite.collectives.requests import Endpoint
from hvdlite.config import Config
from hvdlite.counters import Traffic
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.memory import ALIGNMENT, Buffer, align_up, shard_bounds
from hvdlite.timeline.recorder import Lane, Recorder

if TYPE_CHECKING:
    from mpi4py import MPI


class RingBackend(Backend):
    """Collectives between the ranks of ``comm``, one per node; each owns its buffer alone.

    Args:
        comm: private to the thread that calls; its ranks stand in the order of the ring.
        ranks: what errors call the ranks of ``comm``; their number there, if None.
        segment_bytes: largest message: one travels while the one before it is reduced.
        small_bytes: up to this size, recursive doubling and trees; above, the ring and chains. Recursive doubling goes
            further on more than four ranks, see `doubling_bytes`.
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
        small_bytes: int,
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
        self._use(segment_bytes, small_bytes)

    def configure(self, config: Config) -> None:
        self._use(config.segment_bytes, config.small_bytes)

    def _use(self, segment_bytes: int, small_bytes: int) -> None:
        self._segment_bytes = max(ALIGNMENT, min(segment_bytes, LARGEST_MESSAGE_BYTES))
        self._small_bytes = min(small_bytes, LARGEST_MESSAGE_BYTES)
        self._doubling_bytes = min(doubling_bytes(small_bytes, self.size), LARGEST_MESSAGE_BYTES)
        self._scratch = _aligned_memory(max(self._doubling_bytes, pipeline.WINDOW * self._segment_bytes))

    @property
    def traffic(self) -> Traffic:
        return self._endpoint.traffic

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        memory = _aligned_memory(numel * dtype.itemsize)
        return Buffer((memory.ctypes.data,), 0, numel, dtype, memory)

    def allreduce(
        self, buf: Buffer, *, op: ReduceOp = ReduceOp.SUM, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        """Recursive doubling of what is small: log2(n) exchanges of the whole buffer.

        Above, reduce-scatter and allgather around the ring: 2(n-1) steps, 2(n-1)/n * nbytes sent per rank, which
        is bandwidth-optimal (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). 16-bit floats are rounded
        after every addition, n-1 times.
        """
        with self._operation(Lane.RING, "allreduce", buf):
            if buf.numel == 0:
                return
            if self.size == 1:
                _scale(buf, prescale, postscale)
            elif buf.nbytes <= self._doubling_bytes:
                self._recursive_doubling(buf, op, prescale, postscale)
            else:
                shards = self._shards(buf, self.size)
                plan = pipeline.plan_reduce_scatter(
                    shards, self.rank, self._piece_numel(buf), op, prescale, postscale
                ).then(pipeline.plan_allgather([[shard] for shard in shards], self.rank, self._piece_numel(buf)))
                self._run(plan, buf)

    def reduce_scatter(
        self,
        buf: Buffer,
        *,
        parts: int,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """Around the ring: n-1 steps, each rank sends every shard but its own."""
        assert 1 <= parts <= self.size, (parts, self.size)
        with self._operation(Lane.RING, "reduce_scatter", buf):
            if self.size == 1:
                _scale(buf, prescale, postscale)
                return
            shards = self._shards(buf, parts) + [(0, 0)] * (self.size - parts)
            self._run(
                pipeline.plan_reduce_scatter(shards, self.rank, self._piece_numel(buf), op, prescale, postscale), buf
            )

    def allgather(self, buf: Buffer, blocks: Sequence[Sequence[Range]]) -> None:
        """Around the ring: n-1 steps, each rank sends every block but that of its right neighbour."""
        assert len(blocks) == self.size, (len(blocks), self.size)
        with self._operation(Lane.ALLGATHER, "allgather", buf):
            if self.size > 1:
                self._run(pipeline.plan_allgather(blocks, self.rank, self._piece_numel(buf)), buf)

    def broadcast(self, buf: Buffer, root: int) -> None:
        """A binomial tree up to ``small_bytes``, log2(n) steps; above, a pipelined chain: nbytes per rank."""
        with self._operation(Lane.BROADCAST, "broadcast", buf):
            if buf.nbytes <= self._small_bytes or self.size == 1:
                self._tree_broadcast(buf, root)
            else:
                self._run(pipeline.plan_broadcast(buf.numel, root, self.rank, self.size, self._piece_numel(buf)), buf)

    def barrier(self) -> None:
        """Dissemination: log2(n) rounds (Hensgen, Finkel & Manber 1988, doi:10.1007/BF01379320)."""
        with self._endpoint.operation(self._activity("barrier")):
            distance = 1
            while distance < self.size:
                ahead = (self.rank + distance) % self.size
                behind = (self.rank - distance) % self.size
                arrival = self._endpoint.receive(0, 0, behind)
                departure = self._endpoint.send(0, 0, ahead)
                self._endpoint.wait(behind, arrival)
                self._endpoint.wait(ahead, departure)
                distance *= 2

    def _recursive_doubling(self, buf: Buffer, op: ReduceOp, prescale: float, postscale: float) -> None:
        """Partners exchange and combine, at distances 1, 2, 4, ...; each combines lower ranks with higher ones.

        So every rank computes the same expression, and gets the same bits. Of n = 2^k + m ranks, the first m pairs
        act as one rank each.
        """
        power = 1 << (self.size.bit_length() - 1)
        pairs = self.size - power
        own = self.rank
        scale = prescale
        if self.rank < 2 * pairs:
            partner = self.rank ^ 1
            if self.rank % 2 == 1:
                self._endpoint.wait(partner, self._endpoint.send(buf.address, buf.nbytes, partner))
                self._endpoint.wait(partner, self._endpoint.receive(buf.address, buf.nbytes, partner))
                return
            self._endpoint.wait(partner, self._endpoint.receive(self._scratch_address, buf.nbytes, partner))
            self._combine(buf, partner, op, prescale, 1.0)
            own = self.rank // 2
            scale = 1.0
        elif pairs > 0:
            _scale(buf, prescale, 1.0)
            own = self.rank - pairs
            scale = 1.0
        distance = 1
        while distance < power:
            partner = own ^ distance
            partner = 2 * partner if partner < pairs else partner + pairs
            arrival = self._endpoint.receive(self._scratch_address, buf.nbytes, partner)
            departure = self._endpoint.send(buf.address, buf.nbytes, partner)
            self._endpoint.wait(partner, arrival, departure)
            distance *= 2
            self._combine(buf, partner, op, scale, postscale if distance == power else 1.0)
            scale = 1.0
        if self.rank < 2 * pairs:
            self._endpoint.wait(self.rank + 1, self._endpoint.send(buf.address, buf.nbytes, self.rank + 1))

    def _combine(self, buf: Buffer, partner: int, op: ReduceOp, prescale: float, postscale: float) -> None:
        operands = [buf.address, self._scratch_address]
        if partner < self.rank:
            operands.reverse()
        _native.reduce([buf.address], operands, buf.numel, buf.dtype, op, prescale, postscale)

    def _tree_broadcast(self, buf: Buffer, root: int) -> None:
        if buf.numel == 0:
            return
        place = (self.rank - root) % self.size
        distance = 1
        while distance < self.size and place % (2 * distance) == 0:
            distance *= 2
        if place > 0:
            parent = (place - distance + root) % self.size
            self._endpoint.wait(parent, self._endpoint.receive(buf.address, buf.nbytes, parent))
        departures = []
        while distance > 1:
            distance //= 2
            if place + distance < self.size:
                child = (place + distance + root) % self.size
                departures.append((child, self._endpoint.send(buf.address, buf.nbytes, child)))
        for child, departure in departures:
            self._endpoint.wait(child, departure)

    def _run(self, plan: pipeline.Plan, buf: Buffer) -> None:
        pipeline.run(plan, buf, self._endpoint, self._scratch_address, self._segment_bytes)

    def _shards(self, buf: Buffer, parts: int) -> list[Range]:
        return [shard_bounds(buf.numel, parts, part, buf.dtype.itemsize) for part in range(parts)]

    def _piece_numel(self, buf: Buffer) -> int:
        return self._segment_bytes // buf.dtype.itemsize

    @property
    def _scratch_address(self) -> int:
        return self._scratch.ctypes.data

    @contextmanager
    def _operation(self, lane: Lane, name: str, buf: Buffer) -> Iterator[None]:
        with (
            self._recorder.span(lane, self.label, buf.nbytes, buf.dtype.label),
            self._endpoint.operation(self._activity(name), buf.owner, self._scratch),
        ):
            yield

    def _activity(self, operation: str) -> str:
        return f"{operation} '{self.label}'" if self.label else operation


def doubling_bytes(small_bytes: int, ranks: int) -> int:
    """Up to where recursive doubling is faster than the ring, if on four ranks it is up to ``small_bytes``.

    It takes log2(n) steps of all bytes, the ring 2(n-1) steps of 1/n of them. If a step costs a, and b for each byte,
    they are equal at a/b * (2(n-1) - log2(n)) / (log2(n) - 2(n-1)/n) bytes: 8 a/b on 4 ranks, 454 a/b on 2048.
    """
    if ranks <= 4:
        return small_bytes
    rounds = math.log2(ranks)
    return int(small_bytes / 8 * (2 * (ranks - 1) - rounds) / (rounds - 2 * (ranks - 1) / ranks))


def _scale(buf: Buffer, prescale: float, postscale: float) -> None:
    if prescale != 1.0 or postscale != 1.0:
        _native.reduce([buf.address], [buf.address], buf.numel, buf.dtype, ReduceOp.SUM, prescale, postscale)


def _aligned_memory(nbytes: int) -> np.ndarray:
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + align_up(max(nbytes, 1))]
