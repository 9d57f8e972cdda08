"""An operation whose caller waits for it at once, and does it as soon as all ranks are ready, step by step in Python.

What has no native call (`PreparedAllreduce`) goes this way where it comes next in a plan that runs free on one node: it
is neither queued nor looked for by the coordinator, and whatever comes next is not kept from the shortcut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdlite._native import ReadyCounts
from hvdlite.coordinator.prepared import Outcome
from hvdlite.coordinator.request import Request
from hvdlite.coordinator.submission import Submission

if TYPE_CHECKING:
    from hvdlite._native import DirectCall, Signature


class Awaited:
    """A `hvdlite.coordinator.prepared.Prepared`, of which each submission is another; it takes no tensors beside.

    Args:
        counts: of the ranks.
        execute: does it, and completes it.
        patience_s: how long other ranks may be late before the coordinator waits for them.
        spin_us: how long to look for them before sleeping.
    """

    signature: Signature | None = None
    direct: DirectCall | None = None

    def __init__(
        self,
        submission: Submission,
        counts: ReadyCounts,
        execute: Callable[[Submission], None],
        patience_s: float,
        spin_us: int,
    ) -> None:
        self._submission = submission
        self._counts = counts
        self._execute = execute
        self._patience_s = patience_s
        self._spin_us = spin_us
        self._place: tuple[int, int] | None = None  # plan and count, once they are told
        self._outcome = Outcome.NOT_YET

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
        counts = self._counts
        self._place = plan, count
        counts.want_ring(False)
        counts.set(plan, count)
        if not counts.wait(plan, count, heard, self._patience_s, self._spin_us):
            return Outcome.NOT_YET
        self._outcome = Outcome.FAILED  # unless it comes to an end
        self._execute(self._submission)
        self._outcome = Outcome.DONE_AND_RUNG if counts.has_news(heard) else Outcome.DONE
        return self._outcome

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """See `Prepared`."""
        if self._place != (plan, count):
            return None
        if self._outcome is Outcome.NOT_YET:
            self._counts.set(plan, count)  # an interrupt may have come just before
        return self._outcome

    def submission(self, sequence: int, tensors: None) -> Submission:
        """See `Prepared`."""
        return self._submission

    def ended(self, result: int) -> Outcome:
        """There is no native call."""
        raise AssertionError(result)

    def count_done(self, times: int) -> None:
        """Nobody else does it."""
        raise AssertionError(times)

    def tensors(self, source: int, target: int, owner: object) -> None:
        """Nobody else begins it."""
        raise AssertionError(owner)
