"""Reducescatter: the tensors of all ranks are reduced, and each rank gets some rows of the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvdlite.collectives.base import ScatterReduction
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.views import TensorView
from hvdlite.operations.operation import Work
from hvdlite.operations.reducing import ReducingOperation


def reducescatter_async(
    group: Group,
    inputs: Sequence[TensorView],
    outputs: Sequence[TensorView],
    reduction: Reduction = SUM,
    *,
    name: str | None = None,
    names: Sequence[str] | None = None,
    wire_dtype: DType | None = None,
    background: bool = True,
) -> Submission:
    """An allreduce of which each rank gets some rows: those between `row_bounds` of dimension 0.

    Args:
        inputs: each of at least one dimension.
        outputs: this rank's rows.
        background: see `Group.submit`.

    Raises:
        ValueError: an element type that does not reduce.
        NotImplementedError: Adasum.
    """
    request = Reducescatter.of(name, inputs, reduction, wire_dtype, names=names)
    return group.submit(request, name, inputs, outputs, background=background)


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
            row_numel = math.prod(view.shape[1:])
            bounds = [start * row_numel for start in row_bounds(view.shape[0], engine.size)]
            inputs = [view.address and view.address + start * view.dtype.itemsize for start in bounds[:-1]]
            numels = [stop - start for start, stop in pairwise(bounds)]
            reduction = engine.resolved(self.reduction, wire_dtype)
            job = ScatterReduction(inputs, output.address, numels, view.dtype, reduction)
            engine.backend.reduce_scatter_tensors(job, staging=engine.staging(wire_dtype), label=label)
