"""A blocking operation of which ranks tell how much they give, again and again, and give as much as the last time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlite._native import DirectCall
from hvdlite.collectives.base import PreparedCall
from hvdlite.collectives.early_call import GatherCall, gather_call
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.prepared import Outcome
from hvdlite.coordinator.request import NAMED
from hvdlite.coordinator.submission import Submission
from hvdlite.group import Group
from hvdlite.memory.views import TensorView
from hvdlite.operations.prepared import PreparedOperation, Tensors
from hvdlite.operations.telling import Telling

Resize = Callable[[Any, tuple[int, ...]], TensorView]
"""Gives an object that was made for a result another shape; returns its memory."""


class PreparedTelling(PreparedOperation):
    """``request`` of one tensor.

    Args:
        numbers: of this rank; see `Telling.numbers`.
        resize: what `new_result` has made, where ranks give something else.
    """

    request: Telling

    def __init__(
        self, group: Group, request: Telling, call: PreparedCall, numbers: Sequence[int], resize: Resize
    ) -> None:
        super().__init__(group, request, call, request.nbytes(numbers), request.tensors[0].dtype.label)
        self.lane = request.lane
        self._engine = group.world.engine
        self._numbers = numbers
        self._resize = resize
        self._finished = 0, 0  # operation of a plan, the last that was done step by step

    @classmethod
    def of(cls, group: Group, request: Telling, numbers: Sequence[int], resize: Resize) -> PreparedTelling | None:
        """None where there is no such call."""
        world = group.world
        counts, patience_s = world.coordinator.counts, world.config.caller_patience_s
        (row_bytes,) = request.row_bytes
        rows = numbers, request.column(group.rank), row_bytes, request.is_alltoall
        if world.engine.early is None:
            call = world.engine.backend.prepare_gather(counts, *rows, patience_s, request.name)
            return None if call is None else cls(group, request, call, numbers, resize)
        room = world.engine.rooms.of(request)
        room_then = 0 if room is None else room.now  # once: what another thread submitted may be under way
        packets = request.packets_with(world.engine, room_then)
        if packets is None or room is None or not room_then:
            return None
        across = gather_call(world.engine.early, counts, packets, room, room_then, rows, patience_s, request.name)
        return None if across is None else AcrossNodes(group, request, across, numbers, resize)

    def run(self, tensors: Tensors, plan: int, count: int, heard: int) -> Outcome:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        assert self.direct is not None
        result, rows = tensors.owner[-1], self.direct.result_rows
        if len(result) != rows:  # another thread has come before, and was given something else
            target = self._resize(result, (rows, *self.request.tensors[0].shape))
            tensors = tensors._replace(outputs=[target.address])
        return super().run(tensors, plan, count, heard)

    def ended(self, result: int, tensors: Tensors) -> Outcome:
        """See `hvdlite.coordinator.prepared.Native`."""
        if result != DirectCall.BEGUN:
            return super().ended(result, tensors)
        plan, count, _ = self._call.last()
        if not self._go_on(self.submission(NAMED, tensors)):
            return Outcome.NOT_YET
        self._count(1)
        self._finished = plan, count
        return Outcome.DONE_AND_RUNG  # perhaps it was

    def _go_on(self, submission: Submission) -> bool:
        """From where the native call has ended; whether others were not late."""
        self.request.run(self._engine, [(Response(self.request, NAMED), submission)], self.label)
        return True

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        return Outcome.DONE if self._finished == (plan, count) else super().outcome(plan, count)

    def submission(self, sequence: int, tensors: Tensors) -> Submission:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        spec, result = self.request.tensors[0], tensors.owner[-1]
        rows = sum(self._numbers)
        given = TensorView(tensors.inputs[0], (rows, *spec.shape), spec.dtype, tensors.owner)
        return Submission(
            self.request,
            sequence,
            [given],
            splits=self._numbers,
            allocate=lambda _, shape: self._resize(result, shape),
        )


class AcrossNodes(PreparedTelling):
    """By packets, of which ranks choose other ones where they give much more, or less."""

    _call: GatherCall

    @property
    def is_valid(self) -> bool:
        """See `PreparedOperation`."""
        return self._call.direct.is_valid

    def _go_on(self, submission: Submission) -> bool:
        call = self._call
        if call.resume(DirectCall.BEGUN) != DirectCall.BEGUN:
            return False
        self.request.go_on(self._engine, submission, call.packets, self.label)
        return True
