"""One node, on GPUs: every rank maps the copies of all others, on its own GPU or on another, and reduces its shard.

As in shared memory (shm.py), an operation begins and ends with a barrier. Here it is one of streams: calls enqueue, and
no thread waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite import _native
from hvdlite.collectives.base import DONE, Backend, Completion, EnqueuingCall, TensorReduction
from hvdlite.dtypes import SUM, DType, ReduceOp, Reduction
from hvdlite.memory.device import DeviceMemory, DeviceSharer
from hvdlite.memory.layout import Layout, Range, share_of
from hvdlite.memory.views import Buffer
from hvdlite.recorder import Lane, Recorder


class DirectBackend(Backend):
    """Collectives between the GPUs of the ranks of ``node``, or on one that they share.

    Args:
        memory: of ``node``.
        spin_us: how long a thread that waits for others looks for them before it sleeps.
    """

    def __init__(self, node: DeviceSharer, memory: DeviceMemory, recorder: Recorder, *, spin_us: int = 0) -> None:
        self.rank = node.local_rank
        self.size = node.local_size
        self.memory: DeviceMemory = memory
        self.recorder = recorder
        self._spin_us = spin_us
        page = node.share(_native.StreamBarrier.bytes_needed(self.size))
        self._barrier = _native.StreamBarrier(memory.stream, page.memory, self.rank, self.size)

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        """Barrier; each rank reduces its shard from all copies into all copies; barrier."""
        with self._span(Lane.NODE_ALLREDUCE, buf.nbytes, buf.dtype, label):
            self._barrier.allreduce(buf.copies, buf.numel, buf.dtype, *reduction)
        return DONE

    def allreduce_tensors(self, job: TensorReduction, *, staging: Buffer, label: str = "") -> Completion:
        """All of it in one call, without the GIL."""
        inputs, outputs, layout, reduction = job
        wire_dtype = layout.wire_dtype
        with self._span(Lane.NODE_ALLREDUCE, layout.nbytes, wire_dtype, label):
            self._barrier.staged_allreduce(
                inputs, outputs, staging.copies, staging.numel, layout.end, layout.dtype, wire_dtype, *reduction
            )
        return DONE

    def prepare_enqueuing(
        self,
        counts: _native.ReadyCounts,
        layout: Layout,
        reduction: Reduction,
        staging: Buffer,
        patience_s: float,
    ) -> EnqueuingCall | None:
        return _EnqueuingCall(
            _native.PreparedDeviceAllreduce(
                self._barrier,
                counts,
                layout.numels,
                layout.offsets,
                layout.end,
                layout.dtype,
                staging.copies,
                staging.numel,
                layout.wire_dtype,
                *reduction,
                _native.Patience(self._spin_us, patience_s, 0.0),  # inside nobody waits
            )
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
        assert len(blocks) == self.size, (len(blocks), self.size)
        with self._span(Lane.NODE_REDUCE_SCATTER, buf.nbytes, buf.dtype, label):
            self._barrier.meet()
            for start, stop in blocks[self.rank]:
                part = buf.narrow(start, stop)
                self.memory.stream.reduce([part.address], part.copies, part.numel, part.dtype, *reduction)
            if not stays_open:
                self._barrier.meet()
        return DONE

    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        """Each rank copies an equal share of all bytes, wherever they are, into the other copies; its own, to close."""
        assert len(blocks) == self.size, (len(blocks), self.size)
        with self._span(Lane.NODE_ALLGATHER, buf.nbytes, buf.dtype, label):
            if closes:
                for start, stop in blocks[self.rank]:
                    self._copy_from(self.rank, buf.narrow(start, stop))
                self._barrier.meet()
            else:
                self._distribute(buf, blocks)
        return DONE

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        """An allgather in which ``root`` has everything: all ranks share the work."""
        with self._span(Lane.BROADCAST, buf.nbytes, buf.dtype, label):
            self._distribute(buf, [[(0, buf.numel)] if rank == root else [] for rank in range(self.size)])
        return DONE

    def barrier(self) -> None:
        self._barrier.meet()
        self.memory.moment().wait()

    def late(self) -> Sequence[int]:
        return self._barrier.late()

    def wake(self) -> None:
        self._barrier.release()

    def _distribute(self, buf: Buffer, blocks: Sequence[Sequence[Range]]) -> None:
        self._barrier.meet()
        for owner, start, stop in share_of(blocks, self.size, self.rank, buf.dtype.itemsize):
            self._copy_from(owner, buf.narrow(start, stop))
        self._barrier.meet()

    def _copy_from(self, rank: int, part: Buffer) -> None:
        """Copy the copy of ``rank`` into all others."""
        places = list(part.copies)
        source = places.pop(rank)
        if places and part.nbytes:
            # One source and no scale: a copy that reads once, however many copies it writes.
            self.memory.stream.reduce(places, [source], part.nbytes, DType.UINT8, ReduceOp.SUM)


class _EnqueuingCall:
    """What `DirectBackend.prepare_enqueuing` returns."""

    direct = None  # which knows no stream

    def __init__(self, native: _native.PreparedDeviceAllreduce) -> None:
        self.run, self.last, self.ready_ns = native.run, native.last, native.ready_ns
        self.use_stream, self.take_done = native.use_stream, native.take_done

    def resume(self, result: int) -> int:
        raise AssertionError(result)  # it is enqueued, or raises

    def count_done(self, times: int) -> None:
        """Memory that all map has no traffic to count."""
