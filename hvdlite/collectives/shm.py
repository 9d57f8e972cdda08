"""One node: every rank maps the copies of all others, so nothing is sent; ranks read and write one another's memory.

Each operation starts with a barrier, before which nobody may touch a copy that is not its own, since its owner
may still be using it; and ends with one, after which nobody does, since its owner may go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from hvdlite import _native
from hvdlite.collectives.base import DONE, Backend, Completion, PreparedCall, ScatterReduction, TensorReduction
from hvdlite.collectives.node_gather import NodeGather
from hvdlite.collectives.node_waits import NodeWaits, WaitedIn
from hvdlite.collectives.schedule import scaling
from hvdlite.collectives.shm_exchange import ShmExchange
from hvdlite.dtypes import SUM, DType, ReduceOp, Reduction
from hvdlite.memory.base import Memory
from hvdlite.memory.layout import Layout, Range, align_up, share_of
from hvdlite.memory.views import Buffer
from hvdlite.node import Node
from hvdlite.recorder import Lane, Recorder

_ALONE_BYTES = 128 << 10  # up to this, waiting for helpers takes longer than reducing alone
_EVEN = 1.25  # blocks of which the largest is at most so many times the mean: helping would gain nothing


class ShmBackend(Backend):
    """Collectives between the ranks of ``node``; every operation is complete when its call returns.

    Args:
        memory: of ``node``.
        spin_us: how long a wait spins before it sleeps.
        window_bytes: an allreduce passes tensors in private memory through shared memory this much at a time; other
            operations in windows of an own `exchange`. 0: they do not pass this way.
        timeout_s: the longest wait for the other ranks.
        check: raises once the world has failed; called after a wait was aborted.
    """

    def __init__(
        self,
        node: Node,
        memory: Memory,
        *,
        spin_us: int,
        window_bytes: int,
        timeout_s: float,
        check: Callable[[], None],
        recorder: Recorder,
    ) -> None:
        self.rank = node.local_rank
        self.size = node.local_size
        self.memory = memory
        self.recorder = recorder
        self._waits = NodeWaits(node.ranks, timeout_s, check)
        self._spin_us = spin_us
        self._window_bytes = align_up(window_bytes)
        barrier_bytes = align_up(_native.Barrier.bytes_needed(self.size))
        self._page = node.share(barrier_bytes + _native.PlacesInTurn.bytes_needed(self.size))
        here = self.rank, self.size, node.abort_address, spin_us
        self._barrier = _native.Barrier(self._page.address, *here)
        self._places = _native.PlacesInTurn(self._page.address + barrier_bytes, *here)
        self._small = _native.SmallAllreduce(self._places)
        self.small_bytes = _native.SmallAllreduce.MOST_BYTES_AT_HOME
        self.exchange: ShmExchange | None = None
        if window_bytes:
            self.exchange = ShmExchange(node, self._waits, spin_us, recorder)
            self.gather = NodeGather(self._places, self.exchange.native, self._waits)
            self._windows = memory.allocate(_native.Barrier.STAGING_WINDOWS * self._window_bytes)

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        """Barrier; each rank reduces its shard from all copies into all copies; barrier.

        Every byte is read once and written once per copy, which is the floor.
        """
        with self._span(Lane.NODE_ALLREDUCE, buf.nbytes, buf.dtype, label):
            if self.size == 1:
                for call in scaling(buf, reduction):
                    _native.reduce(*call)
                return DONE
            status = self._barrier.allreduce(buf.copies, buf.numel, buf.dtype, *reduction, self._waits.timeout_s)
            self._waits.expect_ok(status, "allreduce", label, self._barrier)
        return DONE

    def allreduce_tensors(self, job: TensorReduction, *, staging: Buffer, label: str = "") -> Completion:
        """In windows that stay in cache: unpack one while packing another, and reduce my shard of the one between.

        All of it is one call: while the main thread computes, taking the GIL back costs up to 5 ms each time.
        ``staging`` is left alone.
        """
        if not self._window_bytes:
            return super().allreduce_tensors(job, staging=staging, label=label)
        inputs, outputs, layout, reduction = job
        wire_dtype = layout.wire_dtype
        with self._span(Lane.NODE_ALLREDUCE, layout.nbytes, wire_dtype, label):
            if layout.nbytes <= self._places.most_bytes:
                everything = 0, layout.end
                status = self._small.run(
                    inputs, outputs, layout.end, everything, layout.dtype, wire_dtype, *reduction, self._waits.timeout_s
                )
                self._waits.expect_ok(status, "allreduce", label, self._places)
                return DONE
            status = self._barrier.staged_allreduce(
                inputs,
                outputs,
                self._windows.copies,
                self._window_bytes // wire_dtype.itemsize,
                layout.end,
                layout.dtype,
                wire_dtype,
                *reduction,
                self._waits.timeout_s,
            )
            self._waits.expect_ok(status, "allreduce", label, self._barrier)
        return DONE

    def prepare_allreduce(
        self,
        counts: _native.ReadyCounts,
        layout: Layout,
        reduction: Reduction,
        home: Buffer | None,
        patience_s: float,
        label: str,
    ) -> PreparedCall | None:
        if not self._window_bytes or (home is not None and self.size == 1):  # which has it all, where it is
            return None
        wire_dtype = layout.wire_dtype
        native = _native.PreparedAllreduce(
            self._barrier,
            self._small,
            counts,
            layout.numels,
            layout.offsets,
            layout.end,
            self._windows.copies if home is None else home.copies,
            self._window_bytes // wire_dtype.itemsize if home is None else 0,
            layout.dtype,
            wire_dtype,
            *reduction,
            self._patience(patience_s),
        )
        most_bytes = self._places.most_bytes if home is None else self.small_bytes
        waits_in = self._places if layout.nbytes <= most_bytes else self._barrier
        return self._prepared(native, "allreduce", label, waits_in)

    def prepare_gather(
        self,
        counts: _native.ReadyCounts,
        numbers: Sequence[int],
        column: int,
        row_bytes: int,
        is_alltoall: bool,
        patience_s: float,
        label: str,
    ) -> PreparedCall | None:
        gather, exchange = self.gather, self.exchange
        if gather is None or exchange is None or not gather.takes(len(numbers)):
            return None
        patience = self._patience(patience_s)
        native = _native.PreparedGather(
            gather.native, exchange.windows, counts, numbers, column, row_bytes, is_alltoall, patience
        )
        return self._prepared(native, "exchange of rows", label, gather)

    def prepare_reduce_scatter(
        self,
        counts: _native.ReadyCounts,
        numels: Sequence[int],
        dtype: DType,
        wire_dtype: DType,
        reduction: Reduction,
        patience_s: float,
        label: str,
    ) -> PreparedCall | None:
        exchange, is_small = self.exchange, self._scatters_at_once(numels, wire_dtype)
        if exchange is None or not (is_small or dtype is wire_dtype):
            return None
        patience = self._patience(patience_s)
        native = _native.PreparedReduceScatter(
            self._small, exchange.windows, counts, numels, dtype, wire_dtype, *reduction, patience
        )
        return self._prepared(native, "reduce_scatter", label, self._places if is_small else exchange.native)

    def prepare_broadcast(
        self, counts: _native.ReadyCounts, nbytes: int, root: int, patience_s: float, label: str
    ) -> PreparedCall | None:
        if self.exchange is None:
            return None
        patience = self._patience(patience_s)
        native = _native.PreparedBroadcast(self.exchange.windows, counts, nbytes, root, patience)
        return self._prepared(native, "broadcast", label, self.exchange.native)

    def prepare_barrier(self, counts: _native.ReadyCounts, patience_s: float, label: str) -> PreparedCall | None:
        native = _native.PreparedBarrier(counts, self._patience(patience_s))
        return self._prepared(native, "barrier", label, self._places)

    def _patience(self, patience_s: float) -> _native.Patience:
        return _native.Patience(self._spin_us, patience_s, self._waits.timeout_s)

    def _prepared(self, native: _native.PreparedInNode, operation: str, label: str, waits_in: WaitedIn) -> PreparedCall:
        expect_ok = partial(self._waits.expect_ok, operation=operation, label=label, waited_in=waits_in)
        return _PreparedCall(native, expect_ok)

    def _scatters_at_once(self, numels: Sequence[int], wire_dtype: DType) -> bool:
        """Whether it takes less time if each rank reads all, than in windows."""
        return bool(self._window_bytes) and sum(numels) * wire_dtype.itemsize <= self._places.most_bytes

    def _own_part(self, numels: Sequence[int]) -> Range:
        before = sum(numels[: self.rank])
        return before, before + numels[self.rank]

    def reduce_scatter(
        self,
        buf: Buffer,
        blocks: Sequence[Sequence[Range]],
        reduction: Reduction = SUM,
        *,
        stays_open: bool = False,
        label: str = "",
    ) -> Completion:
        assert len(blocks) == self.size, (len(blocks), self.size)
        with self._span(Lane.NODE_REDUCE_SCATTER, buf.nbytes, buf.dtype, label):
            if self.size == 1:
                for call in scaling(buf, reduction):
                    _native.reduce(*call)
                return DONE
            self.meet("reduce_scatter", label)
            numels = [sum(stop - start for start, stop in ranges) for ranges in blocks]
            total = sum(numels)
            alone = total * buf.dtype.itemsize <= _ALONE_BYTES or max(numels) * self.size <= _EVEN * total
            if alone:
                for start, stop in blocks[self.rank]:
                    self._reduce_into(self.rank, buf, start, stop, reduction)
            else:  # ranks that have less help those that have more, who must then wait for them
                for owner, start, stop in share_of(blocks, self.size, self.rank, buf.dtype.itemsize):
                    self._reduce_into(owner, buf, start, stop, reduction)
            if not (alone and stays_open):
                self.meet("reduce_scatter", label)
        return DONE

    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        """Each rank copies an equal share of all bytes, wherever they are, into the other copies; its own, to close."""
        assert len(blocks) == self.size, (len(blocks), self.size)
        with self._span(Lane.NODE_ALLGATHER, buf.nbytes, buf.dtype, label):
            if closes and self.size > 1:
                for start, stop in blocks[self.rank]:
                    self._copy_from(self.rank, buf, start, stop)
                self.meet("allgather", label)
            elif self.size > 1:
                self._distribute("allgather", buf, blocks, label)
        return DONE

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        """An allgather in which ``root`` has everything: all ranks share the work."""
        with self._span(Lane.BROADCAST, buf.nbytes, buf.dtype, label):
            if self.size > 1:
                blocks = [[(0, buf.numel)] if rank == root else [] for rank in range(self.size)]
                self._distribute("broadcast", buf, blocks, label)
        return DONE

    def broadcast_tensors(
        self, tensors: _native.TensorList, nbytes: int, root: int, *, staging: Buffer, label: str = ""
    ) -> None:
        if self.exchange is None:
            return super().broadcast_tensors(tensors, nbytes, root, staging=staging, label=label)
        return self.exchange.broadcast(tensors, nbytes, root, label)

    def allgather_tensors(
        self, source: int, targets: Sequence[int], nbytes: Sequence[int], *, staging: Buffer, label: str = ""
    ) -> None:
        if self.exchange is None:
            return super().allgather_tensors(source, targets, nbytes, staging=staging, label=label)
        return self.exchange.allgather(source, targets, nbytes, label)

    def reduce_scatter_tensors(self, job: ScatterReduction, *, staging: Buffer, label: str = "") -> None:
        if self._scatters_at_once(job.numels, staging.dtype):
            return self._scatter_at_once(job, staging.dtype, label)
        if self.exchange is None or staging.dtype is not job.dtype:
            return super().reduce_scatter_tensors(job, staging=staging, label=label)
        return self.exchange.reduce_scatter(job, label)

    def _scatter_at_once(self, job: ScatterReduction, wire_dtype: DType, label: str) -> None:
        inputs, output, numels, dtype, reduction = job
        offsets = [*accumulate(numels, initial=0)]
        numel, own = offsets.pop(), self._own_part(numels)
        sources = self.memory.tensors(inputs, numels, offsets)
        target = self.memory.tensors([output], [numels[self.rank]], own[:1])
        with self._span(Lane.NODE_REDUCE_SCATTER, numel * wire_dtype.itemsize, wire_dtype, label):
            status = self._small.run(sources, target, numel, own, dtype, wire_dtype, *reduction, self._waits.timeout_s)
            self._waits.expect_ok(status, "reduce_scatter", label, self._places)

    def barrier(self) -> None:
        if self.size > 1:
            self.meet("barrier")

    def withdraw(self) -> None:
        self._places.withdraw()

    def wake(self) -> None:
        _native.wake_all(self._page.address)
        self._places.wake_all()
        if self.exchange is not None:
            self.exchange.native.wake_all()

    def _distribute(self, operation: str, buf: Buffer, blocks: Sequence[Sequence[Range]], label: str) -> None:
        self.meet(operation, label)
        for owner, start, stop in share_of(blocks, self.size, self.rank, buf.dtype.itemsize):
            self._copy_from(owner, buf, start, stop)
        self.meet(operation, label)

    @staticmethod
    def _reduce_into(rank: int, buf: Buffer, start: int, stop: int, reduction: Reduction) -> None:
        """Reduce elements [start, stop) of all copies into the copy of ``rank``."""
        if start < stop:
            sources = [copy + start * buf.dtype.itemsize for copy in buf.copies]
            _native.reduce([sources[rank]], sources, stop - start, buf.dtype, *reduction)

    @staticmethod
    def _copy_from(rank: int, buf: Buffer, start: int, stop: int) -> None:
        """Copy elements [start, stop) of the copy of ``rank`` into all others."""
        if start < stop:
            places = [copy + start * buf.dtype.itemsize for copy in buf.copies]
            source = places.pop(rank)
            # One source and no scale: a copy that reads once, however many copies it writes.
            _native.reduce(places, [source], (stop - start) * buf.dtype.itemsize, DType.UINT8, ReduceOp.SUM)

    def meet(self, operation: str, label: str = "") -> None:
        """A barrier, whose errors speak of ``operation`` and ``label``."""
        self._waits.expect_ok(self._barrier.wait(self._waits.timeout_s), operation, label, self._barrier)


class _PreparedCall:
    """What the methods of `ShmBackend` that prepare return."""

    def __init__(self, native: _native.PreparedInNode, expect_ok: Callable[[int], None]) -> None:
        self.direct = native
        self.run, self.last, self.ready_ns = native.run, native.last, native.ready_ns
        self._expect_ok = expect_ok

    def resume(self, result: int) -> int:
        aborted = result == _native.DirectCall.ABORTED
        self._expect_ok(_native.Barrier.ABORTED if aborted else _native.Barrier.TIMEOUT)
        raise AssertionError(result)

    def count_done(self, times: int) -> None:
        """Shared memory has no traffic to count."""
