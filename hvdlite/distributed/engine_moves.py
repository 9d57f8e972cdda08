"""What a carrier does by the backend of an engine, on the host or on GPUs, once the ranks have met."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hvdlite.collectives.base import TensorReduction
from hvdlite.distributed.carrier import Part
from hvdlite.dtypes import DType, Reduction
from hvdlite.engine import Engine
from hvdlite.memory.layout import ALIGNMENT, Layout, align_up, windows


class EngineMoves:
    """By ``engine``, through its staging memory. Arguments are those of the methods of `Carrier` with these names.

    Where the engine's memory is that of a GPU, calls return when all is enqueued on its stream.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._memory, self._backend = engine.memory, engine.backend

    def allreduce(
        self, inputs: Sequence[int], outputs: Sequence[int], layout: Layout, reduction: Reduction, label: str
    ) -> None:
        self._engine.executed.buckets += 1
        self._engine.executed.reduced_bytes += layout.nbytes
        tensors = self._memory.tensors(inputs, layout.numels, layout.offsets)
        results = tensors if inputs == outputs else self._memory.tensors(outputs, layout.numels, layout.offsets)
        staging = self._engine.chunk(layout.wire_dtype)
        job = TensorReduction(tensors, results, layout, reduction)
        self._backend.allreduce_tensors(job, staging=staging, label=label).wait()

    def reduce_scatter(
        self, inputs: Sequence[int], output: int, layout: Layout, reduction: Reduction, label: str
    ) -> None:
        """Piece by piece; block r of the staging memory is the next piece of what rank r gets."""
        rank, size, memory = self._engine.rank, self._engine.size, self._memory
        self._engine.executed.buckets += 1
        self._engine.executed.reduced_bytes += layout.nbytes * size
        dtype, numel = layout.dtype, layout.numels[0]
        per_line = ALIGNMENT // dtype.itemsize
        staging = self._engine.staging(dtype)
        for begin, end in windows(numel, staging.numel // size // per_line * per_line):
            step, count = align_up(end - begin, per_line), end - begin
            starts = [step * place for place in range(size)]
            part = staging.narrow(0, size * step)
            pieces = [address + begin * dtype.itemsize for address in inputs]
            memory.pack(memory.tensors(pieces, [count] * size, starts), dtype, part, 0)
            blocks = [[(start, start + count)] for start in starts]
            self._backend.reduce_scatter(part, blocks, reduction, label=label).wait()
            result = memory.tensors([output + begin * dtype.itemsize], [count], [0])
            memory.unpack(part.narrow(starts[rank], starts[rank] + step), 0, result, dtype)

    def spread(self, departure: Part, arrivals: Sequence[Part], nbytes: Sequence[int], label: str) -> None:
        """An allgather of bytes, as much at a time as the staging memory holds."""
        memory, rank, staging = self._memory, self._engine.rank, self._engine.staging(DType.UINT8)
        bounds = [0, *accumulate(nbytes)]
        places = [address if size else 0 for address, size in arrivals]  # nobody wants what goes to 0
        results = memory.tensors(places, list(nbytes), bounds[:-1])
        own = memory.tensors([departure[0]], [departure[1]], [0])
        for begin, end in windows(bounds[-1], staging.numel):
            part = staging.narrow(0, end - begin)
            clipped = [min(max(bound, begin), end) - begin for bound in bounds]
            blocks = [[(start, stop)] if stop > start else [] for start, stop in pairwise(clipped)]
            for start, stop in blocks[rank]:
                memory.pack(own, DType.UINT8, part.narrow(start, stop), begin + start - bounds[rank])
            self._backend.allgather(part, blocks, label=label).wait()
            memory.unpack(part, begin, results, DType.UINT8)
