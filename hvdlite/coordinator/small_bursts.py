"""Bursts of few bytes: begun by who submits the last operation, and completed by who waits, each in one native call.

Between the two nobody waits for this rank, so its thread sleeps on. To the coordinator such a burst is one that has
come as any other: whatever is in the way, it goes on from there. Once it was done so, the shortcut does it without
Python (csrc/calls/started_burst.h); what that leaves comes here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hvdlite._native import PlannedBurst
from hvdlite.coordinator.at_once import AtOnce
from hvdlite.coordinator.burst import Burst, KnownBurst
from hvdlite.coordinator.frozen_plan import FrozenPlan
from hvdlite.coordinator.messages import Notice
from hvdlite.coordinator.plan_member import PlanMember
from hvdlite.coordinator.prepared import Outcome, PreparedBurst, outcome_at, outcome_of
from hvdlite.coordinator.remembered import Remembered
from hvdlite.coordinator.submission import Submission
from hvdlite.coordinator.worker import Worker
from hvdlite.errors import HorovodInternalError
from hvdlite.recorder import Recorder

_NOT_YET = Outcome.NOT_YET


class SmallBursts:
    """Part of a coordinator, whose objects it is given.

    Args:
        queue: what is submitted and the coordinator has yet to look at.
        was_done: a burst, here.
        prepare: None for a burst that is not of few bytes.
        end: of the world, by what has failed.
        check: raises what all ranks hear of that.
        clock: in seconds.
    """

    def __init__(
        self,
        worker: Worker,
        plan: PlanMember,
        recorder: Recorder,
        at_once: AtOnce,
        queue: deque[Submission | Burst | Notice],
        was_done: Callable[[Burst], None],
        prepare: Callable[[KnownBurst], PreparedBurst | None],
        end: Callable[[BaseException], None],
        check: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._plan = plan
        self._recorder = recorder
        self._at_once = at_once
        self._queue = queue
        self._was_done = was_done
        self._prepare = prepare
        self._end = end
        self._check = check
        self._clock = clock
        self._prepared: Remembered[PreparedBurst | None] = Remembered()
        self._last: Burst | None = None  # that was started

    def forget(self) -> None:
        """What was prepared is done another way from now on, or not at all."""
        self._prepared.clear()
        self._last = None

    def start(self, burst: Burst) -> bool:
        """Tell the other ranks of ``burst`` and give them this rank's part; False where nothing has happened."""
        known, worker = burst.known, self._worker
        if known not in self._prepared:
            self._prepared.remember(known, self._prepare(known))
        prepared = self._prepared.get(known)
        if prepared is None or self._recorder.enabled or worker.is_own_thread_at_work:
            return False
        return worker.attempt(self._start, burst, prepared) or False

    def _start(self, burst: Burst, prepared: PreparedBurst) -> bool:
        self._at_once.settle_or_end()
        if not self._admit(burst):
            return False
        self._last = burst
        try:
            plan, parts = self._plan.free, burst.parts
            assert plan is not None
            sources, targets = [part[0] for part in parts], [part[1] for part in parts]
            prepared.direct.start(sources, targets, self._plan.number, plan.ready)
            plan.told = plan.ready
            burst.complete = self._complete
            self._show(plan, burst.known, prepared)
        except BaseException:
            self._worker.wake()  # the thread does it
            raise
        return True

    def _admit(self, burst: Burst) -> bool:
        """Whether all there is to do is ``burst``, and the plan, which runs free, has taken it."""
        plan, queue = self._plan.free, self._queue
        if plan is None or plan.waits or len(queue) != 1 or queue[0] is not burst:
            return False
        if not self._plan.admit_burst(burst, self._clock()):
            return False
        queue.popleft()
        return True

    def go_on(self, burst: Burst, prepared: PreparedBurst, result: int) -> None:
        """With what the shortcut has started of ``prepared``, after a call that has returned ``result``. By who is at
        work."""
        plan = self._plan.free
        try:  # others know that this rank is ready, so it has to be counted
            assert plan is not None, burst.label
            self._prepared.remember(burst.known, prepared)
            self._last = burst
            was_next = plan.offer_burst(burst)
            assert was_next, burst.label
            plan.told = plan.ready
            self._plan.moved(self._clock())
            burst.complete = self._complete
        except BaseException as error:
            self._end(error)
            raise
        self._do_second(burst, waits=False, result=result)

    def settle(self) -> None:
        """Complete what was started, if all ranks are about to."""
        if self._last is not None and not self._last.is_done:
            self._complete(self._last, waits=False)

    def _complete(self, burst: Burst, waits: bool) -> None:
        """See `Burst.complete`."""
        if not self._worker.is_own_thread_at_work:
            self._worker.attempt(self._go_on, burst, waits)

    def _go_on(self, burst: Burst, waits: bool) -> None:
        has_rung = waits and self._worker.catch_up()  # else the call would end for it
        self._do_second(burst, waits=waits)
        if has_rung and burst.is_done:
            self._worker.see_to_the_rest()

    def _do_second(self, burst: Burst, *, waits: bool, result: int | None = None) -> None:
        """The second phase, if it comes next, or what it has come to, if that was a ``result``. By who is at work."""
        plan, number, prepared = self._plan.free, self._plan.number, self._prepared.get(burst.known)
        if plan is None or prepared is None or not plan.has_only(burst):
            return
        if outcome_at(prepared.last(), number, plan.ready) is None:
            return
        closings = self._at_once.shortcut.closings
        try:
            outcome = self._outcome(prepared, waits, result)
            if outcome is not _NOT_YET:
                self._take(plan, burst, prepared)
        except BaseException as error:
            self._interrupted(plan, number, burst, prepared, error)
            raise
        if outcome is Outcome.DONE_AND_RUNG:
            self._worker.follow()
        if outcome is not _NOT_YET:
            self._at_once.reopen(closings)

    def _outcome(self, prepared: PreparedBurst, waits: bool, result: int | None) -> Outcome:
        direct = prepared.direct
        if result is None:
            result = direct.complete(self._worker.heard) if waits else direct.complete_now()
        outcome = outcome_of(result)
        return outcome_of(prepared.resume(result)) if outcome is Outcome.FAILED else outcome

    def _interrupted(
        self, plan: FrozenPlan, number: int, burst: Burst, prepared: PreparedBurst, error: BaseException
    ) -> None:
        """It has failed, or Ctrl-C has come: other ranks go on."""
        outcome = outcome_at(prepared.last(), number, plan.ready)
        if isinstance(error, HorovodInternalError) or outcome is Outcome.FAILED:
            self._end(error)
            if isinstance(error, Exception):
                self._check()
            return
        if outcome is not _NOT_YET:
            self._take(plan, burst, prepared)
        self._worker.wake()  # this thread looks for nothing more

    def _take(self, plan: FrozenPlan, burst: Burst, prepared: PreparedBurst) -> None:
        """It is done; perhaps once more, where an interrupt has come."""
        for batch in self._plan.due(plan.ready, self._clock()):
            assert batch is burst, batch
        if not burst.is_done:
            self._was_done(burst)
            prepared.count_done(1)

    def _show(self, plan: FrozenPlan, known: KnownBurst, prepared: PreparedBurst) -> None:
        """The shortcut what it can start from now on."""
        shortcut, place, signatures = self._at_once.shortcut, plan.place_of(known), known.signatures
        if signatures.are_known and not shortcut.knows_burst(place, known):
            numbers = plan.numbers_in(known)
            shortcut.learn_burst(place, PlannedBurst(known, prepared, prepared.direct, signatures, numbers))
