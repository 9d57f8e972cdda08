"""When the coordinator thread looks at what a user thread has queued.

To wake it takes longer than a small operation, and is for nothing where the user thread goes on to wait, and does the
work itself.
"""

from __future__ import annotations

from hvdlite._native import Shortcut
from hvdlite.coordinator.collector import Collector
from hvdlite.coordinator.plan_member import PlanMember
from hvdlite.coordinator.request import Request
from hvdlite.coordinator.submission import Pace
from hvdlite.coordinator.worker import Worker


class Attention:
    """Part of a coordinator, whose objects it is given. All with the lock of what is in flight, but for `turn`."""

    def __init__(self, worker: Worker, shortcut: Shortcut, plan: PlanMember, pace: Pace, collector: Collector) -> None:
        self._worker = worker
        self._shortcut = shortcut
        self._plan = plan
        self._pace = pace
        self._collector = collector
        self._was_called = False

    def call(self) -> None:
        """There is something new: wake the thread, unless it has yet to follow a ring."""
        self._shortcut.close()
        if not self._was_called:
            self._was_called = True
            self._worker.wake()

    def call_within(self, seconds: float) -> None:
        """There is something to be looked at by then."""
        self._shortcut.close()
        if not self._worker.looks_within(seconds):
            self.call()

    def call_for(self, request: Request) -> None:
        """It was queued: the thread is to look, now or, if the user thread always sees to it, in `BURST_S` at most."""
        self._pace.is_put_off = self._plan.free is not None and self._pace.is_followed_soon(request)
        if self._pace.is_put_off:
            self._collector.expect_more()  # which calls within that time
        else:
            self.call()

    def turn(self) -> None:
        """Of who is at work: what was queued until now is looked at."""
        self._was_called = False
