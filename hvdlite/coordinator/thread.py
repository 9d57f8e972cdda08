"""The coordinator: one background thread per rank and process set that negotiates, fuses and executes.

What it guarantees, and what the rest relies on:

- After start only who is at work calls MPI and the backends of its process set, on communicators of its own: this
  thread, or a user thread that waits for an operation and assists meanwhile. Never both at a time.
- Every rank executes the same buckets in the same order: the order of the root's log.
- User threads append to a queue and ring the doorbell; they wait on their handles, never on this thread.
- A submission is completed exactly once, by whoever takes it out of ``_in_flight``.
- It sleeps on a futex whenever there is nothing to do. What comes from other nodes rings the same doorbell.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdlite.config import Config
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.execute import Executor
from hvdlite.coordinator.frozen_plan import OrderWatch
from hvdlite.coordinator.handle import Handle
from hvdlite.coordinator.messages import (
    Claim,
    Decoder,
    Encoder,
    EndOfBatch,
    Fault,
    Key,
    Kind,
    Message,
    Notice,
    PlanMessage,
    Response,
)
from hvdlite.coordinator.negotiation import LOOK_S, Negotiation
from hvdlite.coordinator.plan import plan_buckets
from hvdlite.coordinator.plan_protocol import PlanLeader, PlanMember
from hvdlite.coordinator.stall import StallWatch, status_of
from hvdlite.coordinator.submission import Submission, absent
from hvdlite.coordinator.tree import Tree
from hvdlite.errors import DuplicateNameError, HorovodInternalError, MismatchError, ShutDownError
from hvdlite.timeline.recorder import Lane, Recorder
from hvdlite.topology import Topology

_IDLE_S = 5.0  # nothing can come but through the doorbell; a wake-up that finds nothing costs microseconds
_FULL_STREAM_S = 1e-3


@dataclass(slots=True)
class Progress:
    """What a coordinator has done so far."""

    submissions: int = 0
    cycles: int = 0
    claims_heard: int = 0
    responses: int = 0
    faults: int = 0
    batches: int = 0
    counted: int = 0


class Coordinator:
    """The thread, its queue, and this rank's part of the negotiation.

    Args:
        spin_us: how long a thread that waits for one operation looks for it before it sleeps.
        check: raises the reason once the job has failed.
        on_fatal: called on this thread with the exception that ended it.
        on_notice: called on this thread, in the order of the log, with what is not the coordinator's own business.
        on_joined: called on this thread when all ranks have joined, before any goes on.
    """

    def __init__(
        self,
        topology: Topology,
        page: ControlPage,
        tree: Tree,
        executor: Executor,
        config: Config,
        recorder: Recorder,
        *,
        spin_us: int,
        check: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
        on_notice: Callable[[dict[str, Any]], None],
        on_joined: Callable[[], None],
    ) -> None:
        self._topology = topology
        self._page = page
        self._tree = tree
        self._executor = executor
        self._config = config
        self._recorder = recorder
        self._check = check
        self._on_fatal = on_fatal
        self._on_notice = on_notice
        self._on_joined = on_joined

        self._spin_us = spin_us
        self._lock = threading.Lock()  # guards _in_flight and _closed
        self._at_work = threading.Lock()  # held by whoever negotiates and executes
        self._queue: deque[Submission | Notice] = deque()
        self._has_rung = False  # for submissions, which the next cycle will find
        self._in_flight: dict[Key, Submission] = {}
        self._closed: HorovodInternalError | None = None
        self._progress = Progress()
        self._last_submitted = "nothing"
        self._has_joined = False
        self._stopped = False

        self._claims = Encoder(config.cache_capacity)  # to the leader, or of a leader to its parent
        self._log = Decoder()
        self._batch: list[Response] = []
        self._plan = PlanMember(config.cache_capacity, config.stall_patience_s)
        if topology.is_leader:
            self._lead()
        self._thread = threading.Thread(target=self._run, name=f"hvdlite-coordinator-{topology.rank}", daemon=True)

    def _lead(self) -> None:
        """What only a node leader has: the negotiation of its subtree and the links down."""
        config, topology = self._config, self._topology
        below = topology.subtree_ranks(topology.node_index, config.tree_fanout)
        self._negotiation = Negotiation(below, config.stall_patience_s)
        self._mailboxes = {i: Decoder() for i in range(1, topology.local_size)}
        self._links = {child: Decoder() for child in self._tree.children}
        self._speaks_for = {child: topology.subtree_ranks(child, config.tree_fanout) for child in self._tree.children}
        self._passed_down: deque[bytes] = deque()  # of the log, what is not in this node's yet
        self._verdicts = Encoder(config.cache_capacity)  # the root's pen for the log
        # Where no other node shall have it first, the root writes straight into its node's log.
        self._is_alone = self._tree.parent is None and not self._tree.children
        self._log_outbox = self._verdicts.outbox if self._is_alone else bytearray()
        self._stall = StallWatch(config, topology.ranks) if self._tree.parent is None else None
        self._plan_leader = PlanLeader(
            [*((rank,) for rank in topology.local_ranks), *self._speaks_for.values()],
            self._speaks_for.values(),
            OrderWatch(config.cache_capacity) if self._tree.parent is None else None,
        )

    # From user threads.

    def start(self) -> None:
        self._thread.start()

    def submit(self, submission: Submission, *, background: bool = True) -> None:
        """Queue an operation.

        Args:
            background: False where the caller waits for it at once, and does the work itself.

        Raises:
            DuplicateNameError: an operation of this name is in flight.
            HorovodInternalError: hvdlite was shut down, or failed.
            ValueError: this rank has joined.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed.with_traceback(None)  # several threads may raise it
            if self._has_joined:
                raise ValueError(
                    f"{submission.request.kind.label} '{submission.label}': this rank has called join(), which has not "
                    "returned yet"
                )
            self._has_joined = submission.request.kind is Kind.JOIN
            if submission.key in self._in_flight:
                raise DuplicateNameError(
                    f"{submission.request.kind.label} '{submission.label}' was submitted while an operation of that "
                    "name is still in flight; wait for its handle first, or give each operation its own name"
                )
            submission.handle.assist = self._assist
            self._in_flight[submission.key] = submission
            self._queue.append(submission)
            rings = background and not self._has_rung
            if rings:
                self._has_rung = True
            self._last_submitted = submission.label
            self._progress.submissions += 1
        if rings:
            self._page.ring_self()

    def announce(self, content: dict[str, Any]) -> None:
        """Send a notice to the root, which tells every rank."""
        self._queue.append(Notice(content))
        self._page.ring_self()

    def close(self, error: HorovodInternalError) -> None:
        """Fail everything in flight, and every later submission, with ``error``; the first error stays."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = error
            failed = list(self._in_flight.values())
            self._in_flight.clear()
        for submission in failed:
            submission.handle.fail(error)

    def wake(self) -> None:
        self._page.ring_self()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end; whether it did."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> dict[str, int]:
        """What it has done, said and heard so far; see `hvdlite.statistics`."""
        is_leader = self._topology.is_leader
        written = [pen.written for pen in ((self._claims, self._verdicts) if is_leader else (self._claims,))]
        return {
            **asdict(self._progress),
            "plans": self._plan.number,
            "claims_sent": sum(pen.claims for pen in written),
            "messages_cached": sum(pen.cached for pen in written),
            "messages_spelled_out": sum(pen.spelled_out for pen in written),
            "page_bytes_written": self._page.bytes_written,
            "page_bytes_read": self._page.bytes_read,
            **self._tree.traffic.named("tree"),
            **asdict(self._executor.executed),
        }

    def _assist(self, handle: Handle) -> None:
        """Do the thread's work until ``handle`` is complete, on the caller's, which has nothing else to do.

        It saves two changes of threads, each of which costs as much as a small operation. If the thread is at work, it
        goes on, and the caller waits.
        """
        if not self._at_work.acquire(blocking=False):
            self._page.ring_self()  # it may have looked at the queue before
            return
        self._page.begin_assistance()
        rings = -1
        try:
            while not handle.done() and not self._stopped:
                rings = self._page.rings()
                if not self._guarded_cycle():
                    self._page.assist(rings, self._patience_s(), self._spin_us)
        finally:
            missed = self._page.end_assistance() != rings
            unfinished = bool(self._queue) or self._patience_s() < _IDLE_S or self._stopped
            self._at_work.release()
            if missed or unfinished:
                self._page.ring_self()

    # On the thread, or on one that assists; never on both at a time.

    def _run(self) -> None:
        while True:
            with self._at_work:
                if self._stopped:
                    return
                rings = self._page.rings()
                busy = self._guarded_cycle()
                patience_s = self._patience_s()
            if not busy and not self._stopped:
                self._page.sleep(rings, patience_s)

    def _guarded_cycle(self) -> bool:
        """`_cycle`, after whose errors nobody can go on."""
        try:
            return self._cycle()
        except BaseException as error:
            self._stopped = True
            self._on_fatal(error)
            if not isinstance(error, Exception):
                raise  # Ctrl-C on a thread that assists
            return False

    def _cycle(self) -> bool:
        """Drain, negotiate, execute; whether something was heard, which may be followed by more to do."""
        self._check()
        self._progress.cycles += 1
        if self._recorder.mark_cycles:
            self._recorder.mark(Lane.CYCLE, "CYCLE_START")
        self._has_rung = False
        if self._queue:
            self._drain()
        elif self._plan.plan is not None:
            complaint = self._plan.complaint(time.monotonic())
            if complaint is not None:
                self._send_up(complaint)
        busy = self._negotiate() if self._topology.is_leader else False
        self._flush()
        data = self._page.read_log()
        if data:
            busy = True
            for message in self._log.feed(data):
                self._obey(message)
                if self._stopped:  # several ranks may have announced the end
                    break
        return busy

    def _drain(self) -> None:
        if self._config.cycle_ms:
            time.sleep(self._config.cycle_ms / 1e3)
        now_s = time.monotonic()
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, Notice):
                self._send_up(item)
            elif not self._plan.admit(item, now_s):
                self._send_up(item.claim(self._topology.rank))
        plan = self._plan.plan
        if plan is not None and plan.ready > plan.told:
            plan.told = plan.ready
            self._page.set_ready(self._plan.number, plan.told)

    def _send_up(self, message: Message) -> None:
        """To the leader of this node, be it another rank or this one."""
        if self._topology.is_leader:
            self._hear(message, (self._topology.rank,), time.monotonic())
        else:
            self._claims.send(message)

    def _negotiate(self) -> bool:
        """A leader's part: hear the node and the children, pass on what is complete."""
        now_s = time.monotonic()
        busy = False
        for local_rank, decoder in self._mailboxes.items():
            data = self._page.receive(local_rank)
            if data:
                busy = True
                for message in decoder.feed(data):
                    self._hear(message, (self._topology.local_ranks[local_rank],), now_s)
        if not self._is_alone:
            busy |= self._hear_nodes(now_s)
        if self._plan.plan is not None:
            self._pass_on(self._plan_leader.ready(self._page.ready(self._plan.number)))
        if self._tree.parent is not None:
            for claim in self._negotiation.upward(now_s):
                self._claims.send(claim)
        else:
            self._judge(now_s)
        return busy

    def _hear_nodes(self, now_s: float) -> bool:
        """Take what the parent and the children have sent; whether there was anything."""
        busy = False
        for node_index, data in self._tree.receive():
            busy = True
            if node_index == self._tree.parent:
                self._pass_down(data)
            else:
                for message in self._links[node_index].feed(data):
                    self._hear(message, self._speaks_for[node_index], now_s)
        return busy

    def _hear(self, message: Message, sender_ranks: tuple[int, ...], now_s: float) -> None:
        """A leader takes a message from below."""
        if isinstance(message, Claim):
            self._progress.claims_heard += 1
            self._negotiation.add(message, sender_ranks, now_s)
        elif isinstance(message, PlanMessage):
            self._pass_on(self._plan_leader.hear(message, sender_ranks, self._negotiation.is_idle))
        elif self._tree.parent is not None:
            self._claims.send(message)
        else:
            assert isinstance(message, Notice) and self._stall is not None
            if not self._stall.take_answer(message.content):
                self._verdicts.send(message)

    def _pass_on(self, message: PlanMessage | None) -> None:
        """A leader's word about the plan: the root's goes into the log, others' to the parent."""
        if message is not None:
            (self._verdicts if self._tree.parent is None else self._claims).send(message)

    def _judge(self, now_s: float) -> None:
        """The root turns what is complete into the log."""
        assert self._stall is not None
        verdicts = self._negotiation.verdicts()
        for verdict in verdicts:
            self._verdicts.send(verdict)
            if isinstance(verdict, Response):
                self._plan_leader.saw(verdict)
        if verdicts:
            self._verdicts.send(EndOfBatch())
            self._pass_on(self._plan_leader.propose(self._negotiation.is_idle))
        query = self._stall.look(self._negotiation.waiting, now_s)
        if query is not None:
            self._verdicts.send(query)
        if self._verdicts.outbox and not self._is_alone:
            self._pass_down(bytes(self._verdicts.outbox))
            self._verdicts.outbox.clear()

    def _pass_down(self, data: bytes) -> None:
        """A leader appends to its children's logs, and to its node's, see `_flush`."""
        self._passed_down.append(data)
        for child in self._tree.children:
            self._tree.send(child, data)

    def _flush(self) -> None:
        if not self._topology.is_leader:
            if self._claims.outbox:
                self._page.send_to_leader(self._claims.outbox)
            return
        if self._claims.outbox:
            assert self._tree.parent is not None
            self._tree.send(self._tree.parent, bytes(self._claims.outbox))
            self._claims.outbox.clear()
        if self._passed_down:
            # This node may begin what other nodes will hear of while it is busy with that, and sends nothing more.
            unsent = max(map(self._tree.unsent, self._tree.children), default=0)
            while len(self._passed_down) > unsent:
                self._log_outbox += self._passed_down.popleft()
        if self._log_outbox:
            self._page.publish(self._log_outbox)

    def _patience_s(self) -> float:
        """How long to sleep if nobody rings."""
        if self._plan.plan is None:
            return self._link_patience_s()
        return min(self._link_patience_s(), self._plan.patience_s(time.monotonic()))

    def _link_patience_s(self) -> float:
        if not self._topology.is_leader:
            return _FULL_STREAM_S if self._claims.outbox else _IDLE_S
        if self._log_outbox or self._passed_down:
            return _FULL_STREAM_S
        return LOOK_S if self._negotiation.is_waiting else _IDLE_S

    def _obey(self, message: Message) -> None:
        """Do what the log says."""
        if isinstance(message, PlanMessage):
            self._obey_plan(message)
        elif isinstance(message, Response):
            self._progress.responses += 1
            self._batch.append(message)
            self._plan.logged(message)
        elif isinstance(message, EndOfBatch):
            self._progress.batches += 1
            batch, self._batch = self._batch, []
            self._execute_fused(batch)
        elif isinstance(message, Fault):
            self._progress.faults += 1
            submission = self._take(message.key)
            if submission is not None:
                submission.handle.fail(MismatchError(message.text))
        elif isinstance(message, Notice):
            self._take_notice(message.content)

    def _obey_plan(self, message: PlanMessage) -> None:
        if self._topology.is_leader:
            self._plan_leader.obey(message)
        step = self._plan.obey(message, time.monotonic())
        if step.responses:
            self._progress.counted += len(step.responses)
            self._progress.batches += 1
        if step.again:
            self._queue.extendleft(reversed(step.again))
        if step.answer is not None:
            self._send_up(step.answer)
        if step.responses:
            self._execute_fused(step.responses)

    def _execute_fused(self, responses: Sequence[Response]) -> None:
        for bucket in plan_buckets(responses, self._config.fusion_threshold_bytes):
            self._execute(bucket)

    def _execute(self, bucket: list[Response]) -> None:
        now_ns = time.monotonic_ns()
        with self._lock:
            found = [self._in_flight.get(response.key) for response in bucket]
            has_joined = self._has_joined
        work = []
        for response, submission in zip(bucket, found, strict=True):
            if submission is None:
                if not has_joined:  # closed meanwhile; the reason is on its way to every rank
                    self._check()
                    return
                submission = absent(response)  # the others go on without this rank
            work.append((response, submission))
        if self._recorder.enabled:
            for response, submission in work:
                kind = response.request.kind.label
                name = f"NEGOTIATE_{kind.upper()} {kind}.{submission.label}"  # Horovod's words, which people search for
                self._recorder.add(Lane.NEGOTIATION, name, submission.submitted_ns, now_ns)
        if bucket[0].request.kind is Kind.JOIN:
            self._end_join()
        result = self._executor.execute(work)
        with self._lock:
            done = [self._in_flight.pop(response.key, None) for response in bucket]
        for submission in done:
            if submission is not None:  # not taken meanwhile by whoever closes
                submission.handle.succeed(result)

    def _end_join(self) -> None:
        """Every rank has joined, and every rank goes on."""
        self._has_joined = False
        self._on_joined()
        if self._topology.is_leader and self._tree.parent is not None:  # the root did when it wrote that into the log
            self._negotiation.end_join()

    def _take(self, key: Key) -> Submission | None:
        """A submission, for the one who completes it."""
        with self._lock:
            return self._in_flight.pop(key, None)

    def _take_notice(self, content: dict[str, Any]) -> None:
        kind = content["kind"]
        if kind == "stall_query":
            with self._lock:
                in_flight = list(self._in_flight)
            self.announce(status_of(content, self._topology.rank, self._last_submitted, in_flight, self._has_joined))
        elif kind == "shutdown":
            mine = content["rank"] == self._topology.rank
            self.close(ShutDownError(content["own_text" if mine else "text"]))
            self._on_notice(content)
            self._stopped = True
        else:
            self._on_notice(content)
