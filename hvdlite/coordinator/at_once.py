"""Operations of a plan that runs free, done on the thread of who waits for them, in one native call.

What was done so before, and is called again alike, does not even come here: the shortcut (csrc/calls/shortcut.h) looks
at what the caller passes, and does it. What it has done so far is counted by `settle`, before anything else of the
plan.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from hvdlite._native import Count, PlannedBurst, Shortcut, Started, StartedBurst, StartedOperation
from hvdlite.coordinator.burst import Burst, KnownBurst
from hvdlite.coordinator.frozen_plan import FrozenPlan
from hvdlite.coordinator.in_flight import InFlight
from hvdlite.coordinator.plan_member import PlanMember
from hvdlite.coordinator.prepared import Native, Outcome, Prepared, PreparedBurst
from hvdlite.coordinator.progress import Progress
from hvdlite.coordinator.remembered import Remembered
from hvdlite.coordinator.request import Key, Request
from hvdlite.coordinator.submission import Pace, Submission
from hvdlite.coordinator.worker import Worker
from hvdlite.errors import HorovodInternalError
from hvdlite.recorder import Recorder

T = TypeVar("T")

_NOT_YET = Outcome.NOT_YET
_SOON_S = 0.02  # from waking up for work to `settle`, on a core that is shared
_NAP_S = 50e-6


class AtOnce:
    """Part of a coordinator, whose objects it is given.

    Args:
        is_idle: whether nothing is submitted that the coordinator has yet to look at.
        change: to another plan, which a request begins; whether all ranks have.
        end: of the world, by what has failed.
        check: raises what all ranks hear of that.
        adopted: what native code has of a burst, as one that may come before all of it is there.
        go_on: with a burst that was started, by what was prepared, after a call that has returned a result.
        clock: in seconds.

    Attributes:
        shortcut: open while nothing stands between a call and what comes next in the plan.
        prepared: what `run` takes, or None where there is no such operation, by whatever tells one from another.
        seen: what was called, likewise.
    """

    def __init__(
        self,
        worker: Worker,
        plan: PlanMember,
        in_flight: InFlight,
        pace: Pace,
        progress: Progress,
        recorder: Recorder,
        is_idle: Callable[[], bool],
        change: Callable[[Request], bool],
        end: Callable[[BaseException], None],
        check: Callable[[], None],
        adopted: Callable[[StartedBurst], Burst],
        go_on: Callable[[Burst, PreparedBurst, int], None],
        clock: Callable[[], float],
    ) -> None:
        own = weakref.proxy(self)
        self.shortcut = Shortcut(
            worker.at_work,
            recorder,
            lambda *begun: own._go_on(lambda: own._proceed(*begun)),
            lambda *started: own._go_on(lambda: own._proceed_with_burst(*started)),
            lambda: own._await_settled(),
            pace.has_waited,
        )
        self.prepared: Remembered[Any] = Remembered()
        self.seen: Remembered[None] = Remembered()
        self._known: Remembered[tuple[Native[Any], Count | None]] = Remembered()  # by their requests
        self._worker = worker
        self._plan = plan
        self._in_flight = in_flight
        self._pace = pace
        self._progress = progress
        self._is_idle = is_idle
        self._change = change
        self._end = end
        self._check = check
        self._adopted = adopted
        self._go_on_with_burst = go_on
        self._clock = clock

    def run(self, prepared: Prepared[T], sequence: int, tensors: T, unnamed: Count | None) -> bool | Submission:
        """Do an operation on the caller's thread, if it comes next in a plan that runs free.

        Args:
            tensors: what ``prepared`` takes.
            unnamed: what has counted ``sequence``, where it has no name.

        Returns:
            Whether it was done; where it was not, nothing has happened, and it has to be submitted. Or what is to be
            waited for, as other ranks are late.

        Raises:
            HorovodInternalError: it came to nothing.
        """
        if self._worker.is_own_thread_at_work:  # which a signal handler has interrupted
            return False
        return self._worker.attempt(self._run, prepared, sequence, tensors, unnamed) or False

    def _run(self, prepared: Prepared[T], sequence: int, tensors: T, unnamed: Count | None) -> bool | Submission:
        worker = self._worker
        self.settle_or_end()
        if not prepared.is_valid:  # another thread has come before
            return False
        begun = self._begin(prepared.request, sequence)
        if begun is None and self._is_free() and self._change(prepared.request):
            begun = self._begin(prepared.request, sequence)
        if begun is None:
            return False
        plan, closings = begun
        number, count = self._plan.number, plan.ready
        try:  # what is counted as ready is done from here on, or left, or taken back
            left = self._finish(plan, prepared, sequence, tensors, prepared.run(tensors, number, count, worker.heard))
        except BaseException as error:
            self._interrupted(plan, number, count, prepared, sequence, tensors, error)
            raise
        if isinstance(left, Submission):
            return left
        self._pace.has_waited.is_set = True
        if self.shortcut.closings == closings:
            self._learn(plan, plan.done - 1, prepared, unnamed)
        if left is Outcome.DONE_AND_RUNG:
            worker.follow()
            self.reopen(closings)
        else:
            self.shortcut.open(plan.done, worker.heard, closings)
        return True

    def _begin(self, request: Request, sequence: int) -> tuple[FrozenPlan, int] | None:
        """The plan, if that comes next and nothing else is under way; and how often the shortcut was closed by then."""
        closings, plan = self.shortcut.closings, self._plan.free
        if plan is None or not self._is_free() or not plan.begin_next(request, sequence):
            return None
        return plan, closings

    def _is_free(self) -> bool:
        return self._is_idle() and self._in_flight.is_quiet

    @property
    def is_free(self) -> bool:
        """Whether `opens_for` may be true."""
        return self._plan.free is not None and self._is_free()

    def opens_for(self, native: Native[Any], sequence: int, unnamed: Count | None) -> bool:
        """Whether an operation comes next in a plan that runs free, and the shortcut can start it from here on.

        Args:
            sequence: which it would have.
            unnamed: what will count it, where it has no name.
        """
        if not self.is_free or self._worker.is_own_thread_at_work:
            return False
        return self._worker.attempt(self._opens_for, native, sequence, unnamed) or False

    def _opens_for(self, native: Native[Any], sequence: int, unnamed: Count | None) -> bool:
        self.settle_or_end()
        if self._plan.could_be_longer:
            self._worker.wake()  # to say so
            return False
        closings, plan = self.shortcut.closings, self._plan.free
        if plan is None or not native.is_valid or not self._is_free():
            return False
        if not plan.has_next(native.request, sequence):
            return False
        self._learn(plan, plan.ready, native, unnamed)
        self.shortcut.open(plan.done, self._worker.heard, closings)
        return True

    @property
    def begun(self) -> Collection[Key]:
        """What is not in flight, as it is being done by a caller, or was started. Once the shortcut is closed."""
        if (under_way := self.shortcut.under_way) is not None:
            what, which = under_way
            if isinstance(what, KnownBurst):
                return [
                    (request.name, sequence) for request, (_, _, sequence, _) in zip(what.requests, which, strict=False)
                ]
            return ((what.request.name, which),)
        plan = self._plan.plan
        begun = None if plan is None else plan.begun
        return () if begun is None else (begun,)

    def reopen(self, closings: int) -> None:
        """Open the shortcut for what comes next, if nothing is under way. By who is at work.

        Args:
            closings: how often it had been closed, by something that is complete now, or before that.
        """
        plan = self._plan.free
        if plan is not None and not plan.waits and self._is_free():
            self.shortcut.open(plan.done, self._worker.heard, closings)

    def settle(self) -> None:
        """Count what the shortcut has done, and complete or leave what it has started. By who is at work, who may
        `reopen` it."""
        self.shortcut.pause()
        if (periods := self.shortcut.take_periods()) != (0, 0):
            self._plan.count_periods(*periods)
        for prepared, times in self.shortcut.take():
            plan = self._plan.plan
            assert plan is not None
            if isinstance(prepared, PlannedBurst):
                known = prepared.known
                plan.count_burst_done(known, times)
                prepared.prepared.count_done(times)
                self._done(known.label, times, len(known.requests))
            else:
                plan.count_done(prepared.request, times)
                prepared.count_done(times)
                self._done(prepared.label, times)
        started = self.shortcut.take_started()
        if started is not None:
            try:
                started.settle(self._left_of(started, started.complete_now()))
            except BaseException as error:
                started.fail(error)
                raise

    def _left_of(self, started: Started, result: int) -> Submission | Burst | None:
        if isinstance(started, StartedBurst):
            return self._proceed_with_burst(started, result)
        assert isinstance(started, StartedOperation)
        return self._proceed(*started.operation, result)

    def forget(self) -> None:
        """What was prepared is done another way from now on, or not at all. By who is at work, if anybody is."""
        started = self.shortcut.take_started() or self.shortcut.unsettled
        if started is not None:  # nobody will be at work any more
            if isinstance(started, StartedBurst):
                started.settle(self._resumed(started))
            else:
                assert isinstance(started, StartedOperation)
                native, sequence, source, target, owner = started.operation
                submission = native.submission(sequence, native.tensors(source, target, owner))
                self._in_flight.resume(submission)
                started.settle(submission)
        self.shortcut.forget()
        self._known.clear()
        self.prepared = Remembered()  # another one, as a thread may be making what enters the one before
        self.seen.clear()

    def settle_soon(self) -> None:
        """`settle`, by this thread or by who is at work, and about to; not while another thread waits in a call."""
        if self._worker.is_own_thread_at_work:
            return
        until_s = time.monotonic() + _SOON_S
        while self._has_to_settle:
            self._worker.attempt(self.settle_or_end)
            if not self._has_to_settle or time.monotonic() >= until_s:
                return
            time.sleep(_NAP_S)

    @property
    def _has_to_settle(self) -> bool:
        return self.shortcut.untold > 0 or self.shortcut.unsettled is not None

    def _await_settled(self) -> None:
        """Somebody waits for what was started, and somebody else is at work, or was: that it be settled."""
        if self._worker.is_own_thread_at_work:
            raise RuntimeError("an operation was waited for by a signal handler that interrupted hvdlite at work")
        if self.shortcut.unsettled is not None:
            self.settle_soon()
        else:
            time.sleep(_NAP_S)

    def settle_or_end(self) -> None:
        """The same on a thread that an interrupt may hit in the middle of it: that is the end then."""
        try:
            self.settle()
        except BaseException as error:
            self._end(error)
            raise

    def _done(self, label: str, times: int = 1, operations: int = 1) -> None:
        self._pace.last_label = label
        self._progress.submissions += times * operations
        self._progress.counted += times * operations
        self._progress.batches += times

    def _finish(
        self, plan: FrozenPlan, prepared: Prepared[T], sequence: int, tensors: T, outcome: Outcome
    ) -> Submission | Outcome:
        """What has begun, by its outcome; what is left to be waited for, if anything is."""
        if outcome is _NOT_YET:
            self._pace.last_label = prepared.label
            self._progress.submissions += 1
            return self._leave(plan, prepared, sequence, tensors)
        plan.done = plan.told = plan.ready
        self._done(prepared.label)
        return outcome

    def _go_on(self, proceed: Callable[[], T | None]) -> T | None:
        """What the shortcut has begun, at work, and not done without a remark; what is left to be waited for."""
        closings = self.shortcut.closings
        self.settle_or_end()
        left = proceed()
        if left is None:  # else the next call takes so long that others sleep, for whom it would be the same then
            self.reopen(closings)
        return left

    def _proceed(
        self, native: Native[Any], sequence: int, source: int, target: int, owner: object, result: int
    ) -> Submission | None:
        """The same of what comes next, with nothing left to be counted."""
        try:  # others know that this rank is ready, so it has to be counted
            tensors, plan, number = native.tensors(source, target, owner), self._plan.free, self._plan.number
            assert plan is not None
            begun = plan.begin_next(native.request, sequence)
            assert begun, native.label
        except BaseException as error:
            self._end(error)
            raise
        count = plan.ready
        try:
            left = self._finish(plan, native, sequence, tensors, native.ended(result, tensors))
        except BaseException as error:
            self._interrupted(plan, number, count, native, sequence, tensors, error)
            raise
        if isinstance(left, Submission):
            return left
        if left is Outcome.DONE_AND_RUNG:
            self._worker.follow()
        return None

    def _proceed_with_burst(self, started: StartedBurst, result: int) -> Burst | None:
        """The same of a burst."""
        try:
            prepared, burst = started.planned.prepared, self._resumed(started)
        except BaseException as error:
            self._end(error)
            raise
        self._go_on_with_burst(burst, prepared, result)
        return None if burst.has_succeeded else burst

    def _resumed(self, started: StartedBurst) -> Burst:
        """As any other burst, in flight."""
        burst = self._adopted(started)
        burst.is_open = False
        self._pace.last_label = burst.label
        self._progress.submissions += len(burst.parts)
        self._in_flight.resume(burst)
        return burst

    def follow(self, number: int, plan: FrozenPlan) -> None:
        """A plan begins. By who is at work."""
        if self.shortcut.follow(number, len(plan), plan.serial):
            return
        for request in plan.requests:
            known = self._known.get(request)
            if known is not None:
                self._show(plan, *known)

    def _learn(self, plan: FrozenPlan, number: int, prepared: Prepared[T], unnamed: Count | None) -> None:
        """Operation ``number`` is the shortcut's from now on, if it can do it."""
        native = prepared.native
        if native is not None and not self.shortcut.knows(number % len(plan), native):
            self._known.remember(native.request, (native, unnamed))
            self._show(plan, native, unnamed)

    def _show(self, plan: FrozenPlan, native: Native[Any], unnamed: Count | None) -> None:
        """The shortcut where ``native`` comes in the period."""
        assert native.signature is not None and native.direct is not None
        for place, first, stride in plan.alone(native.request):
            known = native.signature, native, native.direct, native.new_result, native.gives
            self.shortcut.learn(place, *known, unnamed, first, stride)

    def _leave(self, plan: FrozenPlan, prepared: Prepared[T], sequence: int, tensors: T) -> Submission:
        """What this rank has said to be ready for waits for other ranks."""
        submission = prepared.submission(sequence, tensors)
        submission.assist, submission.pace = self._worker.assist, self._pace
        self._in_flight.resume(submission)
        plan.leave_next(submission)
        plan.told = plan.ready
        self._plan.moved(self._clock())
        return submission

    def _interrupted(
        self,
        plan: FrozenPlan,
        number: int,
        count: int,
        prepared: Prepared[T],
        sequence: int,
        tensors: T,
        error: BaseException,
    ) -> None:
        """``prepared``, operation ``count`` of plan ``number``, has failed, or Ctrl-C has come: other ranks go on."""
        if plan.done == count:
            return
        outcome = prepared.outcome(number, count)
        is_over = isinstance(error, HorovodInternalError) or outcome is Outcome.FAILED
        if outcome is _NOT_YET and not is_over:
            try:
                self._leave(plan, prepared, sequence, tensors)
            except BaseException as again:  # as where a GPU has failed meanwhile; other ranks count on this one
                error, is_over = again, True
        if is_over:
            self._end(error)
            if isinstance(error, Exception):
                self._check()
        elif outcome is None:
            plan.cancel_next(prepared.request)
        else:
            if outcome is not _NOT_YET:
                plan.done = plan.told = plan.ready
            self._worker.wake()  # this thread looks for nothing more, and others may wait for what was left
