"""Coordinators of many ranks in one thread: the real ones, on links that deliver when they like, on a clock of ours.

What they execute is written down instead of done.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from hvdlite.config import Config
from hvdlite.coordinator import thread
from hvdlite.coordinator.handle import Handle
from hvdlite.coordinator.messages import NAMED, Kind, Request, TensorSpec
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import DType
from hvdlite.timeline.recorder import Recorder
from hvdlite.topology import Topology

TICK_S = 1e-4
QUIET = {"stall_check_disable": True}


class Page:
    """What `ControlPage` is, in lists; its streams take and give some of the bytes only."""

    def __init__(self, shared: SimpleNamespace, local_rank: int, generator: random.Random) -> None:
        self._shared = shared
        self._local_rank = local_rank
        self._random = generator
        self.rung: set[int] = shared.rung

    def send_to_leader(self, outbox: bytearray) -> None:
        count = self._random.randint(1, len(outbox))
        self._shared.mailboxes[self._local_rank] += outbox[:count]
        del outbox[:count]
        self.ring(0)

    def receive(self, local_rank: int) -> bytes:
        mailbox = self._shared.mailboxes[local_rank]
        data = bytes(mailbox)
        mailbox.clear()
        return data

    def publish(self, outbox: bytearray) -> None:
        for log in self._shared.logs:
            log += outbox
        outbox.clear()
        for local_rank in range(len(self._shared.logs)):
            self.ring(local_rank)

    def read_log(self) -> bytes:
        log = self._shared.logs[self._local_rank]
        count = self._random.randint(0, len(log))
        data = bytes(log[:count])
        del log[:count]
        if log:
            self.ring(self._local_rank)
        return data

    def set_ready(self, plan: int, count: int) -> None:
        before = self._shared.ready[self._local_rank]
        self._shared.ready[self._local_rank] = (plan, count)
        if min(self._shared.ready) > before:
            self.ring(0)

    def ready(self, plan: int) -> int:
        lowest = min(self._shared.ready)
        return lowest[1] if lowest[0] == plan else 0

    def ring(self, local_rank: int) -> None:
        self.rung.add(local_rank)

    def ring_self(self) -> None:
        self.ring(self._local_rank)


class Tree:
    """What `hvdlite.coordinator.tree.Tree` is, between leaders of this process."""

    def __init__(self, links: dict[tuple[int, int], deque[bytes]], index: int, topology: Topology, fanout: int) -> None:
        self.parent = topology.parent(fanout)
        self.children = topology.children(fanout)
        self.sent = 0
        self._links = links
        self._index = index

    def send(self, node_index: int, data: bytes) -> None:
        self.sent += 1
        self._links.setdefault((self._index, node_index), deque()).append(data)

    def unsent(self, node_index: int) -> int:
        return 0

    def receive(self) -> Iterator[tuple[int, bytes]]:
        for (source, target), queue in list(self._links.items()):
            if target == self._index and queue:
                yield source, queue.popleft()


class Executor:
    """Writes down which operations went together."""

    def __init__(self) -> None:
        self.buckets: list[tuple[tuple[str, int], ...]] = []

    def execute(self, work: Sequence[Any]) -> None:
        for response, submission in work:
            assert response.key == submission.key
            assert response.request.at(None) == submission.request.at(None)
        self.buckets.append(tuple(response.key for response, _ in work))


class Lab:
    """The coordinators of ``nodes``, given as the ranks of each."""

    def __init__(self, nodes: Sequence[tuple[int, ...]], seed: int, monkeypatch: Any, **settings: Any) -> None:
        self.now_s = 0.0
        clock = SimpleNamespace(
            monotonic=lambda: self.now_s, monotonic_ns=lambda: int(self.now_s * 1e9), sleep=lambda seconds: None
        )
        monkeypatch.setattr(thread, "time", clock)
        self.random = random.Random(seed)
        config = Config(**{**QUIET, "tree_fanout": 2, **settings})
        links: dict[tuple[int, int], deque[bytes]] = {}
        self.executors: list[Executor] = []
        self.trees: list[Tree] = []
        self.pages: list[Page] = []
        self.ranks: list[thread.Coordinator] = []
        for index, ranks in enumerate(nodes):
            shared = SimpleNamespace(
                mailboxes=[bytearray() for _ in ranks],
                logs=[bytearray() for _ in ranks],
                ready=[(0, 0)] * len(ranks),
                rung=set(range(len(ranks))),
            )
            for local_rank, rank in enumerate(ranks):
                topology = Topology(rank, tuple(nodes))
                tree = Tree(links, index, topology, config.tree_fanout)
                self.executors.append(Executor())
                self.trees.append(tree)
                self.pages.append(Page(shared, local_rank, self.random))
                self.ranks.append(
                    thread.Coordinator(
                        topology,
                        self.pages[-1],  # type: ignore[arg-type]
                        tree,  # type: ignore[arg-type]
                        self.executors[-1],  # type: ignore[arg-type]
                        config,
                        Recorder(16),
                        spin_us=0,
                        check=lambda: None,
                        on_fatal=self._raise,
                        on_notice=lambda content: None,
                        on_joined=lambda: None,
                    )
                )

    @staticmethod
    def _raise(error: BaseException) -> None:
        raise error

    def turn(self) -> None:
        """One cycle of some rank."""
        self.now_s += TICK_S
        self.random.choice(self.ranks)._cycle()

    def settle(self, handles: Sequence[Handle], limit: int = 200_000) -> None:
        """Go on until all are done."""
        for _ in range(limit):
            if all(handle.done() for handle in handles):
                return
            self.turn()
        raise AssertionError("they wait for ever")


def submission(name: str, numel: int = 4, sequence: int = NAMED, kind: Kind = Kind.ALLREDUCE) -> Submission:
    tensors = () if kind in (Kind.BARRIER, Kind.JOIN) else (TensorSpec(name, DType.FLOAT32, (numel,)),)
    return Submission(Request(kind, name, tensors), sequence)
