"""Reducescatter: the tensors of all ranks are reduced, and each rank gets some rows of the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.layout import ALIGNMENT, align_up
from hvdlite.memory.views import TensorView
from hvdlite.operations.operation import Work
from hvdlite.operations.reducing import ReducingOperation
from hvdlite.recorder import Lane


def reducescatter_async(
    group: Group,
    inputs: Sequence[TensorView],
    outputs: Sequence[TensorView],
    reduction: Reduction = SUM,
    *,
    name: str | None = None,
    names: Sequence[str] | None = None,
    wire_dtype: DType | None = None,
) -> Submission:
    """An allreduce of which each rank gets some rows: those between `row_bounds` of dimension 0.

    Args:
        inputs: each of at least one dimension.
        outputs: this rank's rows.

    Raises:
        ValueError: an element type that does not reduce.
        NotImplementedError: Adasum.
    """
    request = Reducescatter.of(name, inputs, reduction, wire_dtype, names=names)
    return group.submit(request, name, inputs, outputs)


def row_bounds(rows: int, size: int) -> list[int]:
    """Where each rank's rows start, and where all end; the first ``rows % size`` ranks have one row more."""
    share, more = divmod(rows, size)
    return [rank * share + min(rank, more) for rank in range(size + 1)]


@dataclass(frozen=True, eq=False)
class Reducescatter(ReducingOperation):
    """What ranks agree on."""

    label = "reducescatter"

    def run(self, engine: Engine, work: Work, label: str) -> None:
        submission = work[0][1]
        for view, output in zip(submission.inputs, submission.outputs, strict=True):
            wire_dtype = self.travels_as(view.dtype)
            engine.executed.reduced_bytes += view.numel * wire_dtype.itemsize
            self._scatter(engine, view, output.address, wire_dtype, label)

    def _scatter(self, engine: Engine, view: TensorView, target: int, wire_dtype: DType, label: str) -> None:
        """By way of the staging buffer, in which block r is the next part of what rank r shall have."""
        memory, rank, size, itemsize = engine.memory, engine.rank, engine.size, view.dtype.itemsize
        row_numel = math.prod(view.shape[1:])
        bounds = [start * row_numel for start in row_bounds(view.shape[0], size)]
        reduction = engine.resolved(self.reduction, wire_dtype)
        staging = engine.staging(wire_dtype)
        per_line = ALIGNMENT // wire_dtype.itemsize
        width = staging.numel // size // per_line * per_line
        most = max(stop - start for start, stop in pairwise(bounds))
        for begin in range(0, most, width):
            step = align_up(min(width, most - begin), per_line)
            part = staging.narrow(0, size * step)
            numels = [max(0, min(step, stop - start - begin)) for start, stop in pairwise(bounds)]
            addresses = [view.address and view.address + (start + begin) * itemsize for start in bounds[:-1]]
            with engine.recorder.span(Lane.PACK, label, part.nbytes, wire_dtype.label):
                memory.pack(memory.tensors(addresses, numels, [step * r for r in range(size)]), view.dtype, part, 0)
            blocks = [[(step * r, step * r + numel)] if numel else [] for r, numel in enumerate(numels)]
            engine.backend.reduce_scatter(part, blocks, reduction, label=label).wait()
            own = part.narrow(step * rank, step * (rank + 1))
            with engine.recorder.span(Lane.UNPACK, label, numels[rank] * wire_dtype.itemsize, wire_dtype.label):
                result = memory.tensors([target and target + begin * itemsize], [numels[rank]], [0])
                memory.unpack(own, 0, result, view.dtype)
