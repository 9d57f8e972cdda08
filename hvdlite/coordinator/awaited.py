"""An operation whose caller waits for it at once, and does it as soon as all ranks are ready, step by step in Python.

What has no native call (`PreparedOperation`) goes this way where it comes next in a plan that runs free: it is neither
queued nor looked for by the coordinator, and whatever comes next is not kept from the shortcut.
"""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.coordinator.meeting import Meeting
from hvdlite.coordinator.prepared import Outcome
from hvdlite.coordinator.request import Request
from hvdlite.coordinator.submission import Submission


class Awaited:
    """A `hvdlite.coordinator.prepared.Prepared`, of which each submission is another; it takes no tensors beside.

    Args:
        meeting: of all ranks.
        execute: does it, and completes it.
    """

    native = None
    is_valid = True

    def __init__(self, submission: Submission, meeting: Meeting, execute: Callable[[Submission], None]) -> None:
        self._submission = submission
        self._meeting = meeting
        self._execute = execute
        self._executed: Outcome | None = None  # how that ended, once it has begun

    @property
    def request(self) -> Request:
        """See `Prepared`."""
        return self._submission.request

    @property
    def label(self) -> str:
        """See `Prepared`."""
        return self._submission.label

    def run(self, tensors: None, plan: int, count: int, heard: int) -> Outcome:
        """See `Prepared`."""
        meeting = self._meeting
        if meeting.run(self._submission, plan, count, heard) is Outcome.NOT_YET:
            return Outcome.NOT_YET
        self._executed = Outcome.FAILED  # unless it comes to an end
        self._execute(self._submission)
        self._executed = Outcome.DONE
        return Outcome.DONE_AND_RUNG if meeting.has_news(heard) else Outcome.DONE

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """See `Prepared`."""
        if self._executed is not None:
            return self._executed
        met = self._meeting.outcome(plan, count)
        return met if met in (None, Outcome.NOT_YET) else Outcome.FAILED

    def submission(self, sequence: int, tensors: None) -> Submission:
        """See `Prepared`."""
        return self._submission
