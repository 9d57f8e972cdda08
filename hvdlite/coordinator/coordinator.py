"""The coordinator of a process set on one rank: takes submissions, and agrees with all ranks on their order.

What it guarantees, and what the rest relies on:

- After start only who is at work (worker.py) calls MPI and the backends of the process set, on communicators of its
  own: the coordinator thread, or a user thread that waits for an operation. Never both at a time.
- Every rank executes the same buckets in the same order: the order of the root's log.
- User threads append to a queue and ring the doorbell; they wait for their submissions, never for the thread.
- The thread sleeps on a futex whenever there is nothing to do. What comes from other nodes rings the same doorbell.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from hvdlite.coordinator.at_once import AtOnce
from hvdlite.coordinator.attention import Attention
from hvdlite.coordinator.awaited import Awaited
from hvdlite.coordinator.burst import Burst
from hvdlite.coordinator.collector import Collector
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.execution import Execution
from hvdlite.coordinator.follower import Follower
from hvdlite.coordinator.frozen_plan import Batch
from hvdlite.coordinator.fusion import burst_bytes
from hvdlite.coordinator.in_flight import InFlight
from hvdlite.coordinator.leader import Leader
from hvdlite.coordinator.meeting import Meeting, MeetingInNode
from hvdlite.coordinator.messages import EndOfBatch, Fault, Message, Notice, PlanMessage, Response, Verb
from hvdlite.coordinator.owner import Owner
from hvdlite.coordinator.plan_member import PlanMember
from hvdlite.coordinator.progress import Progress
from hvdlite.coordinator.readiness import Readiness, ReadinessAcrossNodes, ReadinessInNode
from hvdlite.coordinator.request import Request
from hvdlite.coordinator.small_bursts import SmallBursts
from hvdlite.coordinator.stall import status_of
from hvdlite.coordinator.submission import Pace, Submission
from hvdlite.coordinator.tree import Tree
from hvdlite.coordinator.worker import Worker
from hvdlite.errors import HorovodInternalError, MismatchError, ShutDownError
from hvdlite.processes import ProcessAddress
from hvdlite.recorder import Lane
from hvdlite.topology import Topology

_WATCH_S = 1.0  # between two looks at what GPUs do


class Coordinator:
    """The queue of submissions, those in flight, and this rank's part in agreeing on their order.

    Args:
        tree: links between node leaders.
        spin_us: how long a thread that waits for one operation looks for it before it sleeps.
        clock: in seconds.
    """

    def __init__(
        self,
        owner: Owner,
        topology: Topology,
        page: ControlPage,
        tree: Tree,
        *,
        spin_us: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = owner.config
        self.has_ended = False
        self._owner = owner
        self._rank = topology.rank
        self._page = page
        self.counts = page.counts
        self._clock = clock
        own = weakref.proxy(self)
        self._in_flight = InFlight(lambda: own.at_once.begun)
        self._queue: deque[Submission | Burst | Notice] = deque()
        self._progress = Progress()
        self._batch: list[Response] = []
        self._plan = PlanMember(config.cache_capacity, config.stall_patience_s)
        early, patience_s = owner.early, config.caller_patience_s
        assert (early is None) == (len(topology.nodes) == 1)
        self._readiness: Readiness
        self._meeting: Meeting
        if early is None:
            self._readiness = ReadinessInNode(page, lambda: burst_bytes(own._owner.config), spin_us)
            self._meeting = MeetingInNode(self.counts, patience_s, spin_us)
        else:
            self._readiness = ReadinessAcrossNodes(page, early, clock)
            self._meeting = early.meeting(self.counts, patience_s)
        self._leader: Leader | None = None
        if topology.is_leader:
            self._leader = Leader(topology, page, tree, config, clock, self._readiness, self._plan.rhythm)
        self._station = self._leader or Follower(page, config.cache_capacity)
        self._execution = Execution(owner, self._in_flight, self._progress, self._station.all_are_back)
        self._worker = Worker(f"hvdlite-coordinator-{topology.rank}", self, page, config.idle_s, spin_us)
        self._pace = Pace(weakref.WeakMethod(self._worker.wake))
        self.start, self.wake, self.join = self._worker.start, self._worker.wake, self._worker.join
        self.check_open = self._in_flight.check_open
        self.refuse_handler = partial(self._worker.refuse_handler, self._in_flight.is_kept)
        self.at_once = AtOnce(
            self._worker,
            self._plan,
            self._in_flight,
            self._pace,
            self._progress,
            owner.recorder,
            lambda: not own._queue and not own.collector.is_open,
            lambda request: own._change_plan(request),
            lambda error: own._end(error),
            lambda: own._owner.check(),
            lambda started: own.collector.adopted(started),
            lambda *burst: own._small_bursts.go_on(*burst),
            clock,
        )
        seen_to = self.at_once.shortcut, self._worker.next_look
        self.collector = Collector(self._in_flight, self._worker.assist, self._pace, own, *seen_to, clock)
        self._attention = Attention(self._worker, self.at_once.shortcut, self._plan, self._pace, self.collector)
        self.look_within = self._attention.call_within
        self._small_bursts = SmallBursts(
            self._worker,
            self._plan,
            owner.recorder,
            self.at_once,
            self._queue,
            self._execution.burst_was_done,
            lambda known: own._owner.prepare_burst(known),
            lambda error: own._end(error),
            lambda: own._owner.check(),
            clock,
        )

    # From user threads.

    def submit(self, submission: Submission, *, background: bool = True) -> None:
        """Queue an operation.

        Args:
            background: False where the caller waits for it at once, and does the work itself.

        Raises:
            DuplicateNameError: an operation of this name is in flight.
            HorovodInternalError: hvdlite was shut down, or failed.
            ValueError: this rank has joined.
        """
        in_flight = self._in_flight
        self.settle_started()
        with in_flight.lock:
            self.at_once.shortcut.close()
            self.collector.interrupt()
            submission.assist, submission.pace = self._worker.assist, self._pace
            submission.pause_s = self._pace.step(submission.submitted_ns, submission.request)
            in_flight.admit(submission)
            self._queue.append(submission)  # no interrupt comes in between
            self._pace.last_label = submission.label
            self._progress.submissions += 1
            if background:
                self._attention.call_for(submission.request)
        self._pace.rest()

    def settle_started(self) -> None:
        """What was started comes before all that is submitted from here on, which may be of its name."""
        if self.at_once.shortcut.unsettled is not None:
            self.at_once.settle_soon()
        self._small_bursts.settle()

    def do_at_once(self, submission: Submission) -> bool:
        """Do an operation whose caller waits for it, if it comes next in a plan that runs free.

        Returns:
            Whether it is under way, or done; else nothing has happened, and it has to be submitted.

        Raises:
            HorovodInternalError: it came to nothing.
        """
        awaited = Awaited(submission, self._meeting, self._execute_alone)
        return self.at_once.run(awaited, submission.sequence, None, None) is not False

    def _execute_alone(self, submission: Submission) -> None:
        self._execution.execute_alone(submission)
        if submission.device is not None:
            self._worker.see_to_the_rest()

    def take_over(self, made: Sequence[Submission | Burst], *, background: bool = True) -> None:
        """What was collected; with the lock of what is in flight.

        Args:
            background: False where `begin` follows.
        """
        in_flight = self._in_flight
        if in_flight.closed is not None:
            for one in made:
                one.fail(in_flight.closed)
            return
        for one in made:
            keys = one.keys
            in_flight.put(keys, one)
            self._progress.submissions += len(keys)
        self._pace.last_label = made[-1].label
        self.collector.handed_over()
        self._queue.extend(made)  # no interrupt comes in between
        if background:
            self._attention.call()

    def begin(self, burst: Burst) -> None:
        """Begin a burst that was taken over: on this thread if it is of few bytes, and comes next."""
        has_begun = False
        try:
            has_begun = self._small_bursts.start(burst)
        finally:
            if not has_begun:
                with self._in_flight.lock:
                    self._attention.call()
        self._pace.rest()

    @property
    def position(self) -> int:
        """In the period of a plan that runs free, of what is submitted next; -1 where that is not known yet."""
        plan, queue = self._plan.free, self._queue
        if plan is None:
            return -1
        try:
            last = queue[-1]
        except IndexError:  # all was offered to the plan
            return (plan.ready + self.at_once.shortcut.untold) % len(plan)
        if isinstance(last, Burst):
            return last.known.end % len(plan)
        return plan.place_after(last.request) if isinstance(last, Submission) else -1

    def has_in_flight(self, prefix: str) -> bool:
        """Whether an operation is in flight whose name begins with ``prefix``."""
        return self._in_flight.has(prefix)

    @property
    def runs_free(self) -> bool:
        """Whether `at_once` may do something."""
        return self._plan.free is not None

    def announce(self, content: dict[str, Any]) -> None:
        """Send a notice to the root, which tells every rank.

        Raises:
            HorovodInternalError: hvdlite was shut down, or failed.
        """
        with self._in_flight.lock:
            self._in_flight.check_open()
            self.at_once.shortcut.close()
            self._queue.append(Notice(content))
        self._page.ring_self()

    def close(self, error: HorovodInternalError) -> None:
        """See `InFlight.close`."""
        self.at_once.shortcut.close()
        self._in_flight.close(error)
        self.collector.end()

    def retire(self) -> None:
        """Once it has ended: refer to nothing that refers to it, so that all goes with its last user."""
        del self._owner
        self._execution.retire()
        self._worker.retire()
        self.forget_prepared()
        if isinstance(self._in_flight.closed, ShutDownError):
            self._in_flight.closed.with_traceback(None)  # frames of who was refused

    def refuse(self, error: HorovodInternalError) -> None:
        """Fail later submissions with ``error``, and those in flight, where nobody is at work any more."""
        self._in_flight.refuse(error)
        self.forget_prepared()
        self.collector.end()

    def forget_prepared(self) -> None:
        """What was prepared is done another way from now on, or not at all. By who is at work, if anybody is."""
        self.at_once.forget()
        self._small_bursts.forget()

    def statistics(self) -> dict[str, int]:
        """What it has done, said and heard so far; see `hvdlite.statistics`."""
        self.at_once.settle_soon()
        written = self._station.written
        return {
            **asdict(self._progress),
            "claims_heard": 0 if self._leader is None else self._leader.claims_heard,
            "plans": self._plan.number,
            "claims_sent": written.claims,
            "messages_cached": written.cached,
            "messages_spelled_out": written.spelled_out,
            "page_bytes_written": self._page.bytes_written,
            "page_bytes_read": self._page.bytes_read,
            **self._station.traffic.named("tree"),
        }

    # By who is at work.

    def cycle(self) -> bool:
        """Drain, negotiate, execute; whether something was heard, which may be followed by more to do.

        An error is the end of the world: nobody can go on after it.
        """
        return self._attempt(self._cycle)

    def look(self, rings: int) -> bool:
        """Of a plan that runs free, for what may come soon; see `Readiness`. Errors are as those of `cycle`."""
        return self._plan.free is not None and self._attempt(lambda: self._readiness.look(rings))

    def _attempt(self, work: Callable[[], bool]) -> bool:
        try:
            return work()
        except BaseException as error:
            self._end(error)
            if not isinstance(error, Exception):
                raise  # Ctrl-C on a thread that assists
            return False

    def _end(self, error: BaseException) -> None:
        """What was at work has failed."""
        self.has_ended = True
        self._owner.coordinator_died(error)
        self._in_flight.give_up(error)

    @property
    def has_news(self) -> bool:
        return bool(self._queue)

    def patience_s(self) -> float:
        """How long to sleep if nobody rings."""
        patience_s = min(self._station.patience_s, self.collector.patience_s())
        if self._owner.is_under_way:
            patience_s = min(patience_s, _WATCH_S)
        if self._plan.plan is not None:
            patience_s = min(patience_s, self._plan.patience_s(self._clock()), self._readiness.patience_s())
        return patience_s

    def _cycle(self) -> bool:
        if self._page.aborted:
            self._owner.check()
        if self._queue and self._owner.config.cycle_ms:
            time.sleep(self._owner.config.cycle_ms / 1e3)
        now_s = self._clock()
        self.at_once.settle()
        self._progress.cycles += 1
        if self._owner.recorder.mark_cycles:
            self._owner.recorder.mark(Lane.CYCLE, "CYCLE_START")
        self._attention.turn()
        self.collector.look()
        if self._owner.is_under_way:
            self._owner.watch()
        if self._queue:
            self._drain(now_s)
        elif self._plan.plan is not None:
            complaint = self._plan.complaint(now_s)
            if complaint is not None:
                self._station.say(complaint)
        busy, log = self._station.turn(now_s)
        for message in log:
            self._obey(message)
            if self.has_ended:  # several ranks may have announced the end
                return busy
        return self._run_free(now_s) or busy

    def _run_free(self, now_s: float) -> bool:
        """Do what all ranks are ready for of a plan that runs free; whether there was something."""
        number, plan = self._plan.number, self._plan.plan
        if plan is None or not plan.is_free:
            return False
        before = plan.done
        while True:
            is_held = self._plan.free is None
            if not is_held:
                self._readiness.tell(number, plan)
            done = plan.done
            for batch in self._plan.due(self._readiness.ready(number, plan, is_held=is_held), now_s):
                self._enter_and_execute(batch)
            if plan.done == done:
                return done > before

    def _drain(self, now_s: float) -> None:
        while self._queue:
            item = self._queue[0]
            if isinstance(item, Notice):
                self._station.say(item)
            elif isinstance(item, Submission):
                self._admit(item, now_s)
            elif not self._plan.admit_burst(item, now_s):
                for submission in self._in_flight.take_apart(item):
                    self._admit(submission, now_s)
            self._queue.popleft()
        plan = self._plan.plan
        if plan is None:
            return
        if plan.is_free:
            if self._plan.free is not None:  # what is told after the answer to HOLD, the end of the plan does not know
                self._readiness.tell(self._plan.number, plan)
        elif plan.ready > plan.told:
            plan.told = plan.ready
            self._page.set_ready(self._plan.number, plan.told)

    def _admit(self, submission: Submission, now_s: float) -> None:
        if not self._plan.admit(submission, now_s):
            self._station.say(submission.claim())

    def _obey(self, message: Message) -> None:
        """Do what a message of the log says."""
        if isinstance(message, PlanMessage):
            self._obey_plan(message)
        elif isinstance(message, Response):
            self._progress.responses += 1
            self._batch.append(message)
            self._plan.logged(message, self._in_flight.pause_s(message.key))
        elif isinstance(message, EndOfBatch):
            self._progress.batches += 1
            batch, self._batch = self._batch, []
            self._execution.execute(batch)
        elif isinstance(message, Fault):
            self._progress.faults += 1
            self._in_flight.fail(message.key, MismatchError(message.text))
            self._plan.answered(message.key)
        elif isinstance(message, Notice):
            self._take_notice(message.content)

    def _obey_plan(self, message: PlanMessage) -> None:
        if message.verb is not Verb.GO:
            self._station.obeyed(message)
            self.collector.end()
        reaction = self._plan.obey(message, self._clock())
        if reaction.begins:
            self._begin_plan()
        if reaction.again:
            self._queue.extendleft(reversed(reaction.again))
        if reaction.answer is not None:
            self._station.say(reaction.answer)
        for batch in reaction.batches:
            (self._enter_and_execute if reaction.withdraws else self._execution.count_and_execute)(batch)
        if reaction.withdraws:
            self._owner.withdraw()
            if reaction.begun is not None:
                assert self._owner.early is not None
                self._owner.early.drop(reaction.begun)

    def _begin_plan(self) -> None:
        plan = self._plan.plan
        assert plan is not None
        self._page.want_ring(plan.is_free or self._leader is not None)
        self._page.set_ready(self._plan.number, 0)
        self.at_once.follow(self._plan.number, plan)
        self.collector.follow(plan.known_bursts)

    def _change_plan(self, request: Request) -> bool:
        """Begin the plan that all ranks want, which is to begin with ``request``, if they do; nothing is under way.

        An error, or an interrupt, is the end of the world: other ranks may have gone on.
        """
        plan, number, wish = self._plan.free, self._plan.number, self._plan.wish(request)
        if plan is None or wish is None:
            return False
        try:
            if not self._readiness.agree(number, wish, self._worker.heard):
                return False
            done = plan.done
            self._plan.change(wish, self._clock())
            assert self._plan.plan is not None
            self._station.changed(wish, done, len(self._plan.plan))
            self._begin_plan()
        except BaseException as error:
            self._end(error)
            raise
        return True

    def _enter_and_execute(self, batch: Batch) -> None:
        """Do operations of a plan that runs free, or has until now, together."""
        self._readiness.enter(batch)
        self._execution.count_and_execute(batch)

    def _take_notice(self, content: dict[str, Any]) -> None:
        kind = content["kind"]
        if kind == "stall_query":
            joined, keys = self._in_flight.has_joined, self._in_flight.keys()
            status = status_of(content, self._rank, self._pace.last_label, keys, joined)
            self._queue.append(Notice(status))
            self._page.ring_self()
        elif kind == "shutdown":
            mine = content["rank"] == self._rank
            leaver = content["leaver"] and ProcessAddress(*content["leaver"])
            text = content["own_text" if mine else "text"]
            self.close(ShutDownError(text, leaver=leaver, is_final=content["is_final"]))
            self._owner.take_notice(content)
            self.has_ended = True
        else:
            self._owner.take_notice(content)
