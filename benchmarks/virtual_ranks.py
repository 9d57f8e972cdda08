"""The control plane of any number of ranks, without MPI and in virtual time: what they say is exact, when is a model.

What ranks say is hvdlite's own code (virtual_node.py). Only threads, clocks and wires are played:

- A rank's coordinator thread sleeps until its doorbell rings. A leader's runs cycles, in the order of
  `Coordinator._cycle`: hear its node and the tree, judge or pass on, execute.
- A thread that waits does the coordinator's work: what is submitted last, and the end of a step, wait for no wake-up.
- A collective begins on a node when its ranks have read the log, moves data once all nodes are there, and blocks the
  coordinators of all ranks until its end.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from math import inf

import numpy as np

from data_path import Machine, traffic
from hvdlite.config import Config
from hvdlite.coordinator.fusion import fuse
from hvdlite.coordinator.messages import Decoder, EndOfBatch, PlanMessage, Response
from hvdlite.coordinator.negotiation import LOOK_S
from hvdlite.coordinator.request import NAMED
from hvdlite.coordinator.submission import Submission
from hvdlite.counters import Traffic
from hvdlite.topology import Topology
from schedules import Schedule
from virtual_node import Letter, Letters, VirtualNode

_CYCLE, _MESSAGE, _COLLECTIVE = range(3)

AllreduceTime = Callable[[int], float]
"""Seconds that so many bytes take, from the last rank's begin to the end."""


@dataclass(slots=True)
class _Entry:
    """Of the log: a batch of responses, or a message about the plan; ``items`` are the collectives that follow."""

    batch: list[Response] = field(default_factory=list)
    message: PlanMessage | None = None
    items: range | None = None  # numbers of collectives, once the root has read it


@dataclass(slots=True)
class _Log:
    """What the root has written in one go."""

    data: bytes
    entries: list[_Entry]


@dataclass(slots=True)
class _Thread:
    """When a node does what: the coordinator thread of its leader, and its ranks where they act as one."""

    node: VirtualNode
    own: deque[tuple[float, int]] = field(default_factory=deque)  # (when its leader is ready, bucket), by time
    others: deque[tuple[float, int, int]] = field(default_factory=deque)  # (when, local rank, bucket), by time
    last_s: list[float] = field(default_factory=list)  # when the last of the others is ready, by bucket
    behind: list[int] = field(default_factory=list)  # how many of the others have not submitted it, by bucket
    mail: deque[tuple[float, int, Letter]] = field(default_factory=deque)  # (when it is there, local rank, ...)
    inbox: list[tuple[int, bytes | _Log]] = field(default_factory=list)
    log: deque[_Entry] = field(default_factory=deque)  # read, and not obeyed
    items: deque[int] = field(default_factory=deque)  # collectives to come
    asleep: bool = True
    asleep_s: float = 0.0  # since when
    cycle_at_s: float = inf  # when it runs next
    entered_s: float = 0.0  # when its ranks last began to execute, and were done
    left_s: float = 0.0
    busy_s: float = 0.0  # but for execution


@dataclass(frozen=True)
class Step:
    """How one step went.

    Attributes:
        seconds: from the last rank's begin to the last rank's end.
        compute_s: of the slowest rank.
        agreement_s: of each batch that the root made of the buckets: from when the last rank was ready for its first
            collective, and the one before was over, until every rank had read that it may begin.
        root_cpu_s: measured, of this machine: the root's part of the negotiation, in Python.
        root_busy_s: the same in virtual time.
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
        freezes: whether an order that repeats is frozen; otherwise everything is claimed for ever.
        jitter: standard deviation of a rank's compute time, as a share of it; drawn for every rank and step.
        seed: of the jitter.
    """

    def __init__(
        self,
        nodes: tuple[tuple[int, ...], ...],
        schedule: Schedule,
        machine: Machine,
        config: Config,
        *,
        freezes: bool = True,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._schedule = schedule
        self._machine = machine
        self._config = config
        self._jitter = jitter
        self._random = np.random.default_rng(seed)
        self._letters = Letters(config.cache_capacity)
        self._threads = [
            _Thread(VirtualNode(index, nodes, config, self._letters, freezes)) for index in range(len(nodes))
        ]
        self._nodes = nodes
        self._size = sum(map(len, nodes))
        self._place = {rank: (node, local) for node, ranks in enumerate(nodes) for local, rank in enumerate(ranks)}
        self._first = np.cumsum([0, *map(len, nodes)])  # of each node, among the rows of readiness times
        self._submissions = [Submission(bucket.request, NAMED) for bucket in schedule.buckets]
        self._nbytes = {bucket.request.name: bucket.nbytes for bucket in schedule.buckets}
        # Whoever has nothing left to compute waits, and does what its coordinator thread would have to be woken for.
        self._wakes_s = [machine.wake_s * (bucket.ready_s < schedule.compute_s) for bucket in schedule.buckets]
        self._log_decoder = Decoder()
        self._log_bytes = 0
        self._batch: list[Response] = []
        self._submitted = 0  # by each rank, and done
        self._responses = 0
        self._counted = 0
        self._root_cpu_s = 0.0

        self._allreduce_s: AllreduceTime = lambda nbytes: 0.0
        self._events: list[tuple[float, int, int, int, int, bytes | _Log]] = []
        self._numbers = count()
        self._items: list[list[Response]] = []
        self._is_counted: list[bool] = []  # done by a frozen plan
        self._batch_starts: list[int] = []  # the first item of each
        self._arrived: list[int] = []  # of each item, how many nodes are there, and when the last came
        self._began_s: list[float] = []
        self._ended_s: list[float] = []
        self._starts_s = np.zeros(self._size)

    @property
    def plans(self) -> int:
        """How many orders were frozen."""
        return self._threads[0].node.ranks[0].member.number

    def step(self, allreduce_s: AllreduceTime) -> Step:
        """Run one step of all ranks to its end."""
        schedule = self._schedule
        self._allreduce_s = cache(allreduce_s)
        factors = np.maximum(0.5, 1 + self._jitter * self._random.standard_normal(self._size))
        offsets = np.array([bucket.ready_s for bucket in schedule.buckets])
        ready_s = self._starts_s[:, None] + factors[:, None] * offsets
        compute_ends_s = self._starts_s + factors * schedule.compute_s
        begin_s = float(self._starts_s.max())
        root = self._threads[0]
        cpu_s, busy_s, first = self._root_cpu_s, root.busy_s, len(self._batch_starts)

        self._letters.new_step()
        for index, thread in enumerate(self._threads):
            rows = ready_s[self._first[index] : self._first[index + 1]]
            thread.own.extend((when, bucket) for bucket, when in enumerate(rows[0].tolist()))
            by_rank = enumerate(rows.tolist())
            thread.others.extend(sorted((t, local, i) for local, row in by_rank if local for i, t in enumerate(row)))
            thread.last_s = rows[1:].max(axis=0).tolist() if len(rows) > 1 else []
            thread.behind = [len(rows) - 1] * len(thread.last_s)
            if thread.asleep:
                self._sleep(index, thread.asleep_s)
        self._submitted += len(schedule.buckets)
        while self._responses + self._counted < self._submitted:
            self._next_event()

        ends_s = np.maximum(compute_ends_s, self._ended_s[-1])
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
            root_busy_s=root.busy_s - busy_s,
        )

    def statistics(self, rank: int) -> dict[str, int]:
        """What `hvdlite.statistics` says on ``rank``, but for its cycles, and alltoall, of which there is none."""
        topology = Topology(rank, self._nodes)
        ring = Counter(Traffic().named("ring"))
        for nbytes, times in Counter(map(self._item_bytes, range(len(self._items)))).items():
            for name, number in traffic(topology, nbytes, self._config).named("ring").items():
                ring[name] += times * number
        return self.control(rank) | ring

    def control(self, rank: int) -> dict[str, int]:
        """`statistics` without data."""
        index, local_rank = self._place[rank]
        return {
            "submissions": self._submitted,
            "responses": self._responses,
            "counted": self._counted,
            "batches": len(self._batch_starts),
            **self._threads[index].node.control(local_rank, self._log_bytes),
            "buckets": len(self._items),
            "reduced_bytes": sum(map(self._item_bytes, range(len(self._items)))),
        }

    # Events.

    def _push(self, when_s: float, kind: int, node: int = 0, source: int = 0, data: bytes | _Log = b"") -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), kind, node, source, data))

    def _next_event(self) -> None:
        now_s, _, kind, index, source, data = heapq.heappop(self._events)
        thread = self._threads[index]
        if kind == _COLLECTIVE:
            self._end_collective(now_s)
        elif kind == _MESSAGE:
            thread.inbox.append((source, data))
            if thread.asleep:  # the thread that watches its sockets wakes it
                self._wake_at(index, now_s + 2 * self._machine.wake_s)
        elif thread.cycle_at_s == now_s:  # otherwise something has woken it earlier
            self._cycle(index, now_s)

    def _wake_at(self, index: int, when_s: float) -> None:
        thread = self._threads[index]
        if when_s < thread.cycle_at_s:
            thread.cycle_at_s = when_s
            self._push(when_s, _CYCLE, index)

    def _sleep(self, index: int, now_s: float) -> None:
        """A leader's thread has nothing to do at ``now_s``, until its ranks wake it, or a message from another node."""
        thread, machine = self._threads[index], self._machine
        thread.asleep, thread.asleep_s = True, now_s
        if thread.own:
            when_s, bucket = thread.own[0]
            self._wake_at(index, max(when_s + self._wakes_s[bucket], now_s))
        if thread.mail:
            self._wake_at(index, max(thread.mail[0][0] + machine.wake_s, now_s))
        if thread.others:
            ready_s, _, bucket = thread.others[0]
            if thread.node.has_plan:  # it is rung once all are ready for one operation more
                bucket = next(i for i, missing in enumerate(thread.behind) if missing)
                ready_s = thread.last_s[bucket]
            sent_s = self._sent_s(thread, ready_s, bucket)
            if sent_s < inf:
                self._wake_at(index, max(sent_s + machine.cycle_s + machine.wake_s, now_s))
        if thread.node.negotiation.is_waiting:
            self._wake_at(index, now_s + LOOK_S)
        if thread.node.has_plan:
            patience_s = thread.node.patience_s(now_s)
            if patience_s < inf:
                self._wake_at(index, now_s + patience_s)

    def _sent_s(self, thread: _Thread, ready_s: float, bucket: int) -> float:
        """When a rank's own thread looks at what it was ready for at ``ready_s``: after what it executes."""
        sent_s = ready_s + self._wakes_s[bucket]
        return thread.left_s if thread.entered_s <= sent_s < thread.left_s else sent_s

    def _play_ranks(self, thread: _Thread, until_s: float) -> None:
        """What the ranks do that lead no node, until then."""
        while thread.others:
            ready_s, local_rank, bucket = thread.others[0]
            sent_s = self._sent_s(thread, ready_s, bucket)
            if sent_s > until_s:
                return
            thread.others.popleft()
            thread.behind[bucket] -= 1
            letter = thread.node.submit(local_rank, self._submissions[bucket], sent_s)
            if letter is not None:
                thread.mail.append((sent_s + self._machine.cycle_s, local_rank, letter))

    def _cycle(self, index: int, now_s: float) -> None:
        """What `Coordinator._cycle` does, up to the execution of what the log says."""
        thread, machine = self._threads[index], self._machine
        node = thread.node
        thread.asleep = False
        thread.cycle_at_s = inf
        self._play_ranks(thread, now_s)
        if node.has_plan:
            thread.mail.extend((now_s, local_rank, letter) for local_rank, letter in node.complain(now_s))

        began = time.thread_time()
        heard = 0
        while thread.own and thread.own[0][0] <= now_s:
            node.submit(0, self._submissions[thread.own.popleft()[1]], now_s)
            heard += 1
        while thread.mail and thread.mail[0][0] <= now_s:
            _, local_rank, letter = thread.mail.popleft()
            node.hear_rank(local_rank, letter, now_s)
            heard += 1
        log: list[_Log] = []
        for source, data in thread.inbox:
            heard += 1
            if isinstance(data, _Log):
                node.traffic.received(len(data.data))
                log.append(data)
            else:
                node.traffic.received(len(data))
                node.hear_child(source, data, now_s)
        thread.inbox.clear()
        said = node.say(now_s)
        if said and node.parent is None:
            log.append(self._write_log(said))
        if index == 0:
            self._root_cpu_s += time.thread_time() - began

        sends: list[tuple[int, bytes | _Log]] = [(child, part) for part in log for child in node.children]
        if said and node.parent is not None:
            sends.append((node.parent, said))
        cost_s = machine.cycle_s + heard * machine.message_s + len(sends) * machine.send_s
        thread.busy_s += cost_s
        end_s = now_s + cost_s
        for target, data in sends:
            nbytes = len(data.data if isinstance(data, _Log) else data)
            node.traffic.sent(nbytes)
            self._push(end_s + machine.latency_s + nbytes / machine.link_bytes_per_s, _MESSAGE, target, index, data)
        if log:
            thread.log.extend(entry for part in log for entry in part.entries)
            thread.entered_s, thread.left_s = end_s + machine.wake_s * (node.topology.local_size > 1), inf
            self._proceed(index, thread.entered_s)
        else:
            self._sleep(index, end_s)

    def _write_log(self, data: bytes) -> _Log:
        """The root writes ``data``."""
        self._log_bytes += len(data)
        entries = []
        for message in self._log_decoder.feed(data):
            if isinstance(message, Response):
                self._batch.append(message)
            elif isinstance(message, EndOfBatch):
                entries.append(_Entry(batch=self._batch))
                self._batch = []
            else:
                assert isinstance(message, PlanMessage)
                entries.append(_Entry(message=message))
        return _Log(data, entries)

    def _proceed(self, index: int, now_s: float) -> None:
        """The ranks of a node go on with the log, up to the next collective."""
        thread = self._threads[index]
        while not thread.items and thread.log:
            entry = thread.log.popleft()
            if entry.message is None:
                responses = entry.batch
                thread.node.logged(responses)
            else:
                self._play_ranks(thread, now_s)  # what they were ready for before they read on
                responses, letters = thread.node.obey(entry.message, now_s)
                at_s = now_s + self._machine.cycle_s
                thread.mail.extend((at_s, local_rank, letter) for local_rank, letter in letters)
            if entry.items is None:
                entry.items = self._plan_items(responses, is_counted=entry.message is not None)
            thread.items.extend(entry.items)
        if thread.items:
            self._enter(thread.items[0], now_s)
        else:
            thread.left_s = now_s
            self._wake_at(index, now_s)

    def _plan_items(self, responses: list[Response], is_counted: bool) -> range:
        """The root has read that all are ready for these, so everybody will do them."""
        first = len(self._items)
        items = fuse(responses, self._config.fusion_threshold_bytes)
        if items:
            self._batch_starts.append(first)
        self._items += items
        self._is_counted += [is_counted] * len(items)
        self._arrived += [0] * len(items)
        self._began_s += [0.0] * len(items)
        return range(first, first + len(items))

    def _enter(self, item: int, now_s: float) -> None:
        """The ranks of a node begin with a collective."""
        self._arrived[item] += 1
        self._began_s[item] = max(self._began_s[item], now_s)
        if self._arrived[item] == len(self._threads):
            self._push(self._began_s[item] + self._allreduce_s(self._item_bytes(item)), _COLLECTIVE)

    def _end_collective(self, now_s: float) -> None:
        """On all nodes: the next one follows, or a cycle."""
        item = len(self._ended_s)
        self._ended_s.append(now_s)
        self._counted += len(self._items[item]) * self._is_counted[item]
        self._responses += len(self._items[item]) * (not self._is_counted[item])
        for index, thread in enumerate(self._threads):
            thread.items.popleft()
            self._proceed(index, now_s)

    def _item_bytes(self, item: int) -> int:
        return sum(self._nbytes[response.request.name] for response in self._items[item])
