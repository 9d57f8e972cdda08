"""Operations across nodes that ranks begin before all are ready: what a coordinator asks of an engine."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite._native import ReadyCounts
from hvdlite.collectives.early import EarlyAllreduce
from hvdlite.collectives.early_call import early_call
from hvdlite.coordinator.prepared import Outcome, outcome_at, outcome_of
from hvdlite.coordinator.request import Request
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.engine import Engine
from hvdlite.memory.layout import Layout

_BYTE = Layout.of([1], DType.UINT8, DType.UINT8)
_ANY = Reduction(ReduceOp.MAX)
_WORDS = np.array([0, 1], np.uint8)  # of who is ready for what comes after a meeting, and of who drops it
_READY = [_WORDS.ctypes.data]
_NOWHERE = [0]  # the address of what nobody wants


def _is_begun(early: EarlyAllreduce, request: Request) -> bool:
    """Whether ``request`` is begun itself, and not met for."""
    return request.early_bytes is not None and early.takes(request.early_bytes)


class EarlyOperations:
    """Those that ``engine`` does; see `hvdlite.coordinator.readiness.Early`."""

    def __init__(self, engine: Engine) -> None:
        assert engine.early is not None
        self._engine = engine
        self._early = engine.early

    def takes(self, request: Request) -> bool:
        """Up to the bytes that the backend takes at once. What differs between ranks is taken to be little."""
        nbytes = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in request.tensors)
        return not request.tensors_on_device and self._early.takes(max(nbytes, _BYTE.nbytes))

    def begin(self, submission: Submission) -> None:
        """By its operation, or a meeting."""
        request: Any = submission.request
        if _is_begun(self._early, request):
            request.begin_early(self._engine, submission)
        else:
            self._begin_meeting(submission.label, is_dropped=False)

    def _begin_meeting(self, label: str, *, is_dropped: bool) -> None:
        word = self._engine.memory.tensors([_WORDS.ctypes.data + is_dropped], _BYTE.numels, _BYTE.offsets)
        self._early.begin(word, _BYTE, _ANY, label)

    @property
    def has_begun(self) -> bool:
        """Also by a prepared operation."""
        return self._early.has_begun

    def has_come(self) -> bool:
        """What has begun."""
        return self._early.has_come()

    def is_met(self, request: Request) -> bool:
        """Who drops a meeting says so in it."""
        return not _is_begun(self._early, request) and not ctypes.c_uint8.from_address(self._early.result_address).value

    def look(self, is_disturbed: Callable[[], bool]) -> bool:
        """For what has begun."""
        return self._early.look(is_disturbed)

    def enter(self, request: Request) -> None:
        """What was begun itself is executed as it is."""
        if not _is_begun(self._early, request):
            self._end_meeting(request, is_dropped=False)

    def _end_meeting(self, request: Request, *, is_dropped: bool) -> None:
        if not self._early.has_begun:
            self._begin_meeting(request.name, is_dropped=is_dropped)
        self._early.finish(None, _BYTE)

    def drop(self, request: Request) -> None:
        """By its operation, or a meeting."""
        operation: Any = request
        if _is_begun(self._early, request):
            operation.drop_early(self._engine)
        else:
            self._end_meeting(request, is_dropped=True)

    def meeting(self, counts: ReadyCounts, patience_s: float) -> MeetingAcrossNodes:
        """See `hvdlite.coordinator.readiness.Early`."""
        return MeetingAcrossNodes(self._early, counts, patience_s)


class MeetingAcrossNodes:
    """See `hvdlite.coordinator.meeting.Meeting`."""

    def __init__(self, early: EarlyAllreduce, counts: ReadyCounts, patience_s: float) -> None:
        # What it takes is negotiation, and no message of the operation's.
        self._call = early_call(early, counts, _BYTE, _ANY, patience_s, "meeting", is_recorded=False)
        self._early = early
        self._counts = counts

    def is_for(self, request: Request) -> bool:
        """See `hvdlite.coordinator.meeting.Meeting`."""
        return not _is_begun(self._early, request)

    def run(self, label: str, plan: int, count: int, heard: int) -> Outcome:
        """See `hvdlite.coordinator.meeting.Meeting`."""
        call = self._call
        call.label = label
        result = call.run(_READY, _NOWHERE, plan, count, heard)
        if result > Outcome.DONE_AND_RUNG:
            result = call.resume(result)
        elif result != Outcome.NOT_YET:
            call.count_done(1)
        return outcome_of(result)

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """See `hvdlite.coordinator.meeting.Meeting`."""
        return outcome_at(self._call.last(), plan, count)

    def has_news(self, heard: int) -> bool:
        """See `hvdlite.coordinator.meeting.Meeting`."""
        return self._counts.has_news(heard)
