"""A blocking operation that is one allreduce, again and again: request, layout and native call, made once."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hvdlite.collectives.base import DONE, Done, PreparedCall
from hvdlite.coordinator.prepared import Outcome, outcome_at, outcome_of
from hvdlite.coordinator.remembered import Remembered
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.group import Group
from hvdlite.memory.base import Home
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import TensorView
from hvdlite.operations.allreduce import Allreduce, found_home
from hvdlite.operations.one_allreduce import OfTensors
from hvdlite.recorder import Lane

if TYPE_CHECKING:
    from hvdlite._native import Signature

_NOT_YET = Outcome.NOT_YET


class Tensors(NamedTuple):
    """What is reduced, and where its results go; address 0 contributes zeros.

    Attributes:
        home: where they live, if the request says so.
        owner: keeps all of them alive.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    home: Home | None
    owner: object


class PreparedAllreduce:
    """``request``, as one call of the backend of ``group``; what `Group.perform` takes, with `Tensors`.

    Attributes:
        gives: whether the tensors of this rank are what it contributes; else zeros are.
        home_memory: in which its tensors live, if they live in one place; a weak reference.
    """

    def __init__(self, group: Group, request: OfTensors, layout: Layout, call: PreparedCall, home: Home | None) -> None:
        self.request = request
        self.gives = request.gives(group.ranks[group.rank])
        self.label = request.name
        self.signature: Signature | None = None
        self.direct = call.direct
        self.home_memory = None if home is None else weakref.ref(home.buffer.owner)
        self._memory = group.memory
        self._call = call
        self._run = call.run
        self._executed = group.world.engine.executed
        self._recorder = group.recorder
        self._nbytes = layout.nbytes
        self._reduced_bytes = layout.nbytes if request.reduced_types else 0
        self._dtype = layout.wire_dtype.label

    @classmethod
    def known(
        cls, group: Group, key: Hashable, request: Callable[[], OfTensors | None], home: Home | None
    ) -> PreparedAllreduce | None:
        """What ``key`` stands for, made from ``request`` if it is new; None where it cannot be prepared."""
        known: Remembered[PreparedAllreduce | None] = group.world.coordinator.at_once.prepared
        if key in known:
            return known[key]
        made = request()
        return known.remember(key, None if made is None else cls._of(group, made, home))

    @classmethod
    def _of(cls, group: Group, request: OfTensors, home: Home | None) -> PreparedAllreduce | None:
        """None where there is no such call: an operation that is more than that, or a backend that has none."""
        world, engine = group.world, group.world.engine
        layout = request.layout_in(engine)
        if layout is None:
            return None
        buffer = None if home is None else home.buffer.buffer(home.offset_bytes, layout.end, layout.dtype)
        patience_s, counts = world.config.caller_patience_s, world.coordinator.counts
        reduction, label = request.reduced_by(engine, layout), request.name
        call = engine.backend.prepare_allreduce(counts, layout, reduction, buffer, patience_s, label)
        return None if call is None else cls(group, request, layout, call, home)

    @property
    def native(self) -> PreparedAllreduce | None:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        return None if self.signature is None or self.direct is None else self

    def run(self, tensors: Tensors, plan: int, count: int, heard: int) -> Outcome:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        start_ns = time.monotonic_ns() if self._recorder.enabled else 0
        outcome = self.ended(self._run(tensors.inputs, tensors.outputs, plan, count, heard))
        if start_ns and outcome is not _NOT_YET:
            ready_ns = self._call.ready_ns()
            if ready_ns:
                self._record(start_ns, ready_ns, time.monotonic_ns())
        return outcome

    def ended(self, result: int) -> Outcome:
        """See `hvdlite.coordinator.prepared.Native`."""
        outcome = outcome_of(result)
        if outcome is Outcome.FAILED:
            outcome = outcome_of(self._call.resume(result))
            if outcome is not _NOT_YET:
                self._count(1)
            return outcome
        if outcome is not _NOT_YET:
            self.count_done(1)
        return outcome

    def count_done(self, times: int) -> None:
        """See `hvdlite.coordinator.prepared.Native`."""
        self._call.count_done(times)
        self._count(times)

    def _count(self, times: int) -> None:
        self._executed.buckets += times
        self._executed.reduced_bytes += times * self._reduced_bytes

    def _record(self, start_ns: int, ready_ns: int, end_ns: int) -> None:
        add, kind = self._recorder.add, self.request.label
        add(Lane.NEGOTIATION, f"NEGOTIATE_{kind.upper()} {kind}.{self.label}", start_ns, ready_ns)
        add(Lane.NODE_ALLREDUCE, self.label, ready_ns, end_ns, self._nbytes, self._dtype)

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        return outcome_at(self._call.last(), plan, count)

    def submission(self, sequence: int, tensors: Tensors) -> Submission:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        inputs = self._views(tensors.inputs, tensors.owner)
        outputs = inputs if tensors.outputs is tensors.inputs else self._views(tensors.outputs, tensors.owner)
        return Submission(self.request, sequence, inputs, outputs, home=tensors.home)

    def tensors(self, source: int, target: int, owner: object) -> Tensors:
        """See `hvdlite.coordinator.prepared.Native`."""
        inputs = [source if self.gives else 0]
        home = None if self.home_memory is None else self._memory.find(source, self._nbytes)
        return Tensors(inputs, inputs if [target] == inputs else [target], home, owner)

    def _views(self, addresses: Sequence[int], owner: object) -> list[TensorView]:
        specs = self.request.tensors
        return [TensorView(at, spec.shape, spec.dtype, owner) for at, spec in zip(addresses, specs, strict=True)]


def allreduce_now(
    group: Group,
    inputs: Sequence[TensorView],
    outputs: Sequence[TensorView],
    reduction: Reduction = SUM,
    *,
    name: str | None = None,
    names: Sequence[str] | None = None,
    wire_dtype: DType | None = None,
    home: Home | None = None,
) -> Submission | Done:
    """`allreduce_async`, for a caller who waits at once: where it repeats, it is complete when this returns."""
    home = home or found_home(group, inputs, outputs, wire_dtype)
    place = None if home is None else home.place
    request = Allreduce.of(name, inputs, reduction, wire_dtype, place, False, names=names)
    if can_be_prepared(group) and not request.tensors_on_device:
        prepared = PreparedAllreduce.known(group, request, lambda: request, home)
        if prepared is not None:
            sources = [view.address for view in inputs]
            wanted = outputs if home is None else request.with_places(outputs, home)
            targets = sources if wanted is inputs else [view.address for view in wanted]
            group.perform(prepared, Tensors(sources, targets, home, (inputs, outputs)), name)
            return DONE
    return group.submit(request, name, inputs, outputs, home=home, background=False)


def can_be_prepared(group: Group) -> bool:
    """Whether what repeats is done in one call now; a profiler sees more if it is not."""
    return group.world.coordinator.runs_free and not group.recorder.profiler._is_profiler_enabled
