"""Does what the ranks agreed on: pack into the fusion buffer, run the collective, unpack; in the agreed order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from hvdlite import _native
from hvdlite.collectives.base import Backend
from hvdlite.collectives.pairwise import PairwiseExchange
from hvdlite.coordinator.messages import KNOWN_REQUESTS, Kind, Request, Response
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.fusion.fusion_buffer import FusionBuffers, slot_offsets
from hvdlite.memory import ALIGNMENT, Buffer, TensorView, align_up
from hvdlite.timeline.recorder import Lane, Recorder
from hvdlite.topology import Topology

Work = Sequence[tuple[Response, Submission]]

_TELLING_BYTES = 256 << 10  # from here on bytes matter more than what every allreduce costs


@dataclass(slots=True)
class Executed:
    """What an executor has done: responses that were fused are one bucket."""

    buckets: int = 0
    reduced_bytes: int = 0  # in the type that travels


class Executor:
    """Runs buckets on one backend.

    Args:
        staging: a multiple of `ALIGNMENT` bytes where tensors from elsewhere pass through, ``chunk_bytes`` at a time.
            On one node a chunk should fit the cache; across nodes it should be large enough to fill the wire.
        topology: of the ranks between which the backend works.
        administer: does what changes process sets or settings, and returns what the user gets.
    """

    def __init__(
        self,
        backend: Backend,
        pairwise_exchange: PairwiseExchange,
        staging: Buffer,
        chunk_bytes: int,
        buffers: FusionBuffers,
        topology: Topology,
        recorder: Recorder,
        administer: Callable[[Request], object],
    ) -> None:
        self._backend = backend
        self._pairwise_exchange = pairwise_exchange
        self._ranks = topology.ranks
        self._nodes = len(topology.nodes)
        self._administer = administer
        self._staging = staging
        # A whole number of elements of every type, whatever the setting says.
        chunk = staging.narrow(0, max(ALIGNMENT, min(chunk_bytes, staging.nbytes) // ALIGNMENT * ALIGNMENT))
        self._chunks = {dtype: chunk.as_dtype(dtype) for dtype in DType}
        self._buffers = buffers
        self._recorder = recorder
        self.executed = Executed()
        self.fastest_allreduce = 0.0  # bytes per second, of those that are not small

    def execute(self, work: Work) -> object:
        """Do one bucket; return the result of a request that has one (a bucket of several never has)."""
        self.executed.buckets += 1
        request = work[0][0].request
        label = work[0][1].label
        if len(work) > 1:
            label = f"{label} and {len(work) - 1} more"
        self._backend.label = label
        if request.kind is Kind.ALLREDUCE:
            before = self.executed.reduced_bytes
            start_s = time.monotonic()
            self._allreduce(work, label)
            nbytes = self.executed.reduced_bytes - before
            if nbytes >= _TELLING_BYTES:
                self.fastest_allreduce = max(self.fastest_allreduce, nbytes / (time.monotonic() - start_s))
        elif request.kind is Kind.ALLGATHER:
            self._allgather(work[0][0], work[0][1], label)
        elif request.kind is Kind.BROADCAST:
            self._broadcast(request, work[0][1], label)
        elif request.kind is Kind.ALLOCATE:
            return self._buffers.make(request.nbytes)
        elif request.kind is Kind.ALLTOALL:
            return self._alltoall(work[0][0], work[0][1], label)
        elif request.kind is Kind.REDUCESCATTER:
            self._reducescatter(request, work[0][1], label)
        elif request.kind is Kind.JOIN:
            return work[0][0].sizes[0][0]
        elif request.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET, Kind.CONFIGURE):
            return self._administer(request)
        # A barrier is done once it is agreed on.
        return None

    def _allreduce(self, work: Work, label: str) -> None:
        response, submission = work[0]
        request, inputs, outputs = response.request, submission.inputs, submission.outputs
        if request.place is not None and submission.home is not None:
            home = submission.home
            (layout,) = _layouts(request, True)
            target = home.buffer.buffer(home.offset_bytes, layout.end, layout.dtype)
            self._reduce_through(target, inputs, outputs, layout, request, label)
            return
        layouts = _layouts(request, False)
        if len(work) > 1:
            inputs = [view for _, submission in work for view in submission.inputs]
            outputs = [view for _, submission in work for view in submission.outputs]
            layouts = (_one_behind_the_other([_layouts(response.request, False)[0] for response, _ in work]),)
        for layout in layouts:
            own_inputs, own_outputs = inputs, outputs
            if len(layouts) > 1:
                own_inputs, own_outputs = [inputs[i] for i in layout.indices], [outputs[i] for i in layout.indices]
            self._reduce_through(
                self._chunks[layout.wire], own_inputs, own_outputs, layout, request, label, is_home=False
            )

    def _reduce_through(
        self,
        buffer: Buffer,
        inputs: Sequence[TensorView],
        outputs: Sequence[TensorView],
        layout: _Layout,
        request: Request,
        label: str,
        is_home: bool = True,
    ) -> None:
        """Allreduce ``inputs`` into ``outputs`` by way of ``buffer``, as much at a time as it holds.

        Tensors that live where ``buffer`` has them are not copied.
        """
        wire, dtype, total = layout.wire, layout.dtype, layout.end
        self.executed.reduced_bytes += total * wire.itemsize
        sources = targets = _native.TensorList([view.address for view in inputs], layout.numels, layout.offsets)
        if outputs is not inputs:
            targets = _native.TensorList([view.address for view in outputs], layout.numels, layout.offsets)
        op, prescale, postscale = self._scales(request, wire)
        if not is_home and self._backend.allreduce_tensors(
            sources, targets, total, dtype, wire, op=op, prescale=prescale, postscale=postscale
        ):
            return
        for begin, end in _windows(total, buffer.numel):
            part = buffer.narrow(0, end - begin)
            with self._recorder.span(Lane.PACK, label, part.nbytes, wire.label):
                sources.pack(part.address, begin, end, dtype, wire)
            self._backend.allreduce(part, op=op, prescale=prescale, postscale=postscale)
            with self._recorder.span(Lane.UNPACK, label, part.nbytes, wire.label):
                targets.unpack(part.address, begin, end, wire, dtype)

    def _scales(self, request: Request, wire: DType) -> tuple[ReduceOp, float, float]:
        """AVERAGE as a sum and scales.

        Across nodes partial sums travel in the tensor's type, so 16-bit floats are divided before they are added:
        in fp16, eight ranks of 1e4 already pass 65504. Elsewhere the division comes last, which rounds once.
        """
        if request.op is not ReduceOp.AVERAGE:
            return request.op, request.prescale, request.postscale
        size = self._backend.size
        if wire.is_half and self._nodes > 1:
            return ReduceOp.SUM, request.prescale / size, request.postscale
        return ReduceOp.SUM, request.prescale, request.postscale / size

    def _broadcast(self, request: Request, submission: Submission, label: str) -> None:
        # The fused layout in bytes: a broadcast does not care for types.
        views = submission.inputs
        numels = [view.nbytes for view in views]
        offsets, total = slot_offsets(numels, 1)
        tensors = _native.TensorList([view.address for view in views], numels, offsets)
        root = self._ranks.index(request.root)
        is_root = self._backend.rank == root
        staging = self._staging.as_dtype(DType.UINT8)
        for begin, end in _windows(total, staging.numel):
            part = staging.narrow(0, end - begin)
            if is_root:
                with self._recorder.span(Lane.PACK, label, part.nbytes):
                    tensors.pack(part.address, begin, end, DType.UINT8, DType.UINT8)
            self._backend.broadcast(part, root)
            if not is_root:
                with self._recorder.span(Lane.UNPACK, label, part.nbytes):
                    tensors.unpack(part.address, begin, end, DType.UINT8, DType.UINT8)

    def _allgather(self, response: Response, submission: Submission, label: str) -> None:
        assert submission.allocate is not None
        for i, (spec, view) in enumerate(zip(response.request.tensors, submission.inputs, strict=True)):
            rows = [sizes[i] for sizes in response.sizes]
            result = submission.allocate(i, (sum(rows), *spec.shape))
            row_bytes = result.nbytes // sum(rows) if sum(rows) else 0
            ends = [row_bytes * count for count in accumulate(rows)]
            self._allgather_bytes(view.address, result.address, [0, *ends], label)

    def _alltoall(self, response: Response, submission: Submission, label: str) -> tuple[int, ...]:
        """Every rank's rows to every rank; returns how many came from each."""
        assert submission.allocate is not None
        (spec,) = response.request.tensors
        received = tuple(rows[self._backend.rank] for rows in response.sizes)
        result = submission.allocate(0, (sum(received), *spec.shape))
        row_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        sends = [rows * row_bytes for rows in response.sizes[self._backend.rank]]
        receives = [rows * row_bytes for rows in received]
        view = submission.inputs[0]
        self._pairwise_exchange.exchange(view.address, sends, result.address, receives, label, (view, result))
        return received

    def _reducescatter(self, request: Request, submission: Submission, label: str) -> None:
        for view, output in zip(submission.inputs, submission.outputs, strict=True):
            wire = request.wire_dtype if request.wire_dtype is not None and view.dtype.is_floating else view.dtype
            self.executed.reduced_bytes += view.numel * wire.itemsize
            self._reducescatter_tensor(request, view, output.address, wire, label)

    def _reducescatter_tensor(self, request: Request, view: TensorView, target: int, wire: DType, label: str) -> None:
        """By way of the staging buffer, in which shard r is the next part of what rank r shall have."""
        size, rank = self._backend.size, self._backend.rank
        row_numel = math.prod(view.shape[1:])
        bounds = [start * row_numel for start in row_bounds(view.shape[0], size)]
        op, prescale, postscale = self._scales(request, wire)
        staging = self._staging.as_dtype(wire)
        per_line = ALIGNMENT // wire.itemsize
        width = staging.numel // size // per_line * per_line
        most = max(stop - start for start, stop in pairwise(bounds))
        for begin in range(0, most, width):
            step = align_up(min(width, most - begin), per_line)
            part = staging.narrow(0, size * step)
            numels = [max(0, min(step, stop - start - begin)) for start, stop in pairwise(bounds)]
            itemsize = view.dtype.itemsize
            addresses = [view.address and view.address + (start + begin) * itemsize for start in bounds[:-1]]
            with self._recorder.span(Lane.PACK, label, part.nbytes, wire.label):
                sources = _native.TensorList(addresses, numels, [step * i for i in range(size)])
                sources.pack(part.address, 0, part.numel, view.dtype, wire)
            self._backend.reduce_scatter(part, parts=size, op=op, prescale=prescale, postscale=postscale)
            with self._recorder.span(Lane.UNPACK, label, numels[rank] * wire.itemsize, wire.label):
                own = _native.TensorList([target and target + begin * itemsize], [numels[rank]], [step * rank])
                own.unpack(part.address + step * rank * wire.itemsize, step * rank, step * (rank + 1), wire, view.dtype)

    def _allgather_bytes(self, source: int, target: int, bounds: list[int], label: str) -> None:
        """Concatenate: rank r gives bytes [bounds[r], bounds[r + 1]) of the result, which it has at ``source``."""
        staging = self._staging.as_dtype(DType.UINT8)
        mine = bounds[self._backend.rank]
        for begin, end in _windows(bounds[-1], staging.numel):
            clipped = [min(max(bound, begin), end) - begin for bound in bounds]
            blocks = [[(start, stop)] if stop > start else [] for start, stop in pairwise(clipped)]
            part = staging.narrow(0, end - begin)
            with self._recorder.span(Lane.PACK, label, part.nbytes):
                for start, stop in blocks[self._backend.rank]:
                    _native.copy(part.address + start, source + begin + start - mine, stop - start)
            self._backend.allgather(part, blocks)
            with self._recorder.span(Lane.UNPACK, label, part.nbytes):
                _native.copy(target + begin, part.address, end - begin)


def row_bounds(rows: int, size: int) -> list[int]:
    """Where each rank's rows start, and where all end; the first ``rows % size`` ranks have one row more."""
    share, more = divmod(rows, size)
    return [rank * share + min(rank, more) for rank in range(size + 1)]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Tensors of one type as they lie in a fusion buffer; all but ``indices`` in elements of it."""

    dtype: DType
    wire: DType  # of the buffer
    indices: Sequence[int]  # which tensors these are
    numels: Sequence[int]
    offsets: Sequence[int]
    end: int  # of the last tensor
    following: int  # where another tensor would start


@lru_cache(maxsize=KNOWN_REQUESTS)
def _layouts(request: Request, at_home: bool) -> tuple[_Layout, ...]:
    """How the tensors of an allreduce lie in the buffer that they go through, for each type; remembered.

    Args:
        at_home: the tensors live there, so they travel as they are.
    """
    by_dtype: dict[DType, list[int]] = {}
    for i, spec in enumerate(request.tensors):
        by_dtype.setdefault(spec.dtype, []).append(i)
    layouts = []
    for dtype, indices in sorted(by_dtype.items()):
        casts = request.wire_dtype is not None and dtype.is_floating and not at_home
        wire = request.wire_dtype if casts and request.wire_dtype is not None else dtype
        numels = [math.prod(request.tensors[i].shape) for i in indices]
        offsets, following = slot_offsets(numels, wire.itemsize)
        layouts.append(_Layout(dtype, wire, indices, numels, offsets, offsets[-1] + numels[-1], following))
    return tuple(layouts)


def _one_behind_the_other(layouts: Sequence[_Layout]) -> _Layout:
    """Layouts of the same types as one."""
    numels: list[int] = []
    offsets: list[int] = []
    end = following = 0
    for layout in layouts:
        numels += layout.numels
        offsets += [following + offset for offset in layout.offsets]
        end = following + layout.end
        following += layout.following
    return _Layout(layouts[0].dtype, layouts[0].wire, range(len(numels)), numels, offsets, end, following)


def _windows(total: int, width: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, total, max(width, 1)):
        yield begin, min(begin + width, total)
