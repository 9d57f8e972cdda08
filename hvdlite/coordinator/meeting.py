"""How a rank that waits for one operation of a plan says that it is ready, and learns that all are."""

from __future__ import annotations

from typing import Protocol

from hvdlite._native import ReadyCounts
from hvdlite.coordinator.prepared import Outcome
from hvdlite.coordinator.submission import Submission


class Meeting(Protocol):
    """Of all ranks, once for each operation."""

    def run(self, submission: Submission, plan: int, count: int, heard: int) -> Outcome:
        """Say that this rank is ready for operation ``count``, from 1, of a plan that runs free; wait for the others.

        Args:
            submission: that operation; it may have begun after that, so that it goes on where it is executed.
            plan: its number.
            heard: how many rings were followed.

        Returns:
            ``NOT_YET`` where others are late.

        Raises:
            HorovodInternalError: it came to nothing.
        """

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """How the last `run` ended, or was interrupted; None: it was not for that, or has told nobody."""

    def has_news(self, heard: int) -> bool:
        """Whether the doorbell has rung since."""


class MeetingInNode:
    """By counts that all ranks see, see csrc/node/ready_counts.h.

    Args:
        patience_s: how long others may be late before the coordinator waits for them.
        spin_us: how long to look for them before sleeping.
    """

    def __init__(self, counts: ReadyCounts, patience_s: float, spin_us: int) -> None:
        self._counts = counts
        self._patience_s = patience_s
        self._spin_us = spin_us
        self._last: tuple[int, int] | None = None

    def run(self, submission: Submission, plan: int, count: int, heard: int) -> Outcome:
        """See `Meeting`."""
        counts = self._counts
        self._last = plan, count
        counts.want_ring(False)
        counts.set(plan, count)
        return Outcome.DONE if counts.wait(plan, count, heard, self._patience_s, self._spin_us) else Outcome.NOT_YET

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """See `Meeting`."""
        if self._last != (plan, count):
            return None
        self._counts.want_ring(True)
        self._counts.set(plan, count)  # an interrupt may have come just before
        return Outcome.NOT_YET

    def has_news(self, heard: int) -> bool:
        """See `Meeting`."""
        return self._counts.has_news(heard)
