"""A blocking operation that is one allreduce, again and again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from hvdlite.collectives.base import DONE, Done, PreparedCall
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.group import Group
from hvdlite.memory.base import Home
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import TensorView
from hvdlite.operations.allreduce import Allreduce, found_home
from hvdlite.operations.one_allreduce import OfTensors
from hvdlite.operations.prepared import PreparedOperation, Tensors, can_be_prepared, prepared_once
from hvdlite.recorder import Lane


class PreparedAllreduce(PreparedOperation):
    """``request``, whose tensors lie in ``layout``."""

    lane = Lane.NODE_ALLREDUCE

    def __init__(self, group: Group, request: OfTensors, layout: Layout, call: PreparedCall, home: Home | None) -> None:
        super().__init__(group, request, call, layout.nbytes, layout.wire_dtype.label)
        self.gives = request.gives(group.ranks[group.rank])
        self.home_memory = None if home is None else weakref.ref(home.buffer.owner)
        self._memory = group.memory

    @classmethod
    def of(cls, group: Group, request: OfTensors | None, home: Home | None) -> PreparedAllreduce | None:
        """None where there is no such call: an operation that is more than that, or a backend that has none."""
        world, engine = group.world, group.world.engine
        layout = None if request is None else request.layout_in(engine)
        if request is None or layout is None:
            return None
        buffer = None if home is None else home.buffer.buffer(home.offset_bytes, layout.end, layout.dtype)
        patience_s, counts = world.config.caller_patience_s, world.coordinator.counts
        reduction, label = request.reduced_by(engine, layout), request.name
        call = engine.backend.prepare_allreduce(counts, layout, reduction, buffer, patience_s, label)
        return None if call is None else cls(group, request, layout, call, home)

    def _home_of(self, source: int) -> Home | None:
        return None if self.home_memory is None else self._memory.find(source, self._nbytes)


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
        prepared = prepared_once(group, request, lambda: PreparedAllreduce.of(group, request, home))
        if prepared is not None:
            sources = [view.address for view in inputs]
            wanted = outputs if home is None else request.with_places(outputs, home)
            targets = sources if wanted is inputs else [view.address for view in wanted]
            group.perform(prepared, Tensors(sources, targets, home, (inputs, outputs)), name)
            return DONE
    return group.submit(request, name, inputs, outputs, home=home, background=False)
