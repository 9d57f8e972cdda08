"""What a carrier does by the backend of an engine, on the host or on GPUs, once the ranks have met."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.collectives.base import ScatterReduction, TensorReduction
from hvdlite.distributed.carrier import Part
from hvdlite.dtypes import DType, Reduction
from hvdlite.engine import Engine
from hvdlite.memory.layout import Layout


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
        self._engine.executed.buckets += 1
        self._engine.executed.reduced_bytes += layout.nbytes * len(inputs)
        job = ScatterReduction(inputs, output, [layout.numels[0]] * len(inputs), layout.dtype, reduction)
        self._backend.reduce_scatter_tensors(job, staging=self._engine.staging(layout.dtype), label=label)

    def spread(self, departure: Part, arrivals: Sequence[Part], nbytes: Sequence[int], label: str) -> None:
        targets = [address if size else 0 for address, size in arrivals]  # nobody wants what goes to 0
        staging = self._engine.staging(DType.UINT8)
        self._backend.allgather_tensors(departure[0], targets, nbytes, staging=staging, label=label)
