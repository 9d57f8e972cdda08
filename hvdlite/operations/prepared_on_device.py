"""A blocking allreduce of tensors on a GPU, again and again: all of it is enqueued by one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlite import _native
from hvdlite.collectives.base import EnqueuingCall
from hvdlite.coordinator.prepared import Outcome
from hvdlite.errors import gpu_blamed
from hvdlite.group import Group
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import OnDevice, TensorView
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.prepared import PreparedOperation, Tensors
from hvdlite.recorder import Lane

if TYPE_CHECKING:
    from hvdlite.device_engine import DeviceEngine


class PreparedOnDevice(PreparedOperation):
    """``request``, whose tensors are on the GPU of ``where``, and lie in ``layout``.

    What a call does is in order with the stream on which its caller works, before and after.
    """

    lane = Lane.NODE_ALLREDUCE

    def __init__(self, group: Group, request: Allreduce, layout: Layout, call: EnqueuingCall, where: OnDevice) -> None:
        super().__init__(group, request, call, layout.nbytes, layout.wire_dtype.label)
        self._enqueuing = call
        self._enqueued = group.world.executor.enqueued
        self._rank = group.world.topology.rank
        self._ordinal, self._current_stream = where.ordinal, where.current_stream

    @classmethod
    def of(
        cls, group: Group, device: DeviceEngine, request: Allreduce | None, where: OnDevice
    ) -> PreparedOnDevice | None:
        """None where there is no such call: an operation that is more than that, or a backend that has none."""
        layout = None if request is None or request.place is not None else request.only_layout
        if request is None or layout is None or not device.can_run(request):
            return None
        world, engine = group.world, device.engine
        reduction, staging = request.reduced_by(engine, layout), engine.chunk(layout.wire_dtype)
        patience_s = world.config.caller_patience_s
        call = engine.backend.prepare_enqueuing(world.coordinator.counts, layout, reduction, staging, patience_s)
        return None if call is None else cls(group, request, layout, call, where)

    def run(self, tensors: Tensors, plan: int, count: int, heard: int) -> Outcome:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        self._enqueuing.use_stream(self._current_stream())
        is_first = False
        try:
            outcome = super().run(tensors, plan, count, heard)
        except RuntimeError:
            if self.outcome(plan, count) is not Outcome.FAILED:
                raise  # this rank alone has heard of it
            with gpu_blamed(self._rank, f"'{self.label}'"):
                raise
        finally:  # also where an interrupt comes as the call returns
            done = self._enqueuing.take_done()
            if done is not None:
                is_first = self._enqueued(done, self)
        return Outcome.DONE_AND_RUNG if is_first else outcome  # somebody has to look at the GPU from now on

    def _views(self, addresses: Sequence[int], owner: object) -> list[TensorView]:
        ready = _native.Moment(self._ordinal, self._current_stream())
        where = OnDevice(self._ordinal, ready, self._current_stream)
        return [view._replace(device=where) for view in super()._views(addresses, owner)]
