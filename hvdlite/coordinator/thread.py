"""The coordinator: one background thread per rank and process set that negotiates, fuses and executes.

What it guarantees, and what the rest relies on:

- After start only this thread calls MPI and the backends of its process set, on communicators of its own.
- Every rank executes the same buckets in the same order: the order of the root's log.
- User threads only append to a queue and ring the doorbell; they wait on their handles, never on this thread.
- A submission is completed exactly once, by whoever takes it out of ``_in_flight``.
- It sleeps on a futex whenever there is nothing to do. Only a node leader with links to other nodes wakes by
  itself, since MPI cannot wake it, and ever more rarely the longer nothing comes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hvdlite.config import Config
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.execute import Executor
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
    Response,
)
from hvdlite.coordinator.negotiation import Negotiation
from hvdlite.coordinator.plan import plan_buckets
from hvdlite.coordinator.stall import StallWatch, status_of
from hvdlite.coordinator.submission import Submission, absent
from hvdlite.coordinator.tree import Tree
from hvdlite.errors import DuplicateNameError, HorovodInternalError, MismatchError, ShutDownError
from hvdlite.timeline.recorder import Lane, Recorder
from hvdlite.topology import Topology

_IDLE_S = 5.0  # nothing can come but through the doorbell; a wake-up that finds nothing costs microseconds
_SHORTEST_POLL_S, _LONGEST_POLL_S = 50e-6, 10e-3
_FULL_STREAM_S = 1e-3


class Coordinator:
    """The thread, its queue, and this rank's part of the negotiation.

    Args:
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

        self._lock = threading.Lock()  # guards _in_flight and _closed
        self._queue: deque[Submission | Notice] = deque()
        self._in_flight: dict[Key, Submission] = {}
        self._closed: HorovodInternalError | None = None
        self._last_submitted = "nothing"
        self._has_joined = False
        self._stopped = False

        self._claims = Encoder(config.cache_capacity)  # to the leader, or of a leader to its parent
        self._log = Decoder()
        self._batch: list[Response] = []
        if topology.is_leader:
            self._lead()
        self._thread = threading.Thread(target=self._run, name=f"hvdlite-coordinator-{topology.rank}", daemon=True)

    def _lead(self) -> None:
        """What only a node leader has: the negotiation of its subtree and the links down."""
        config, topology = self._config, self._topology
        below = topology.subtree_ranks(topology.node_index, config.tree_fanout)
        self._negotiation = Negotiation(below)
        self._mailboxes = {i: Decoder() for i in range(1, topology.local_size)}
        self._links = {child: Decoder() for child in self._tree.children}
        self._speaks_for = {child: topology.subtree_ranks(child, config.tree_fanout) for child in self._tree.children}
        self._log_outbox = bytearray()
        self._verdicts = Encoder(config.cache_capacity)  # the root's pen for the log
        self._stall = StallWatch(config, topology.ranks) if self._tree.parent is None else None
        self._busy_until_s = time.monotonic()

    # From user threads.

    def start(self) -> None:
        self._thread.start()

    def submit(self, submission: Submission) -> None:
        """Queue an operation.

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
            self._in_flight[submission.key] = submission
            self._queue.append(submission)
            self._last_submitted = submission.label
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

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._stopped:
                rings = self._page.rings()
                if not self._cycle():
                    self._page.sleep(rings, self._patience_s())
        except BaseException as error:
            self._on_fatal(error)

    def _cycle(self) -> bool:
        """Drain, negotiate, execute; whether there was anything to do."""
        self._check()
        if self._recorder.mark_cycles:
            self._recorder.mark(Lane.CYCLE, "CYCLE_START")
        busy = self._drain()
        if self._topology.is_leader:
            busy |= self._negotiate()
        self._flush()
        for message in self._log.feed(self._page.read_log()):
            busy = True
            self._obey(message)
            if self._stopped:  # several ranks may have announced the end
                break
        return busy

    def _drain(self) -> bool:
        if not self._queue:
            return False
        if self._config.cycle_ms:
            time.sleep(self._config.cycle_ms / 1e3)
        now_s = time.monotonic()
        while self._queue:
            item = self._queue.popleft()
            message = item if isinstance(item, Notice) else item.claim(self._topology.rank)
            if self._topology.is_leader:
                self._hear(message, (self._topology.rank,), now_s)
            else:
                self._claims.send(message)
        return True

    def _negotiate(self) -> bool:
        """A leader's part: hear the node and the children, pass on what is complete."""
        now_s = time.monotonic()
        busy = False
        for local_rank, decoder in self._mailboxes.items():
            rank = self._topology.local_ranks[local_rank]
            for message in decoder.feed(self._page.receive(local_rank)):
                busy = True
                self._hear(message, (rank,), now_s)
        for node_index, data in self._tree.receive():
            busy = True
            if node_index == self._tree.parent:
                self._pass_down(data)
            else:
                for message in self._links[node_index].feed(data):
                    self._hear(message, self._speaks_for[node_index], now_s)
        if self._tree.parent is not None:
            for claim in self._negotiation.upward(now_s):
                self._claims.send(claim)
        else:
            self._judge(now_s)
        if busy:
            self._busy_until_s = now_s
        return busy

    def _hear(self, message: Message, sender_ranks: tuple[int, ...], now_s: float) -> None:
        """A leader takes a message from below."""
        if isinstance(message, Claim):
            self._negotiation.add(message, sender_ranks, now_s)
        elif self._tree.parent is not None:
            self._claims.send(message)
        else:
            assert isinstance(message, Notice) and self._stall is not None
            if not self._stall.take_answer(message.content):
                self._verdicts.send(message)

    def _judge(self, now_s: float) -> None:
        """The root turns what is complete into the log."""
        assert self._stall is not None
        verdicts = self._negotiation.verdicts()
        for verdict in verdicts:
            self._verdicts.send(verdict)
        if verdicts:
            self._verdicts.send(EndOfBatch())
        query = self._stall.look(self._negotiation.waiting, now_s)
        if query is not None:
            self._verdicts.send(query)
        if self._verdicts.outbox:
            self._pass_down(bytes(self._verdicts.outbox))
            self._verdicts.outbox.clear()

    def _pass_down(self, data: bytes) -> None:
        """A leader appends to its node's log, and to its children's."""
        self._log_outbox += data
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
        if self._log_outbox:
            self._page.publish(self._log_outbox)

    def _patience_s(self) -> float:
        """How long to sleep if nobody rings."""
        if not self._topology.is_leader:
            return _FULL_STREAM_S if self._claims.outbox else _IDLE_S
        if self._log_outbox:
            return _FULL_STREAM_S
        if self._tree.has_links:
            # Waiting an eighth longer than the others took costs little; polling a slow rank would cost a core.
            waited_s = time.monotonic() - self._busy_until_s
            return min(max(waited_s / 8, _SHORTEST_POLL_S), _LONGEST_POLL_S)
        return 1.0 if self._negotiation.is_waiting else _IDLE_S

    def _obey(self, message: Message) -> None:
        """Do what the log says."""
        if isinstance(message, Response):
            self._batch.append(message)
        elif isinstance(message, EndOfBatch):
            batch, self._batch = self._batch, []
            for bucket in plan_buckets(batch, self._config.fusion_threshold_bytes):
                self._execute(bucket)
        elif isinstance(message, Fault):
            submission = self._take(message.key)
            if submission is not None:
                submission.handle.fail(MismatchError(message.text))
        elif isinstance(message, Notice):
            self._take_notice(message.content)

    def _execute(self, bucket: list[Response]) -> None:
        now_ns = time.monotonic_ns()
        with self._lock:
            work = [(response, self._in_flight[response.key]) for response in bucket if response.key in self._in_flight]
            if self._has_joined:  # the others go on without this rank
                work = [(response, self._in_flight.get(response.key) or absent(response)) for response in bucket]
        if len(work) != len(bucket):  # closed meanwhile; the reason is on its way to every rank
            self._check()
            return
        if self._recorder.enabled:
            for response, submission in work:
                kind = response.request.kind.label
                name = f"NEGOTIATE_{kind.upper()} {kind}.{submission.label}"  # Horovod's words, which people search for
                self._recorder.add(Lane.NEGOTIATION, name, submission.submitted_ns, now_ns)
        if bucket[0].request.kind is Kind.JOIN:
            self._end_join()
        result = self._executor.execute(work)
        for _, submission in work:
            taken = self._take(submission.key)
            if taken is not None:
                taken.handle.succeed(result)

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
