"""Coordinators of many ranks in one thread: the real ones, on links that deliver when they like, on a clock of ours.

What they execute is written down instead of done.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import hvdlite.operations
from hvdlite.config import Config
from hvdlite.coordinator.burst import Burst, KnownBurst
from hvdlite.coordinator.coordinator import Coordinator
from hvdlite.coordinator.messages import PlanMessage, Response, Verb
from hvdlite.coordinator.plan_member import PlanMember
from hvdlite.coordinator.prepared import Outcome
from hvdlite.coordinator.request import NAMED, Key, Request, TensorSpec
from hvdlite.coordinator.submission import Pace, Submission
from hvdlite.counters import Traffic
from hvdlite.dtypes import DType
from hvdlite.operations.operation import Operation
from hvdlite.recorder import Recorder
from hvdlite.topology import Topology

TICK_S = 1e-4


def address_of(request: Any) -> int:
    """Of the tensor of ``request``, which has a name of its own."""
    return hash(request) & 0xFFFF


def _kinds(base: type[Operation]) -> Iterator[type[Operation]]:
    for kind in base.__subclasses__():
        if hasattr(kind, "label"):
            yield kind
        yield from _kinds(kind)


for _module in pkgutil.iter_modules(hvdlite.operations.__path__):
    importlib.import_module(f"hvdlite.operations.{_module.name}")
OPERATIONS = {kind.label: kind for kind in _kinds(Operation)}
"""The kinds of operations that there are."""
PATIENT = {"stall_check_time_s": 20.0}  # longer than anything waits; ranks say after a tenth of it that they wait


class Page:
    """What `ControlPage` is, in lists; its streams take and give some of the bytes only."""

    bytes_written = bytes_read = 0  # nobody counts
    aborted = False
    counts = None  # for native code

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
        count = self._random.randint(1, len(outbox)) if self._shared.is_small else len(outbox)
        for log in self._shared.logs[1:]:
            log += outbox[:count]
        del outbox[:count]
        for local_rank in range(1, len(self._shared.logs)):
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
        before = self.ready(plan)
        self._shared.ready[self._local_rank] = (plan, count)
        if self.ready(plan) > before:
            for local_rank in self._shared.want_ring - {self._local_rank}:
                self.ring(local_rank)

    def agree(self, plan: int, wish: int, heard: int, timeout_s: float, spin_us: int) -> bool:
        """As if others were late: none can come while this one waits."""
        return False

    def want_ring(self, wanted: bool) -> None:
        (self._shared.want_ring.add if wanted else self._shared.want_ring.discard)(self._local_rank)

    def ready(self, plan: int) -> int:
        return min(count if its == plan else 0 for its, count in self._shared.ready)

    def ring(self, local_rank: int) -> None:
        self.rung.add(local_rank)

    def ring_self(self) -> None:
        self.ring(self._local_rank)

    def hear(self) -> None:
        self.rung.discard(self._local_rank)

    @property
    def is_rung(self) -> bool:
        return self._local_rank in self.rung


class Tree:
    """What `hvdlite.coordinator.tree.Tree` is, between leaders of this process.

    Attributes:
        is_full: the kernel takes nothing more of what this leader sends.
    """

    def __init__(self, links: dict[tuple[int, int], deque[bytes]], index: int, topology: Topology, fanout: int) -> None:
        self.parent = topology.parent(fanout)
        self.children = topology.children(fanout)
        self.traffic = Traffic()
        self.sent = 0
        self.is_full = False
        self._links = links
        self._index = index
        self._unsent: deque[tuple[int, bytes]] = deque()

    def send(self, node_index: int, data: bytes) -> None:
        self.sent += 1
        self._unsent.append((node_index, data))
        self._flush()

    def unsent(self, node_index: int) -> int:
        return sum(target == node_index for target, _ in self._unsent)

    def _flush(self) -> None:
        while self._unsent and not self.is_full:
            target, data = self._unsent.popleft()
            self._links.setdefault((self._index, target), deque()).append(data)

    @property
    def has_come(self) -> bool:
        """Whether `receive` would give something; of a leader."""
        return any(queue for (_, target), queue in self._links.items() if target == self._index)

    def receive(self) -> Iterator[tuple[int, bytes]]:
        self._flush()
        for (source, target), queue in list(self._links.items()):
            if target == self._index and queue:
                yield source, queue.popleft()


class Exchanges:
    """What `hvdlite.early_operations.EarlyOperations` does between ``nodes``: the n-th of all ranks are the same."""

    def __init__(self, nodes: Sequence[tuple[int, ...]]) -> None:
        self.nodes = nodes
        self.entered = [0] * sum(map(len, nodes))
        self.subjects: list[Any] = []
        self.wanted: list[int] = []  # by how many ranks the result of each was
        self.dropped: set[int] = set()  # by some rank that had not begun before


class Early:
    """One rank's end of ``exchanges``."""

    def __init__(self, exchanges: Exchanges, rank: int) -> None:
        self._exchanges = exchanges
        self._rank = rank
        self.has_begun = False

    def meeting(self, counts: object, patience_s: float) -> None:
        """Nobody waits here."""

    def takes(self, request: Any) -> bool:
        return not request.name.startswith("large")

    def is_early(self, request: Any) -> bool:
        """Whether it is begun itself; before others there is a meeting."""
        return request.label == "allreduce"

    def begin(self, made: Submission) -> None:
        self._begin(made.request)

    def _begin(self, request: Any) -> None:
        assert not self.has_begun
        exchanges, turn = self._exchanges, self._exchanges.entered[self._rank]
        subject = request.settled() if self.is_early(request) else "meeting"
        if turn == len(exchanges.subjects):
            exchanges.subjects.append(subject)
            exchanges.wanted.append(0)
        assert exchanges.subjects[turn] == subject
        exchanges.entered[self._rank] += 1
        self.has_begun = True

    def has_come(self) -> bool:
        """Where one rank of a node has begun, the others do at the same time."""
        entered, turn = self._exchanges.entered, self._exchanges.entered[self._rank]
        return all(any(entered[rank] >= turn for rank in ranks) for ranks in self._exchanges.nodes)

    def is_met(self, request: Any) -> bool:
        exchanges = self._exchanges
        return not self.is_early(request) and exchanges.entered[self._rank] - 1 not in exchanges.dropped

    def enter(self, request: Any) -> None:
        if not self.is_early(request):
            self.finish(request)

    def finish(self, request: Any) -> None:
        """What has begun is executed, or entered."""
        if not self.has_begun:
            self._begin(request)
        self._exchanges.wanted[self._exchanges.entered[self._rank] - 1] += 1
        self.has_begun = False

    def drop(self, request: Any) -> None:
        if not self.has_begun:
            self._begin(request)
            self._exchanges.dropped.add(self._exchanges.entered[self._rank] - 1)
        self.has_begun = False


class SmallBurst:
    """What `Owner.prepare_burst` returns: now and then Ctrl-C comes, before it is done or after."""

    def __init__(self, owner: Owner, generator: random.Random) -> None:
        self.direct = self
        self._owner = owner
        self._random = generator
        self._last = 0, 0, Outcome.NOT_YET

    def start(self, sources: Sequence[int], targets: Sequence[int], plan: int, count: int) -> None:
        assert sources == targets
        self._last = plan, count, Outcome.NOT_YET
        self._owner.page.want_ring(False)
        self._owner.page.set_ready(plan, count)

    def complete_now(self) -> Outcome:
        plan, count, _ = self._last
        self._interrupt()
        self._owner.page.want_ring(True)
        if self._owner.page.ready(plan) < count:
            return Outcome.NOT_YET
        self._owner.execute_burst(self._owner.next_burst())
        self._last = plan, count, Outcome.DONE
        self._interrupt()
        return Outcome.DONE

    def last(self) -> tuple[int, int, int]:
        return self._last

    def count_done(self, times: int) -> None:
        assert self._last[-1] is Outcome.DONE

    def _interrupt(self) -> None:
        if self._random.random() < 0.1:
            raise KeyboardInterrupt


class Owner:
    """Writes down which operations went together, and does none.

    Attributes:
        next_burst: that of the plan which comes next.
    """

    def __init__(self, config: Config, early: Early | None, page: Page, generator: random.Random) -> None:
        self.config = config
        self.early = early
        self.page = page
        self.next_burst: Callable[[], Burst]
        self._random = generator
        self.recorder = Recorder(16)
        self.buckets: list[tuple[tuple[str, int], ...]] = []
        self.waits_inside = False  # of the last, until all have come to it

    is_under_way = False

    def watch(self) -> None:
        pass

    def check(self) -> None:
        pass

    def execute(self, work: Sequence[tuple[Response, Submission | None]]) -> None:
        for response, submission in work:
            if submission is not None:
                assert response.key == submission.key
                assert response.request.settled() == submission.request.settled()
        requests = [response.request for response, _ in work]
        if self.is_early(requests):
            self.early.finish(requests[0])  # type: ignore[union-attr]
        self.did([response.key for response, _ in work], requests)

    def is_early(self, requests: Sequence[Request]) -> bool:
        return self.early is not None and len(requests) == 1 and self.early.is_early(requests[0])

    def did(self, keys: Sequence[Key], requests: Sequence[Request]) -> None:
        """All of them together."""
        self.buckets.append(tuple(keys))
        self.waits_inside = not self.is_early(requests)

    def execute_burst(self, burst: Burst) -> None:
        assert len(burst.parts) == len(burst.known.requests) > 1
        assert [part[0] for part in burst.parts] == [address_of(request) for request in burst.known.requests]
        requests = burst.known.requests
        self.did([(request.name, part[2]) for request, part in zip(requests, burst.parts, strict=True)], requests)

    def prepare_burst(self, known: KnownBurst) -> SmallBurst | None:
        return SmallBurst(self, self._random) if self._random.random() < 0.5 else None

    def withdraw(self) -> None:
        pass

    def coordinator_died(self, error: BaseException) -> None:
        raise error

    def take_notice(self, content: dict[str, Any]) -> None:
        pass


def _next_burst(coordinator: Coordinator) -> Burst:
    plan = coordinator._plan.plan
    assert plan is not None
    burst = plan._pending[plan.done]
    assert isinstance(burst, Burst)
    return burst


class Prompt(Pace):
    """Of who pauses nowhere but where it waits: what the machine does meanwhile would divide plans."""

    __slots__ = ()

    def step(self, now_ns: int, request: Request | None = None) -> float:
        """See `Pace`."""
        return super().step(self._last_ns, request)


class Lab:
    """The coordinators of ``nodes``, given as the ranks of each.

    Args:
        small_pages: they take some of what is published of the log at a time.
    """

    def __init__(
        self, nodes: Sequence[tuple[int, ...]], seed: int, *, small_pages: bool = False, **settings: Any
    ) -> None:
        self.now_s = 0.0
        self.random = random.Random(seed)
        config = Config(**{**PATIENT, "tree_fanout": 2, **settings})
        links: dict[tuple[int, int], deque[bytes]] = {}
        self.exchanges = Exchanges(nodes)
        self.owners: list[Owner] = []
        self.trees: list[Tree] = []
        self.pages: list[Page] = []
        self.ranks: list[Coordinator] = []
        for index, ranks in enumerate(nodes):
            shared = SimpleNamespace(
                mailboxes=[bytearray() for _ in ranks],
                logs=[bytearray() for _ in ranks],
                is_small=small_pages,
                ready=[(0, 0)] * len(ranks),
                want_ring=set(),
                rung=set(range(len(ranks))),
            )
            for local_rank, rank in enumerate(ranks):
                topology = Topology(rank, tuple(nodes))
                tree = Tree(links, index, topology, config.tree_fanout)
                self.trees.append(tree)
                self.pages.append(Page(shared, local_rank, self.random))
                early = Early(self.exchanges, rank) if len(nodes) > 1 else None
                self.owners.append(Owner(config, early, self.pages[-1], random.Random(f"{seed} {rank}")))
                self.ranks.append(
                    Coordinator(
                        self.owners[-1],
                        topology,
                        self.pages[-1],  # type: ignore[arg-type]
                        tree,  # type: ignore[arg-type]
                        spin_us=0,
                        clock=lambda: self.now_s,
                    )
                )
                self.ranks[-1]._pace.__class__ = Prompt
                self.owners[-1].next_burst = partial(_next_burst, self.ranks[-1])

    def turn(self) -> None:
        """One cycle of some rank, unless nothing is left of its work."""
        self.now_s += TICK_S
        rank = self.random.randrange(len(self.ranks))
        if not self.ranks[rank].has_ended and not self.is_inside(rank):
            self.ranks[rank].cycle()

    def turn_of_who_is_awake(self) -> bool:
        """The same of a rank that does not sleep until somebody rings; whether there is one."""
        awake = [rank for rank in range(len(self.ranks)) if self._is_awake(rank) and not self.is_inside(rank)]
        if awake:
            self.now_s += TICK_S
            rank = self.random.choice(awake)
            self.pages[rank].hear()
            self.ranks[rank].cycle()
        return bool(awake)

    def _is_awake(self, rank: int) -> bool:
        coordinator = self.ranks[rank]
        if coordinator.has_ended:
            return False
        is_rung = self.pages[rank].is_rung or self.trees[rank].has_come
        return is_rung or coordinator.has_news or coordinator.patience_s() < math.inf

    def is_inside(self, rank: int) -> bool:
        """Whether it waits for others inside of an operation."""
        done = [len(owner.buckets) for owner in self.owners]
        return self.owners[rank].waits_inside and done[rank] > min(done)

    def claims(self) -> list[int]:
        """How many each rank has sent or heard."""
        counts = [coordinator.statistics() for coordinator in self.ranks]
        return [count["claims_sent"] + count["claims_heard"] for count in counts]

    def settle(self, submissions: Sequence[Submission], limit: int = 200_000) -> None:
        """Go on until all are done."""
        for _ in range(limit):
            if all(made.is_done for made in submissions):
                return
            self.turn()
        raise AssertionError("they wait for ever")


def submission(name: str, numel: int = 4, sequence: int = NAMED, kind: str = "allreduce") -> Submission:
    tensors = () if kind in ("barrier", "join") else (TensorSpec(name, DType.FLOAT32, (numel,)),)
    return Submission(OPERATIONS[kind](name, tensors), sequence)


def with_bursts(*lengths: int) -> PlanMember:
    """A member in a plan of a, b, c and so on, in bursts of so many."""
    begins = tuple(sum(lengths[:count]) for count in range(len(lengths)))
    member = PlanMember(longest=10, patience_s=1.0)
    for name in "abcdefghij"[: sum(lengths)]:
        member.logged(Response(submission(name).request, NAMED), 0.0)
    member.obey(PlanMessage(Verb.HOLD), 0.0)
    member.obey(PlanMessage(Verb.RELEASE, sum(lengths), places=begins), 0.0)
    return member
