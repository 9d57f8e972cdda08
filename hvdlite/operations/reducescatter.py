"""Reducescatter: the tensors of all ranks are reduced, and each rank gets some rows of the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

from hvdlite.collectives.base import PreparedCall, ScatterReduction
from hvdlite.coordinator.messages import KNOWN_REQUESTS
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import TensorView
from hvdlite.operations.one_allreduce import OneAllreduce
from hvdlite.operations.operation import Work
from hvdlite.operations.prepared import PreparedOperation, Tensors
from hvdlite.operations.reducing import ReducingOperation
from hvdlite.recorder import Lane

if TYPE_CHECKING:
    from hvdlite._native import TensorList


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
class Reducescatter(ReducingOperation, OneAllreduce):
    """What ranks agree on. Between nodes it is an allreduce if it is of few bytes, of which each rank wants a part."""

    label = "reducescatter"

    def run(self, engine: Engine, work: Work, label: str) -> None:
        submission, layout = work[0][1], self.layout_in(engine)
        for view in submission.inputs:
            engine.executed.reduced_bytes += view.numel * self.travels_as(view.dtype).itemsize
        if layout is not None:
            self.reduce(engine, submission, layout, label)
            return
        for view, output in zip(submission.inputs, submission.outputs, strict=True):
            wire_dtype = self.travels_as(view.dtype)
            numels = part_numels(view.shape, engine.size)
            inputs = _part_addresses(view, numels)
            reduction = engine.resolved(self.reduction, wire_dtype)
            job = ScatterReduction(inputs, output.address, numels, view.dtype, reduction)
            engine.backend.reduce_scatter_tensors(job, staging=engine.staging(wire_dtype), label=label)

    def layout_in(self, engine: Engine) -> Layout | None:
        """Of the parts of all ranks, of one tensor after the other."""
        layout = None if engine.early is None else _layout_of(self, engine.size)
        return layout if layout is not None and 0 < layout.nbytes <= engine.backend.small_bytes else None

    def sources(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        parts = [_part_addresses(view, part_numels(view.shape, engine.size)) for view in submission.inputs]
        return engine.memory.tensors([*chain(*parts)], layout.numels, layout.offsets)

    def targets(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        own = [[view.address if r == engine.rank else 0 for r in range(engine.size)] for view in submission.outputs]
        return engine.memory.tensors([*chain(*own)], layout.numels, layout.offsets)

    def reduced_by(self, engine: Engine, layout: Layout) -> Reduction:
        return engine.resolved(self.reduction, layout.wire_dtype)


@lru_cache(maxsize=KNOWN_REQUESTS)
def _layout_of(request: Reducescatter, size: int) -> Layout | None:
    """None where its tensors are of several types."""
    types = {spec.dtype for spec in request.tensors}
    if len(types) != 1:
        return None
    dtype = types.pop()
    numels = [numel for spec in request.tensors for numel in part_numels(spec.shape, size)]
    return Layout.of(numels, dtype, request.travels_as(dtype))


class PreparedReducescatter(PreparedOperation):
    """``request`` of one tensor, which a program repeats and waits for."""

    lane = Lane.NODE_REDUCE_SCATTER

    def __init__(self, group: Group, request: Reducescatter, call: PreparedCall, nbytes: int, rows: int) -> None:
        super().__init__(group, request, call, nbytes, request.travels_as(request.tensors[0].dtype).label)
        self.rows = rows
        """Of the result."""

    @classmethod
    def of(cls, group: Group, request: Reducescatter) -> PreparedReducescatter | None:
        """None where there is no such call."""
        world, spec = group.world, request.tensors[0]
        wire_dtype, numels = request.travels_as(spec.dtype), part_numels(spec.shape, group.size)
        bounds = row_bounds(spec.shape[0], group.size)
        call = world.engine.backend.prepare_reduce_scatter(
            world.coordinator.counts,
            numels,
            spec.dtype,
            wire_dtype,
            world.engine.resolved(request.reduction, wire_dtype),
            world.config.caller_patience_s,
            request.name,
        )
        rows = bounds[group.rank + 1] - bounds[group.rank]
        return None if call is None else cls(group, request, call, sum(numels) * wire_dtype.itemsize, rows)

    def submission(self, sequence: int, tensors: Tensors) -> Submission:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        shape, dtype = (self.rows, *self.request.tensors[0].shape[1:]), self.request.tensors[0].dtype
        outputs = [TensorView(tensors.outputs[0], shape, dtype, tensors.owner)]
        return Submission(self.request, sequence, self._views(tensors.inputs, tensors.owner), outputs)


def part_numels(shape: Sequence[int], size: int) -> list[int]:
    """Elements that each of ``size`` ranks gets of a tensor of ``shape``."""
    bounds = row_bounds(shape[0], size)
    return [(stop - start) * math.prod(shape[1:]) for start, stop in pairwise(bounds)]


def _part_addresses(view: TensorView, numels: Sequence[int]) -> list[int]:
    """Where the parts of ``view`` begin; 0 of zeros that nobody stored."""
    starts = accumulate(numels[:-1], initial=0)
    return [view.address and view.address + start * view.dtype.itemsize for start in starts]
