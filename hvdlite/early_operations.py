"""Operations across nodes that ranks begin before all are ready: what a coordinator asks of an engine."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite._native import ReadyCounts
from hvdlite.collectives.early_call import ANY, MEETING, NOBODYS, meeting_call
from hvdlite.coordinator.prepared import Outcome, outcome_at, outcome_of
from hvdlite.coordinator.request import Request
from hvdlite.coordinator.submission import Submission
from hvdlite.engine import Engine

_DROPPED = np.array([1], np.uint8)  # who drops what comes after a meeting says so in it


def _is_begun(engine: Engine, request: Request) -> bool:
    """Whether ``request`` is begun itself, and not met for."""
    operation: Any = request
    layout = operation.early_layout(engine)
    return layout is not None and engine.early is not None and engine.early.takes(layout.nbytes)


class EarlyOperations:
    """Those that ``engine`` does; see `hvdlite.coordinator.readiness.Early`."""

    def __init__(self, engine: Engine) -> None:
        assert engine.early is not None
        self._engine = engine
        self._early = engine.early

    def takes(self, request: Request) -> bool:
        """Up to the bytes that the backend takes at once. What differs between ranks is taken to be little."""
        nbytes = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in request.tensors)
        return not request.tensors_on_device and self._early.takes(max(nbytes, MEETING.nbytes))

    def begin(self, submission: Submission) -> None:
        """By its operation, or a meeting."""
        request: Any = submission.request
        if _is_begun(self._engine, request):
            request.begin_early(self._engine, submission)
        else:
            self._begin_meeting(submission.label, is_dropped=False)

    def _begin_meeting(self, label: str, *, is_dropped: bool) -> None:
        words = [_DROPPED.ctypes.data] if is_dropped else NOBODYS
        self._early.begin(self._early.tensors(words, MEETING), MEETING, ANY, label)

    @property
    def has_begun(self) -> bool:
        """Also by a prepared operation."""
        return self._early.has_begun

    def has_come(self) -> bool:
        """What has begun."""
        return self._early.has_come()

    def is_met(self, request: Request) -> bool:
        """Who drops a meeting says so in it."""
        operation: Any = request
        if _is_begun(self._engine, request):
            return bool(operation.is_met(self._engine, self._early.result_address))
        return not ctypes.c_uint8.from_address(self._early.result_address).value

    def look(self, is_disturbed: Callable[[], bool]) -> bool:
        """For what has begun."""
        return self._early.look(is_disturbed)

    def enter(self, request: Request) -> None:
        """What was begun itself is executed as it is."""
        if not _is_begun(self._engine, request):
            self._end_meeting(request, is_dropped=False)

    def _end_meeting(self, request: Request, *, is_dropped: bool) -> None:
        if not self._early.has_begun:
            self._begin_meeting(request.name, is_dropped=is_dropped)
        self._early.finish(None, MEETING)

    def drop(self, request: Request) -> None:
        """By its operation, or a meeting."""
        operation: Any = request
        if _is_begun(self._engine, request):
            operation.drop_early(self._engine)
        else:
            self._end_meeting(request, is_dropped=True)

    def meeting(self, counts: ReadyCounts, patience_s: float) -> MeetingAcrossNodes:
        """See `hvdlite.coordinator.readiness.Early`."""
        return MeetingAcrossNodes(self._engine, counts, patience_s)


class MeetingAcrossNodes:
    """See `hvdlite.coordinator.meeting.Meeting`. Ranks meet by a message of a byte, or in what they meet for."""

    def __init__(self, engine: Engine, counts: ReadyCounts, patience_s: float) -> None:
        assert engine.early is not None
        # What it takes is negotiation, and no message of the operation's.
        self._call = meeting_call(engine.early, counts, patience_s, "meeting")
        self._engine = engine
        self._early = engine.early
        self._counts = counts
        self._patience_s = patience_s
        self._begun = 0, 0, Outcome.NOT_YET
        """Of the last operation in which ranks have met: what `outcome` is."""

    def run(self, submission: Submission, plan: int, count: int, heard: int) -> Outcome:
        """See `hvdlite.coordinator.meeting.Meeting`."""
        if _is_begun(self._engine, submission.request):
            self._begun = plan, count, Outcome.FAILED  # unless it comes to an end
            outcome = self._begin(submission, plan, count, heard)
            self._begun = plan, count, outcome
            return outcome
        call = self._call
        call.label = submission.label
        result = call.run(NOBODYS, NOBODYS, plan, count, heard)
        if result > Outcome.DONE_AND_RUNG:
            result = call.resume(result)
        elif result != Outcome.NOT_YET:
            call.count_done(1)
        return outcome_of(result)

    def _begin(self, submission: Submission, plan: int, count: int, heard: int) -> Outcome:
        early, counts = self._early, self._counts
        operation: Any = submission.request
        counts.want_ring(False)
        counts.set(plan, count)
        if not early.await_node(counts, plan, count, heard, self._patience_s):
            return Outcome.NOT_YET
        operation.begin_early(self._engine, submission)
        has_come = early.comes_soon(lambda: counts.has_news(heard), self._patience_s)
        return Outcome.DONE if has_come else Outcome.NOT_YET

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """See `hvdlite.coordinator.meeting.Meeting`."""
        *where, outcome = self._begun
        return outcome if where == [plan, count] else outcome_at(self._call.last(), plan, count)

    def has_news(self, heard: int) -> bool:
        """See `hvdlite.coordinator.meeting.Meeting`."""
        return self._counts.has_news(heard)
