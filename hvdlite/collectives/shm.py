"""One node: every rank maps the copies of all others, so nothing is sent; ranks read and write one another's memory.

Each operation starts with a barrier, before which nobody may touch a copy that is not its own, since its owner
may still be using it; and ends with one, after which nobody does, since its owner may go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from hvdlite import _native
from hvdlite.collectives.base import Backend, Range
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import CollectiveError
from hvdlite.memory import Buffer, align_up, shard_bounds
from hvdlite.node import Node
from hvdlite.timeline.recorder import Lane, Recorder

_PAGE_BYTES = 4096
_ALONE_BYTES = 128 << 10  # up to this, waiting for helpers takes longer than reducing alone


class ShmBackend(Backend):
    """Collectives between the ranks of ``node``.

    Args:
        barrier_address: of zeroed shared memory for the barrier, `_native.Barrier.bytes_needed` bytes; shared here
            (collectively) if None.
        spin_us: how long a wait spins before it sleeps.
        window_bytes: tensors in private memory pass through shared memory this much at a time; 0: not this way.
        timeout_s: the longest wait for the other ranks.
        check: raises once the job has failed; called after a wait was aborted.

    Attributes:
        label: what the next operation works on, for errors and the timeline.
    """

    def __init__(
        self,
        node: Node,
        *,
        barrier_address: int | None = None,
        spin_us: int,
        window_bytes: int = 0,
        timeout_s: float,
        check: Callable[[], None],
        recorder: Recorder,
    ) -> None:
        self.rank = node.local_rank
        self.size = node.local_size
        self.label = ""
        self._node = node
        self._timeout_s = timeout_s
        self._check = check
        self._recorder = recorder
        if self.size > 1:
            if barrier_address is None:
                self._page = node.share(_native.Barrier.bytes_needed(self.size))
                barrier_address = self._page.address
            self._barrier = _native.Barrier(barrier_address, self.rank, self.size, node.abort_address, spin_us)
        self._window_bytes = align_up(window_bytes) if self.size > 1 else 0
        if self._window_bytes:
            self._windows = self.allocate(_native.Barrier.STAGING_WINDOWS * self._window_bytes, DType.UINT8)

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        stride = align_up(numel * dtype.itemsize, _PAGE_BYTES)
        segment = self._node.share(self.size * stride)
        copies = tuple(segment.address + rank * stride for rank in range(self.size))
        return Buffer(copies, self.rank, numel, dtype, segment)

    def allreduce(
        self, buf: Buffer, *, op: ReduceOp = ReduceOp.SUM, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        """Barrier; each rank reduces its shard from all copies into all copies; barrier.

        Every byte is read once and written once per copy, which is the floor.
        """
        with self._span(Lane.NODE_ALLREDUCE, buf):
            if self.size == 1:
                _scale(buf, prescale, postscale)
                return
            status = self._barrier.allreduce(buf.copies, buf.numel, buf.dtype, op, prescale, postscale, self._timeout_s)
            self._expect_ok(status, "allreduce")

    def allreduce_tensors(
        self,
        inputs: _native.TensorList,
        outputs: _native.TensorList,
        numel: int,
        dtype: DType,
        wire_dtype: DType,
        *,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> bool:
        """In windows that stay in cache: unpack one while packing another, and reduce my shard of the one between.

        All of it is one call: while the main thread computes, taking the GIL back costs up to 5 ms each time.
        """
        if not self._window_bytes:
            return False
        with self._recorder.span(Lane.NODE_ALLREDUCE, self.label, numel * wire_dtype.itemsize, wire_dtype.label):
            status = self._barrier.staged_allreduce(
                inputs,
                outputs,
                self._windows.copies,
                self._window_bytes // wire_dtype.itemsize,
                numel,
                dtype,
                wire_dtype,
                op,
                prescale,
                postscale,
                self._timeout_s,
            )
            self._expect_ok(status, "allreduce")
        return True

    def reduce_scatter(
        self,
        buf: Buffer,
        *,
        parts: int,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        self.open_reduce_scatter(buf, parts=parts, op=op, prescale=prescale, postscale=postscale)
        self.barrier()

    def open_reduce_scatter(
        self,
        buf: Buffer,
        *,
        parts: int,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """A `reduce_scatter` that leaves the copies open, to be ended by `close_allgather`.

        Until then a rank may change its part of its own copy; other ranks may still be reading all else in it.
        """
        assert 1 <= parts <= self.size, (parts, self.size)
        with self._span(Lane.NODE_REDUCE_SCATTER, buf):
            if self.size == 1:
                _scale(buf, prescale, postscale)
                return
            self._meet("reduce_scatter")
            if parts == self.size or buf.nbytes <= _ALONE_BYTES:
                if self.rank < parts:
                    bounds = shard_bounds(buf.numel, parts, self.rank, buf.dtype.itemsize)
                    self._reduce_into(self.rank, buf, bounds, op, prescale, postscale)
                return
            # Ranks without a part help those that have one, who must then wait for them.
            start, stop = shard_bounds(buf.numel, self.size, self.rank, buf.dtype.itemsize)
            for part in range(parts):
                first, last = shard_bounds(buf.numel, parts, part, buf.dtype.itemsize)
                self._reduce_into(part, buf, (max(start, first), min(stop, last)), op, prescale, postscale)
            self._meet("reduce_scatter")

    def allgather(self, buf: Buffer, blocks: Sequence[Sequence[Range]]) -> None:
        """Each rank copies an equal share of all bytes, wherever they are, into the other copies."""
        assert len(blocks) == self.size, (len(blocks), self.size)
        with self._span(Lane.NODE_ALLGATHER, buf):
            self._distribute("allgather", buf, blocks)

    def close_allgather(self, buf: Buffer, ranges: Sequence[Range]) -> None:
        """Copy ``ranges`` of this rank's copy into all others; on return every rank has.

        For copies that are open, because all ranks are between `open_reduce_scatter` or `allgather` and this.
        """
        with self._span(Lane.NODE_ALLGATHER, buf):
            if self.size == 1:
                return
            for start, stop in ranges:
                self._copy_from(self.rank, buf, start, stop)
            self._meet("allgather")

    def broadcast(self, buf: Buffer, root: int) -> None:
        """An allgather in which ``root`` has everything: all ranks share the work."""
        with self._span(Lane.BROADCAST, buf):
            self._distribute("broadcast", buf, [[(0, buf.numel)] if r == root else [] for r in range(self.size)])

    def barrier(self) -> None:
        if self.size > 1:
            self._meet("barrier")

    def _distribute(self, operation: str, buf: Buffer, blocks: Sequence[Sequence[Range]]) -> None:
        if self.size == 1:
            return
        self._meet(operation)
        for owner, start, stop in share_of(blocks, self.size, self.rank, buf.dtype.itemsize):
            self._copy_from(owner, buf, start, stop)
        self._meet(operation)

    def _reduce_into(
        self, rank: int, buf: Buffer, bounds: Range, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        """Reduce elements ``bounds`` of all copies into the copy of ``rank``."""
        start, stop = bounds
        if start < stop:
            sources = [copy + start * buf.dtype.itemsize for copy in buf.copies]
            _native.reduce([sources[rank]], sources, stop - start, buf.dtype, op, prescale, postscale)

    @staticmethod
    def _copy_from(rank: int, buf: Buffer, start: int, stop: int) -> None:
        """Copy elements [start, stop) of the copy of ``rank`` into all others."""
        if start < stop:
            places = [copy + start * buf.dtype.itemsize for copy in buf.copies]
            source = places.pop(rank)
            # One source and no scale: a copy that reads once, however many copies it writes.
            _native.reduce(places, [source], (stop - start) * buf.dtype.itemsize, DType.UINT8, ReduceOp.SUM)

    def _span(self, lane: Lane, buf: Buffer) -> AbstractContextManager[None]:
        if not self._recorder.enabled:  # looking up what only a timeline wants would take 0.3 us
            return self._recorder.span(lane, self.label)
        return self._recorder.span(lane, self.label, buf.nbytes, buf.dtype.label)

    def _meet(self, operation: str) -> None:
        self._expect_ok(self._barrier.wait(self._timeout_s), operation)

    def _expect_ok(self, status: int, operation: str) -> None:
        if status == _native.Barrier.OK:
            return
        activity = f"{operation} '{self.label}'" if self.label else operation
        if status == _native.Barrier.ABORTED:
            self._check()
            raise CollectiveError(f"{activity}: the job was aborted while this rank waited for its node")
        late = [self._node.ranks[local_rank] for local_rank in self._barrier.late()]
        raise CollectiveError(
            f"{activity}: of ranks {list(self._node.ranks)} on this node, {late} did not come within "
            f"{self._timeout_s:g} s; if they are only slow, raise HVDLITE_COLLECTIVE_TIMEOUT_SECONDS"
        )


def share_of(blocks: Sequence[Sequence[Range]], parts: int, index: int, itemsize: int) -> list[tuple[int, int, int]]:
    """The share ``index`` of ``parts`` equal ones of all elements in ``blocks``, in order: (owner, start, stop).

    Shares start on cache lines where blocks do, so equal blocks make every owner's share its own block.
    """
    total = sum(stop - start for ranges in blocks for start, stop in ranges)
    begin, end = shard_bounds(total, parts, index, itemsize)
    share = []
    position = 0  # of the current range, in elements of all blocks
    for owner, ranges in enumerate(blocks):
        for start, stop in ranges:
            first = max(start, start + begin - position)
            last = min(stop, start + end - position)
            if first < last:
                share.append((owner, first, last))
            position += stop - start
    return share


def _scale(buf: Buffer, prescale: float, postscale: float) -> None:
    if prescale != 1.0 or postscale != 1.0:
        _native.reduce([buf.address], [buf.address], buf.numel, buf.dtype, ReduceOp.SUM, prescale, postscale)
