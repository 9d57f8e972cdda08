"""Ranks of a job that go through steps on the coordinators of coordinator_lab.py, each at its own pace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from coordinator_lab import Lab, address_of, submission
from hvdlite.coordinator.burst import Burst
from hvdlite.coordinator.prepared import Outcome
from hvdlite.coordinator.request import NAMED
from hvdlite.coordinator.submission import Submission
from hvdlite.errors import MismatchError

NODES = [[(0, 1)], [(0, 1, 2)], [(0,), (1,)], [(0, 1), (2, 3)], [(0,), (1, 2), (3,), (4, 5)]]


class AtOnce:
    """An operation prepared on rank ``rank``, as native code does it: in order, and once all ranks are ready.

    Attributes:
        interrupt: raised by the next `run`, before or after it has told the other ranks.
    """

    def __init__(self, lab: Lab, rank: int, made: Submission) -> None:
        self._page, self._owner = lab.pages[rank], lab.owners[rank]
        self._made = made
        self._last: tuple[int, int, Outcome] | None = None
        self.request, self.label = made.request, made.label
        self.interrupt: str | None = None
        self.native = None
        self.is_valid = True

    def run(self, tensors: None, plan: int, count: int, heard: int) -> Outcome:
        if self.interrupt == "before":
            raise KeyboardInterrupt
        self._page.want_ring(False)
        self._page.set_ready(plan, count)
        outcome = Outcome.NOT_YET
        if self._page.ready(plan) >= count and self._all_have_begun():
            self._owner.did([self._made.key], [self.request])
            outcome = Outcome.DONE
        else:
            self._page.want_ring(True)
        self._last = plan, count, outcome
        if self.interrupt == "after":
            raise KeyboardInterrupt
        return outcome

    def _all_have_begun(self) -> bool:
        """It is done then."""
        early = self._owner.early
        if early is not None:
            early.begin(self._made)
            if not early.has_come():
                return False
            early.finish(self._made.request)
        return True

    def outcome(self, plan: int, count: int) -> Outcome | None:
        return self._last[2] if self._last is not None and self._last[:2] == (plan, count) else None

    def submission(self, sequence: int, tensors: None) -> Submission:
        return self._made


class InBurst:
    """An operation that was collected."""

    def __init__(self, burst: Burst, number: int) -> None:
        self._burst, self._number = burst, number
        self.poll, self.wait = partial(burst.poll, number), partial(burst.wait, number)

    @property
    def is_done(self) -> bool:
        apart = self._burst._apart
        return apart[self._number].is_done if apart else self._burst.is_done


class Job:
    """Ranks that go through the same steps, each at its own pace, and wait at the end of each.

    Args:
        at_once: what they wait for they try to do at once.
        collected: how many of their submissions are offered to the collector.
    """

    def __init__(self, lab: Lab, *, at_once: bool = False, collected: float = 0.0) -> None:
        self.collected = 0
        self._collected = collected
        self.lab = lab
        self.errors = 0
        self.done_at_once = 0
        self._at_once = at_once

    def step(self, orders: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Rank r submits ``orders[r]``: (name, elements); a name of '?' is unnamed, '|' waits for what came before.

        Allreduces, and broadcasts where the name is in capitals.
        """
        todo = [list(order) for order in orders]
        handles: list[list[Submission | InBurst]] = [[] for _ in orders]
        turns = 0
        while any(todo):
            turns += 1
            assert turns < 100_000, "they wait for ever"
            rank = self.lab.random.randrange(len(todo))
            for _ in range(self.lab.random.randrange(4)):
                self.lab.turn()
            is_late = todo[rank][:1] == [("|", 0)] and not all(map(self._poll, handles[rank]))
            if not todo[rank] or is_late or self.lab.is_inside(rank):
                self.lab.turn()
                continue
            name, numel = todo[rank].pop(0)
            if name != "|":
                kind = "broadcast" if name.isupper() else "allreduce"
                made = submission(name, numel, self._count(rank) if name == "?" else NAMED, kind)
                waits = bool(todo[rank]) and todo[rank][0][0] == "|"
                handles[rank] += self.begin(rank, made, waits)
        self.lab.settle([handle for own in handles for handle in own])
        for handle in handles[0]:
            try:
                handle.wait()
            except MismatchError:
                self.errors += 1

    def begin(self, rank: int, made: Submission, waits: bool) -> list[Submission | InBurst]:
        coordinator = self.lab.ranks[rank]
        if self._at_once and waits and self.lab.random.random() < 0.9:
            prepared = AtOnce(self.lab, rank, made)
            if self.lab.random.random() < 0.1:
                prepared.interrupt = self.lab.random.choice(["before", "after"])
            try:
                done = coordinator.at_once.run(prepared, made.sequence, None, None)
            except KeyboardInterrupt:
                outcome = prepared.outcome(coordinator._plan.number, coordinator._plan.plan.ready)
                done = made if outcome is Outcome.NOT_YET else outcome is not None
            if done is True:
                self.done_at_once += 1
                return []
            if done is made:
                return [made]
        if coordinator.collector.expects_bursts and self.lab.random.random() < self._collected:
            count = None if made.sequence == NAMED else lambda label: made.sequence
            address = address_of(made.request)
            burst = coordinator.collector.native.burst
            place = len(burst.parts) if burst is not None else 0
            try:
                taken = coordinator.collector.take(made.request, address, address, None, count)
            except KeyboardInterrupt:
                if burst is None or (burst.is_open and len(burst.parts) == place):  # before anything was done
                    return self.begin(rank, made, waits)
                taken = burst, place
            if taken is not None:
                self.collected += 1
                return [InBurst(*taken)]
        try:
            coordinator.submit(made)
        except KeyboardInterrupt:  # likewise
            return self.begin(rank, made, waits)
        return [made]

    @staticmethod
    def _poll(handle: Submission | InBurst) -> bool:
        try:
            return handle.poll()
        except KeyboardInterrupt:  # which the program survives
            return False

    def _count(self, rank: int) -> int:
        self._counts = getattr(self, "_counts", [0] * len(self.lab.ranks))
        self._counts[rank] += 1
        return self._counts[rank]

    @property
    def plans(self) -> list[int]:
        return [coordinator._plan.number for coordinator in self.lab.ranks]

    @property
    def frozen(self) -> list[bool]:
        return [coordinator._plan.plan is not None for coordinator in self.lab.ranks]

    def freeze(self, step: Sequence[tuple[str, int]]) -> None:
        """Repeat ``step`` until the plan is there; whoever has claimed something too early puts that off."""
        for _ in range(300):
            self.step([step] * len(self.lab.ranks))
            if all(self.frozen):
                return
        raise AssertionError("nothing was frozen")

    def check_order(self) -> None:
        """All ranks have done the same together: what they execute may block."""
        first = self.lab.owners[0].buckets
        assert all(owner.buckets == first for owner in self.lab.owners)
        assert set(self.lab.exchanges.wanted) <= {0, len(self.lab.ranks)}


STEP = [("a", 4), ("?", 4), ("b", 5), ("?", 4), ("|", 0), ("loss", 1)]
