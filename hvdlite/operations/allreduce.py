"""Allreduce: every rank gets the reduction of the tensors of all; what comes together travels together."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hvdlite.collectives.base import TensorReduction
from hvdlite.coordinator.burst import Run
from hvdlite.coordinator.request import Request
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.base import Home
from hvdlite.memory.layout import Layout, concatenated
from hvdlite.memory.views import TensorView
from hvdlite.operations.one_allreduce import OfTensors
from hvdlite.operations.operation import Operation, Work
from hvdlite.operations.prepared_burst import PreparedBurst
from hvdlite.operations.reducing import ReducingOperation
from hvdlite.recorder import Lane

if TYPE_CHECKING:
    from hvdlite._native import ReadyCounts, TensorList

_TELLING_BYTES = 256 << 10  # from here on bytes matter more than what every allreduce costs


def allreduce_async(
    group: Group,
    inputs: Sequence[TensorView],
    outputs: Sequence[TensorView],
    reduction: Reduction = SUM,
    *,
    name: str | None = None,
    names: Sequence[str] | None = None,
    wire_dtype: DType | None = None,
    home: Home | None = None,
    needs_all: bool = False,
) -> Submission:
    """``outputs[i] = postscale * op over ranks(prescale * inputs[i])``, all together or none.

    Args:
        inputs: of one dtype where ``home`` is given; address 0 contributes zeros.
        outputs: of the same shapes and dtypes as ``inputs``; may be the same memory.
        name: of the operation, the same on every rank; None counts unnamed operations.
        names: of the tensors, for messages.
        wire_dtype: floats are cast to it on the way.
        home: where the group lives; its tensors are not copied as far as they are at their places already.
        needs_all: it is an error where a rank has joined.

    Raises:
        ValueError: an element type that does not reduce.
        NotImplementedError: Adasum.
    """
    home = home or found_home(group, inputs, outputs, wire_dtype)
    place = None if home is None else home.place
    request = Allreduce.of(name, inputs, reduction, wire_dtype, place, needs_all, names=names)
    return group.submit(request, name, inputs, outputs, home=home)


def found_home(
    group: Group, inputs: Sequence[TensorView], outputs: Sequence[TensorView], wire_dtype: DType | None
) -> Home | None:
    """That of a tensor which is reduced in place, if it lives in one."""
    if len(inputs) != 1 or wire_dtype is not None or inputs[0].address != outputs[0].address:
        return None
    memory = group.memory if inputs[0].device is None else group.device_memory
    return None if memory is None else memory.find(inputs[0].address, inputs[0].nbytes)


@dataclass(frozen=True, eq=False)
class Allreduce(ReducingOperation, OfTensors):
    """What ranks agree on.

    Attributes:
        place: of the home of its tensors, see `Home`. Where ranks name different ones, the tensors are copied.
    """

    place: tuple[int, int] | None = None
    needs_all: bool = False

    label = "allreduce"

    def settled(self) -> Allreduce:
        return self if self.place is None else replace(self, place=None)

    @cached_property
    def fusion(self) -> tuple[Hashable, int]:
        """Tensors from elsewhere travel with others of the same type that are reduced alike."""
        if self.place is not None or len(self._layouts) != 1 or self.tensors_on_device not in (0, len(self.tensors)):
            return None, 0
        dtype = self.tensors[0].dtype
        nbytes = sum(math.prod(spec.shape) * dtype.itemsize for spec in self.tensors)
        return (dtype, self.reduction, self.wire_dtype, self.tensors_on_device > 0), nbytes

    def run(self, engine: Engine, work: Work, label: str) -> None:
        """In place where the tensors live in a buffer; else by way of the staging buffer, each type for itself."""
        began_s, before = time.monotonic(), engine.executed.reduced_bytes
        submission = work[0][1]
        if self.place is not None and submission.home is not None:
            if self._home_layout.nbytes <= engine.backend.small_bytes:
                outputs = self.with_places(submission.outputs, submission.home)
                self._reduce(engine, submission.inputs, outputs, self._home_layout, label)
            else:
                self._reduce_at_home(engine, submission, submission.home, label)
        elif len(work) > 1:
            inputs = [view for _, submission in work for view in submission.inputs]
            outputs = [view for _, submission in work for view in submission.outputs]
            self._reduce(engine, inputs, outputs, _together([response.request for response, _ in work]), label)
        elif len(self._layouts) == 1:
            self._reduce(engine, submission.inputs, submission.outputs, self._layouts[0][1], label)
        else:
            for indices, layout in self._layouts:
                inputs, outputs = ([views[i] for i in indices] for views in (submission.inputs, submission.outputs))
                self._reduce(engine, inputs, outputs, layout, label)
        nbytes = engine.executed.reduced_bytes - before
        if nbytes >= _TELLING_BYTES:
            engine.fastest_allreduce = max(engine.fastest_allreduce, nbytes / (time.monotonic() - began_s))

    def prepare_burst(self, engine: Engine, requests: Sequence[Operation]) -> Run:
        layout, tensors = _together(requests), engine.memory.tensors

        def run(inputs: Sequence[int], outputs: Sequence[int], label: str) -> None:
            sources = tensors(inputs, layout.numels, layout.offsets)
            targets = sources if outputs == inputs else tensors(outputs, layout.numels, layout.offsets)
            self._reduce_tensors(engine, sources, targets, layout, label)

        return run

    def prepare_small_burst(
        self, engine: Engine, requests: Sequence[Operation], counts: ReadyCounts, patience_s: float
    ) -> PreparedBurst | None:
        layout, label = _together(requests), requests[0].name
        reduction = self.reduced_by(engine, layout)
        call = engine.backend.prepare_allreduce(counts, layout, reduction, None, patience_s, label)
        if call is None or call.direct is None or not call.direct.has_two_phases:
            return None
        return PreparedBurst(engine.executed, call, call.direct, layout.nbytes)

    def layout_in(self, engine: Engine) -> Layout | None:
        return self.only_layout

    def gives(self, rank: int) -> bool:
        return True

    def reduced_by(self, engine: Engine, layout: Layout) -> Reduction:
        return engine.resolved(self.reduction, layout.wire_dtype)

    def _reduce(
        self,
        engine: Engine,
        inputs: Sequence[TensorView],
        outputs: Sequence[TensorView],
        layout: Layout,
        label: str,
    ) -> None:
        sources = engine.tensors(inputs, layout)
        targets = sources if outputs is inputs else engine.tensors(outputs, layout)
        self._reduce_tensors(engine, sources, targets, layout, label)

    def _reduce_tensors(
        self, engine: Engine, sources: TensorList, targets: TensorList, layout: Layout, label: str
    ) -> None:
        engine.executed.reduced_bytes += layout.nbytes
        wire_dtype = layout.wire_dtype
        job = TensorReduction(sources, targets, layout, engine.resolved(self.reduction, wire_dtype))
        engine.backend.allreduce_tensors(job, staging=engine.chunk(wire_dtype), label=label).wait()

    def _reduce_at_home(self, engine: Engine, submission: Submission, home: Home, label: str) -> None:
        """Tensors that are not at their places are copied there, and results to where they are wanted."""
        layout, dtype = self._home_layout, self._home_layout.dtype
        engine.executed.reduced_bytes += layout.nbytes
        buffer = home.buffer.buffer(home.offset_bytes, layout.end, dtype)
        sources = engine.tensors(submission.inputs, layout)
        with engine.recorder.span(Lane.PACK, label, buffer.nbytes, dtype.label):
            engine.memory.pack(sources, dtype, buffer, 0)
        engine.backend.allreduce(buffer, engine.resolved(self.reduction, dtype), label=label).wait()
        outputs = submission.outputs
        targets = sources if outputs is submission.inputs else engine.tensors(outputs, layout)
        with engine.recorder.span(Lane.UNPACK, label, buffer.nbytes, dtype.label):
            engine.memory.unpack(buffer, 0, targets, dtype)

    def with_places(self, outputs: Sequence[TensorView], home: Home) -> Sequence[TensorView]:
        """``outputs``, at their places in ``home`` where they have no address."""
        if all(view.address for view in outputs):
            return outputs
        start = home.buffer.address + home.offset_bytes
        places = [start + offset * self._home_layout.dtype.itemsize for offset in self._home_layout.offsets]
        return [
            view if view.address else view._replace(address=place) for view, place in zip(outputs, places, strict=True)
        ]

    @property
    def only_layout(self) -> Layout | None:
        """Of its tensors, where they are of one type."""
        if self.place is not None:
            return self._home_layout
        return self._layouts[0][1] if len(self._layouts) == 1 else None

    @cached_property
    def _layouts(self) -> list[tuple[Sequence[int], Layout]]:
        """(which tensors, their layout in the staging buffer) for each type."""
        by_dtype: dict[DType, list[int]] = {}
        for i, spec in enumerate(self.tensors):
            by_dtype.setdefault(spec.dtype, []).append(i)
        return [
            (indices, Layout.of(self._numels(indices), dtype, self.travels_as(dtype)))
            for dtype, indices in sorted(by_dtype.items())
        ]

    @cached_property
    def _home_layout(self) -> Layout:
        """Tensors travel as they are where they live, and are of one type."""
        dtype = self.tensors[0].dtype
        return Layout.of(self._numels(range(len(self.tensors))), dtype, dtype)

    def _numels(self, indices: Sequence[int]) -> list[int]:
        return [math.prod(self.tensors[i].shape) for i in indices]


def _together(requests: Sequence[Request]) -> Layout:
    """How tensors lie that travel together: each request has one layout, and all have the same types."""
    return concatenated([request._layouts[0][1] for request in requests if isinstance(request, Allreduce)])
