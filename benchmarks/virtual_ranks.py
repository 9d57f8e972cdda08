"""The control plane of any number of ranks, without MPI and in virtual time: what they say is exact, when is a model.

What decides and what speaks is hvdlite's own: a `Negotiation` for every node leader, an `Encoder` and a `Decoder` for
every link of the tree, the root's log, `plan_buckets`. Only threads, clocks and wires are played:

- A leader's coordinator thread runs cycles, in the order of `Coordinator._cycle`: hear the node and the tree, judge or
  pass on, execute. It sleeps until its doorbell rings; the tree it polls, ever more rarely.
- A collective begins on a node when its ranks have read the log, moves data once all nodes are there, and blocks the
  coordinators of all ranks until its end.

Two things are done once for many, since they are the same bytes by construction. All ranks that lead no node submit
the same requests in the same order, so one encoder writes what each of them writes; only the root decodes each by
itself, as its work is timed. And the log passes down the tree as it is, so only the root decodes it.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count

import numpy as np

from data_path import Machine, traffic
from hvdlite.config import Config
from hvdlite.coordinator.messages import NAMED, Claim, Decoder, Encoder, EndOfBatch, Response
from hvdlite.coordinator.negotiation import Negotiation
from hvdlite.coordinator.plan import plan_buckets
from hvdlite.counters import Traffic
from hvdlite.topology import Topology
from schedules import Schedule

# As in hvdlite/coordinator/thread.py and negotiation.py.
_SHORTEST_POLL_S, _LONGEST_POLL_S, _POLL_SHARE = 50e-6, 10e-3, 1 / 8
_LOOK_S = 0.25

_CYCLE, _MESSAGE, _COLLECTIVE = range(3)
_NEVER = float("inf")


@dataclass(slots=True)
class _Log:
    """What the root has written in one go; and what it makes ranks do, the responses of an item together."""

    data: bytes
    items: list[list[Response]]


@dataclass(slots=True)
class _Node:
    """A leader, its coordinator thread, and what its ranks bring to it."""

    topology: Topology
    parent: int | None
    children: tuple[int, ...]
    negotiation: Negotiation
    pen: Encoder  # to the parent, or, of the root, the log
    speaks_for: dict[int, tuple[int, ...]]
    links: dict[int, Decoder]
    traffic: Traffic = field(default_factory=Traffic)
    claims_heard: int = 0
    mail_bytes: int = 0
    own: deque[tuple[float, int]] = field(default_factory=deque)  # (when it is ready, bucket), by time
    others: deque[tuple[float, int, int]] = field(default_factory=deque)  # (when, local rank, bucket), by time
    inbox: list[tuple[int, bytes | _Log]] = field(default_factory=list)
    cycle_at_s: float = _NEVER  # when its thread runs next; never while it executes
    asleep: bool = False
    look_s: float = 0.0  # when it last looked at MPI
    heard_s: float = 0.0  # when it last found anything
    entered_s: float = 0.0  # when its ranks last began to execute, and were done
    left_s: float = 0.0
    read: int = 0  # items of the log that its ranks have read, and are done with
    done: int = 0
    busy_s: float = 0.0  # of its thread, but for execution


@dataclass(frozen=True)
class Step:
    """How one step went.

    Attributes:
        seconds: from the last rank's begin to the last rank's end.
        compute_s: of the slowest rank.
        agreement_s: of each batch that the root made of the buckets: from when the last rank was ready for its first
            collective, and the one before was over, until every rank had read that it may begin.
        root_cpu_s: measured, of this machine: the root's part of the negotiation, in Python.
        root_busy_s: the same in virtual time, with cycles that find nothing.
    """

    seconds: float
    compute_s: float
    agreement_s: tuple[float, ...]
    root_cpu_s: float
    root_busy_s: float

    @property
    def exposed_s(self) -> float:
        """What communication adds to the slowest rank's compute."""
        return self.seconds - self.compute_s


class VirtualJob:
    """A job that does the same step over and over.

    Args:
        nodes: ranks of each, as in `Topology`.
        allreduce_s: seconds that so many bytes take, from the last rank's begin to the end.
        jitter: standard deviation of a rank's compute time, as a share of it; drawn for every rank and step.
        seed: of the jitter.
    """

    def __init__(
        self,
        nodes: tuple[tuple[int, ...], ...],
        schedule: Schedule,
        machine: Machine,
        config: Config,
        allreduce_s: Callable[[int], float],
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._schedule = schedule
        self._machine = machine
        self._config = config
        self._allreduce_s = cache(allreduce_s)
        self._jitter = jitter
        self._random = np.random.default_rng(seed)
        self._nodes = [_node(index, nodes, config) for index in range(len(nodes))]
        self._nbytes = {bucket.request.name: bucket.nbytes for bucket in schedule.buckets}
        self._size = sum(map(len, nodes))
        self._place = {rank: (node, local) for node, ranks in enumerate(nodes) for local, rank in enumerate(ranks)}
        self._first = np.cumsum([0, *map(len, nodes)])  # of each node, among the rows of readiness times
        self._root = self._nodes[0]
        self._log_decoder = Decoder()
        self._log_bytes = 0
        self._submitted = 0  # by each rank, and done
        self._responses = 0
        # What a rank that leads no node writes, and what its leader reads.
        self._rank_pen = Encoder(config.cache_capacity)
        self._rank_decoder = Decoder()
        self._rank_bytes = 0
        self._letters: list[bytes] = []  # by bucket, of this step
        self._claims: list[Claim] = []
        self._root_mailboxes = [Decoder() for _ in nodes[0]]
        self._root_cpu_s = 0.0

        self._events: list[tuple[float, int, int, int, int, bytes | _Log]] = []
        self._numbers = count()
        self._items: list[list[Response]] = []
        self._batch_starts: list[int] = []  # the first item of each
        self._arrived: list[int] = []  # of each item, how many nodes are there, and when the last came
        self._began_s: list[float] = []
        self._ended_s: list[float] = []
        self._starts_s = np.zeros(self._size)

    def step(self) -> Step:
        """Run one step of all ranks to its end."""
        schedule = self._schedule
        factors = np.maximum(0.5, 1 + self._jitter * self._random.standard_normal(self._size))
        offsets = np.array([bucket.ready_s for bucket in schedule.buckets])
        ready_s = self._starts_s[:, None] + factors[:, None] * offsets
        compute_ends_s = self._starts_s + factors * schedule.compute_s
        begin_s = float(self._starts_s.max())
        cpu_s, busy_s, first = self._root_cpu_s, self._root.busy_s, len(self._batch_starts)

        self._write_letters()
        for index, node in enumerate(self._nodes):
            rows = ready_s[self._first[index] : self._first[index + 1]].tolist()
            node.own.extend((when, bucket) for bucket, when in enumerate(rows[0]))
            claims = ((when, local, i) for local, row in enumerate(rows) if local for i, when in enumerate(row))
            node.others.extend(sorted(claims))
            self._sleep(index, max(node.look_s, node.left_s))
        self._submitted += len(schedule.buckets)
        while self._responses < self._submitted:
            self._next_event()

        ends_s = np.maximum(compute_ends_s, self._ended_s[-1] + self._machine.wake_s)
        self._starts_s = ends_s
        last_ready_s = dict(zip((b.request.name for b in schedule.buckets), ready_s.max(axis=0).tolist(), strict=True))
        agreements = []
        for item in self._batch_starts[first:]:
            wanted_s = max(last_ready_s[response.request.name] for response in self._items[item])
            free_s = self._ended_s[item - 1] if item else 0.0
            agreements.append(self._began_s[item] - max(wanted_s, free_s))
        return Step(
            seconds=float(ends_s.max()) - begin_s,
            compute_s=float(compute_ends_s.max()) - begin_s,
            agreement_s=tuple(agreements),
            root_cpu_s=self._root_cpu_s - cpu_s,
            root_busy_s=self._root.busy_s - busy_s,
        )

    def statistics(self, rank: int) -> dict[str, int]:
        """What `hvdlite.statistics` says on ``rank``, but for its cycles, and alltoall, of which there is none."""
        topology = Topology(rank, self._nodes[0].topology.nodes)
        ring = Counter(Traffic().named("ring"))
        for nbytes, times in Counter(map(self._item_bytes, range(len(self._items)))).items():
            for name, number in traffic(topology, nbytes, self._config).named("ring").items():
                ring[name] += times * number
        return self.control(rank) | ring

    def control(self, rank: int) -> dict[str, int]:
        """`statistics` without data."""
        index, local = self._place[rank]
        node = self._nodes[index]
        is_leader = local == 0
        written = node.pen.written if is_leader else self._rank_pen.written
        return {
            "submissions": self._submitted,
            "claims_heard": node.claims_heard if is_leader else 0,
            "responses": self._responses,
            "batches": len(self._batch_starts),
            "claims_sent": written.claims,
            "messages_cached": written.cached,
            "messages_spelled_out": written.spelled_out,
            "page_bytes_written": self._log_bytes if is_leader else self._rank_bytes,
            "page_bytes_read": self._log_bytes + (node.mail_bytes if is_leader else 0),
            **(node.traffic if is_leader else Traffic()).named("tree"),
            "buckets": len(self._items),
            "reduced_bytes": sum(map(self._item_bytes, range(len(self._items)))),
        }

    def _write_letters(self) -> None:
        """What every rank that leads no node writes to its leader in this step, by bucket."""
        self._letters, self._claims = [], []
        for bucket in self._schedule.buckets:
            self._rank_pen.send(Claim(bucket.request, NAMED))
            letter = bytes(self._rank_pen.outbox)
            self._rank_pen.outbox.clear()
            self._rank_bytes += len(letter)
            self._letters.append(letter)
            for message in self._rank_decoder.feed(letter):
                assert isinstance(message, Claim)
                self._claims.append(message)

    # Events.

    def _push(self, when_s: float, kind: int, node: int = 0, source: int = 0, data: bytes | _Log = b"") -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), kind, node, source, data))

    def _next_event(self) -> None:
        now_s, _, kind, index, source, data = heapq.heappop(self._events)
        node = self._nodes[index]
        if kind == _COLLECTIVE:
            self._end_collective(now_s)
        elif kind == _MESSAGE:
            node.inbox.append((source, data))
            if node.asleep:
                self._wake_at(index, self._next_look(node, now_s))
        elif node.cycle_at_s == now_s:  # otherwise something has woken it earlier
            self._cycle(index, now_s)

    def _wake_at(self, index: int, when_s: float) -> None:
        node = self._nodes[index]
        if when_s < node.cycle_at_s:
            node.cycle_at_s = when_s
            self._push(when_s, _CYCLE, index)

    def _sleep(self, index: int, now_s: float) -> None:
        """Its thread has nothing to do at ``now_s``; a message from another node may wake it before its ranks do."""
        node = self._nodes[index]
        node.asleep = True
        node.look_s = now_s
        node.cycle_at_s = _NEVER
        wake_s = self._machine.wake_s
        if node.own:
            self._wake_at(index, max(node.own[0][0] + wake_s, now_s))
        if node.others:
            self._wake_at(index, max(self._arrival(node, node.others[0][0]) + wake_s, now_s))
        if node.negotiation.is_waiting:
            self._wake_at(index, now_s + _LOOK_S)

    def _arrival(self, node: _Node, ready_s: float) -> float:
        """When the leader can read the claim of a rank that was ready at ``ready_s``, whose thread may be executing."""
        sent_s = ready_s + self._machine.wake_s
        if node.entered_s <= sent_s < node.left_s:
            sent_s = node.left_s
        return sent_s + self._machine.cycle_s

    def _next_look(self, node: _Node, now_s: float) -> float:
        """When a leader that sleeps sees what MPI has at ``now_s``."""
        while node.look_s < now_s:
            waited_s = node.look_s - node.heard_s
            node.look_s += min(max(waited_s * _POLL_SHARE, _SHORTEST_POLL_S), _LONGEST_POLL_S)
            node.busy_s += self._machine.cycle_s
        return node.look_s

    def _cycle(self, index: int, now_s: float) -> None:
        """What `Coordinator._cycle` does, up to the execution of what the log says."""
        node = self._nodes[index]
        node.asleep = False
        node.cycle_at_s = _NEVER
        is_root = index == 0
        began = time.thread_time() if is_root else 0.0
        heard = self._hear_ranks(node, now_s)
        sends: list[tuple[int, bytes | _Log]] = []
        log: list[_Log] = []
        for source, data in node.inbox:
            node.traffic.received(len(data.data if isinstance(data, _Log) else data))
            heard += 1
            if isinstance(data, _Log):
                log.append(data)
            else:
                for message in node.links[source].feed(data):
                    assert isinstance(message, Claim)
                    node.claims_heard += 1
                    node.negotiation.add(message, node.speaks_for[source], now_s)
        node.inbox.clear()
        if node.parent is None:
            log += self._judge(node)
        else:
            for claim in node.negotiation.upward(now_s):
                node.pen.send(claim)
            if node.pen.outbox:
                sends.append((node.parent, bytes(node.pen.outbox)))
                node.pen.outbox.clear()
        if is_root:
            self._root_cpu_s += time.thread_time() - began
        sends += [(child, part) for part in log for child in node.children]

        machine = self._machine
        cost_s = machine.cycle_s + heard * machine.message_s + len(sends) * machine.send_s
        node.busy_s += cost_s
        end_s = now_s + cost_s
        for target, data in sends:
            nbytes = len(data.data if isinstance(data, _Log) else data)
            node.traffic.sent(nbytes)
            self._push(end_s + machine.latency_s + nbytes / machine.link_bytes_per_s, _MESSAGE, target, index, data)
        if heard:
            node.heard_s = now_s
        for part in log:
            node.read += len(part.items)
        if node.read > node.done:
            node.entered_s, node.left_s = end_s, _NEVER
            self._enter(node, end_s + (machine.wake_s if node.topology.local_size > 1 else 0.0))
        else:
            self._sleep(index, end_s)

    def _hear_ranks(self, node: _Node, now_s: float) -> int:
        """Take the claims of the node's own ranks that are there; how many."""
        heard = 0
        ranks = node.topology.local_ranks
        while node.own and node.own[0][0] <= now_s:
            _, bucket = node.own.popleft()
            node.negotiation.add(self._claims[bucket], ranks[:1], now_s)
            heard += 1
        while node.others and self._arrival(node, node.others[0][0]) <= now_s:
            _, local, bucket = node.others.popleft()
            letter = self._letters[bucket]
            node.mail_bytes += len(letter)
            claims = self._root_mailboxes[local].feed(letter) if node is self._root else [self._claims[bucket]]
            for claim in claims:
                assert isinstance(claim, Claim)
                node.negotiation.add(claim, ranks[local : local + 1], now_s)
            heard += 1
        node.claims_heard += heard
        return heard

    def _judge(self, root: _Node) -> list[_Log]:
        """What `Coordinator._judge` and `_obey` make of what is complete."""
        verdicts = root.negotiation.verdicts()
        if not verdicts:
            return []
        for verdict in verdicts:
            root.pen.send(verdict)
        root.pen.send(EndOfBatch())
        data = bytes(root.pen.outbox)
        root.pen.outbox.clear()
        batch = [message for message in self._log_decoder.feed(data) if isinstance(message, Response)]
        items = plan_buckets(batch, self._config.fusion_threshold_bytes)
        self._batch_starts.append(len(self._items))
        self._items += items
        self._arrived += [0] * len(items)
        self._began_s += [0.0] * len(items)
        self._log_bytes += len(data)
        return [_Log(data, items)]

    def _enter(self, node: _Node, now_s: float) -> None:
        """The ranks of ``node`` begin with the next item of the log."""
        item = node.done
        self._arrived[item] += 1
        self._began_s[item] = max(self._began_s[item], now_s)
        if self._arrived[item] == len(self._nodes):
            self._push(self._began_s[item] + self._allreduce_s(self._item_bytes(item)), _COLLECTIVE)

    def _end_collective(self, now_s: float) -> None:
        """On all nodes: the next one follows, or a cycle."""
        self._responses += len(self._items[len(self._ended_s)])
        self._ended_s.append(now_s)
        for index, node in enumerate(self._nodes):
            node.done += 1
            if node.read > node.done:
                self._enter(node, now_s)
            else:
                node.left_s = now_s
                self._wake_at(index, now_s)

    def _item_bytes(self, item: int) -> int:
        return sum(self._nbytes[response.request.name] for response in self._items[item])


def _node(index: int, nodes: tuple[tuple[int, ...], ...], config: Config) -> _Node:
    topology = Topology(nodes[index][0], nodes)
    children = topology.children(config.tree_fanout)
    return _Node(
        topology,
        topology.parent(config.tree_fanout),
        children,
        Negotiation(topology.subtree_ranks(index, config.tree_fanout)),
        Encoder(config.cache_capacity),
        {child: topology.subtree_ranks(child, config.tree_fanout) for child in children},
        {child: Decoder() for child in children},
    )
