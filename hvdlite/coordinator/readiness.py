"""How ranks see how far a plan that runs free may go: in their node by counts, between nodes by the operations.

Counts are in the control page of a node. Between nodes there is nothing that a rank could look at, but there a small
allreduce is its own agreement: whoever is ready for it begins it, and its result comes once all have begun. Before any
other operation ranks do one of a single byte, which is their meeting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlite._native import ReadyCounts
from hvdlite.coordinator.burst import Burst
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.frozen_plan import Batch, FrozenPlan
from hvdlite.coordinator.fusion import bursts
from hvdlite.coordinator.meeting import Meeting
from hvdlite.coordinator.messages import REMEMBERED_PLANS
from hvdlite.coordinator.order_watch import Found
from hvdlite.coordinator.plan_member import Wish
from hvdlite.coordinator.request import Request
from hvdlite.coordinator.submission import Submission

_FIRST_LOOK_S = 50e-6  # MPI rings no bell: who waits for a message looks again and again,
_LAST_LOOK_S = 2e-3  # less often the longer it takes
_SOON_S = 100e-6  # in which what has begun is looked for at once
_PER_WAIT = 8  # looks while the wait gets twice as long
_AGREEMENT_S = 0.02  # after which a change of plans is for the log, whose watch sees who does not come
_PLACE_BITS = ReadyCounts.NEXT_BITS - (REMEMBERED_PLANS - 1).bit_length()


class Early(Protocol):
    """Operations that a rank begins before all are ready, one at a time, or, where it cannot, a meeting before them."""

    def takes(self, request: Request) -> bool:
        """Whether to agree on ``request`` is most of what it costs; alike on all ranks. Never where none may begin."""

    def begin(self, submission: Submission) -> None:
        """Put this rank's part on its way, as all ranks of the node do now; `enter` follows, or `drop`."""

    @property
    def has_begun(self) -> bool:
        """Whether something has, and is neither executed nor entered."""

    def has_come(self) -> bool:
        """Of what has begun: whether all ranks have."""

    def is_met(self, request: Request) -> bool:
        """Of what has come: whether it is a meeting for ``request``, and nobody has dropped it, so that all execute."""

    def look(self, is_disturbed: Callable[[], bool]) -> bool:
        """Look for `has_come` or ``is_disturbed()``, as long as is polite; whether it is so."""

    def enter(self, request: Request) -> None:
        """All ranks have begun, or do so now, and execute it next."""

    def drop(self, request: Request) -> None:
        """Some ranks have begun what will not be executed; all ranks call it at one place."""

    def meeting(self, counts: ReadyCounts, patience_s: float) -> Meeting:
        """`begin` and `enter` in one, for who waits, of what needs a meeting.

        Args:
            patience_s: how long others may be late before the coordinator waits for them.
        """


class Readiness(Protocol):
    """Of one plan after the other that runs free."""

    def bursts(self, found: Found) -> Sequence[int] | None:
        """For the root: the places in ``found`` at which bursts begin; None: it does not run free."""

    def tell(self, number: int, plan: FrozenPlan) -> None:
        """Say how much of ``plan`` this rank is ready for."""

    def ready(self, number: int, plan: FrozenPlan, *, is_held: bool) -> int:
        """How many operations all ranks are ready for, and may be executed now."""

    def enter(self, batch: Batch) -> None:
        """All ranks are ready for ``batch``, and execute it next."""

    def agree(self, number: int, wish: Wish, heard: int) -> bool:
        """Whether all ranks want the same in place of plan ``number``, which has ended then; waits for them a moment.

        Args:
            heard: how many rings this rank has followed.
        """

    def look(self, rings: int) -> bool:
        """Look for what rings no bell, where it may come soon; whether it has, or the bell has rung since ``rings``."""

    def patience_s(self) -> float:
        """When to ask again if nobody rings."""


class ReadinessInNode:
    """All ranks are on one node.

    Args:
        burst_bytes: the most that operations have which are done together, at this time.
        spin_us: how long a thread looks for others before it sleeps.
    """

    def __init__(self, page: ControlPage, burst_bytes: Callable[[], int], spin_us: int) -> None:
        self._page = page
        self._burst_bytes = burst_bytes
        self._spin_us = spin_us

    def bursts(self, found: Found) -> Sequence[int] | None:
        """See `Readiness`."""
        return bursts(found.requests, found.after_pause, self._burst_bytes())

    def tell(self, number: int, plan: FrozenPlan) -> None:
        """See `Readiness`."""
        tellable = plan.tellable
        if tellable > plan.told:
            plan.told = tellable
            self._page.want_ring(True)
            self._page.set_ready(number, plan.told)

    def ready(self, number: int, plan: FrozenPlan, *, is_held: bool) -> int:
        """See `Readiness`. What is ready everywhere is executed in any case: ranks that have seen that are at it."""
        return self._page.ready(number)

    def enter(self, batch: Batch) -> None:
        """See `Readiness`. Everybody has seen that."""

    def agree(self, number: int, wish: Wish, heard: int) -> bool:
        """See `Readiness`."""
        if wish.first >= 1 << _PLACE_BITS:
            return False
        wanted = (number - wish.plan) << _PLACE_BITS | wish.first
        return self._page.agree(number, wanted, heard, _AGREEMENT_S, self._spin_us)

    def look(self, rings: int) -> bool:
        """See `Readiness`. All rings."""
        return False

    def patience_s(self) -> float:
        """See `Readiness`."""
        return math.inf


class ReadinessAcrossNodes:
    """Operations are begun one at a time, by all ranks of a node together once each has told that it is ready.

    What a rank has told to be ready for it begins, also while the plan is held, since others of its node may be at it.
    Whether it is executed the end of the plan says then: its result may be one of ranks that have dropped it. Only of a
    meeting a rank sees that nobody has; then others may wait inside of the operation, and can be told no end.
    """

    def __init__(self, page: ControlPage, early: Early, clock: Callable[[], float]) -> None:
        self._page = page
        self._early = early
        self._clock = clock
        self._since_s = 0.0

    def bursts(self, found: Found) -> Sequence[int] | None:
        """See `Readiness`. One at a time, or not at all.

        The log rings those that wait for late ranks, and counts what is submitted together at once. So it is what a
        plan goes by in which operations of few bytes do not prevail.
        """
        requests = found.requests
        prevail = 2 * sum(map(self._early.takes, requests)) > len(requests)
        return range(len(requests)) if found.came_alone and prevail else None

    def tell(self, number: int, plan: FrozenPlan) -> None:
        """See `Readiness`."""
        if plan.told == plan.done < plan.ready:
            plan.told = plan.done + 1
            self._page.want_ring(True)
            self._page.set_ready(number, plan.told)

    def ready(self, number: int, plan: FrozenPlan, *, is_held: bool) -> int:
        """See `Readiness`."""
        if plan.told > plan.done and not self._early.has_begun and self._page.ready(number) > plan.done:
            self._since_s = self._clock()
            self._early.begin(plan.next)
        has_come = self._early.has_begun and self._early.has_come()
        return plan.done + (has_come and (not is_held or self._early.is_met(plan.next.request)))

    def enter(self, batch: Batch) -> None:
        """See `Readiness`."""
        assert not isinstance(batch, Burst)  # there are none of several operations
        for response in batch:
            self._early.enter(response.request)

    def agree(self, number: int, wish: Wish, heard: int) -> bool:
        """See `Readiness`. Nobody could see what ranks of other nodes want."""
        return False

    def look(self, rings: int) -> bool:
        """See `Readiness`."""
        is_new = self._clock() - self._since_s < _SOON_S
        return self._early.has_begun and is_new and self._early.look(lambda: self._page.rings() != rings)

    def patience_s(self) -> float:
        """See `Readiness`."""
        if not self._early.has_begun:
            return math.inf
        return min(max(_FIRST_LOOK_S, (self._clock() - self._since_s) / _PER_WAIT), _LAST_LOOK_S)
