"""Leaders whose links to other nodes are slow, and coordinators whose world ends under them."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from coordinator_lab import Lab, submission
from hvdlite._native import Instant
from hvdlite.coordinator.burst import BURST_S, Burst, KnownBurst
from hvdlite.coordinator.collector import Collector
from hvdlite.coordinator.coordinator import Coordinator
from hvdlite.coordinator.in_flight import InFlight
from hvdlite.coordinator.request import NAMED
from hvdlite.coordinator.submission import Future, Pace
from hvdlite.errors import CollectiveError, ShutDownError
from hvdlite.operations.prepared import prepared_once
from interrupts_lab import interrupted
from job_lab import AtOnce, Job

CHAIN = [(0, 1), (2, 3), (4,)]
END = {"text": "as a test", "own_text": "as a test", "is_final": False, "leaver": None}


@pytest.mark.parametrize(("leader", "claims"), [(0, 0), (2, 1)], ids=["root", "in the middle"])
def test_nobody_begins_what_other_nodes_have_not_been_told(leader: int, claims: int) -> None:
    """A node that executes sends nothing more, and would wait for ever for those that do not know that they shall."""
    lab = Lab(CHAIN, 0, tree_fanout=1)
    submissions = [submission("a") for _ in lab.ranks]
    for rank, made in zip(lab.ranks, submissions, strict=True):
        rank.submit(made)
    tree = lab.trees[leader]
    while tree.sent < claims:
        lab.turn()
    tree.is_full = True
    for _ in range(5000):
        lab.turn()
    began = [bool(owner.buckets) for owner in lab.owners]
    assert began == [rank < leader for rank in range(len(lab.ranks))]
    tree.is_full = False
    lab.settle(submissions)


def test_what_submitting_takes_is_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slow machine would divide for good what a program submits together."""
    now_ns = 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)

    def ring() -> None:
        nonlocal now_ns
        now_ns += 10**6

    lab = Lab([(0, 1)], 0)
    rank = lab.ranks[0]
    rank._pace.__class__ = Pace
    monkeypatch.setattr(lab.pages[0], "ring_self", ring)
    pauses_s = []
    for name in "abc":
        made = submission(name)
        rank._attention.turn()  # as if the thread were quick
        rank.submit(made)
        pauses_s.append(made.pause_s)
        now_ns += 5000
    assert pauses_s == [math.inf, pytest.approx(5e-6), pytest.approx(5e-6)]


def test_nobody_is_woken_for_what_is_always_waited_for_soon() -> None:
    """Unless it is not, this time: whoever polls does none of the work."""
    lab = Lab([(0, 1)], 0)
    Job(lab).freeze([("A", 4), ("|", 0)])
    page, rank = lab.pages[0], lab.ranks[0]
    rank._worker.next_look.at_s = 0.0  # as if the thread had something to look for
    rings = []
    for turn in range(6):
        both = [submission("A", kind="broadcast") for _ in lab.ranks]
        page.hear()
        rank.submit(both[0])
        rings.append(page.is_rung)
        assert page.is_rung or rank.patience_s() <= BURST_S
        if turn == 5:
            both[0].poll()
            assert page.is_rung
        else:
            both[0].ask()
        lab.ranks[1].submit(both[1])
        lab.settle(both)
    assert rings == [True, True, True, False, False, False]


def test_who_asks_once_all_is_gone_wakes_nobody() -> None:
    lab, made = Lab([(0,)], 0), submission("a")
    made.pace = lab.ranks[0]._pace
    made.pace.step(0, made.request)
    made.pace.is_put_off = True
    made.succeed()
    del lab
    gc.collect()
    assert made.poll()


@pytest.mark.parametrize("nodes", [[(0,), (1,)], [(0, 1)], [(0,), (1,), (2,)]])
@pytest.mark.parametrize("times", range(1, 12))
def test_a_rank_that_ends_is_heard_whoever_was_at_work_last(nodes: Sequence[tuple[int, ...]], times: int) -> None:
    """An assistant leaves after any cycle, as what it waits for is done, and nobody rings for what is to follow."""
    for seed in range(20):
        lab = Lab(nodes, seed)
        for _ in range(times):
            made = [submission("a") for _ in lab.ranks]
            for rank, mine in zip(lab.ranks, made, strict=True):
                rank.submit(mine)
            while not all(mine.is_done for mine in made):
                assert lab.turn_of_who_is_awake(), f"they wait for ever, with seed {seed}"
        lab.ranks[-1].announce({"kind": "shutdown", "rank": len(lab.ranks) - 1, **END})
        while not all(rank.has_ended for rank in lab.ranks):
            assert lab.turn_of_who_is_awake(), f"they sleep for ever, with seed {seed}"


def test_what_is_executed_fails_only_once_nobody_touches_its_memory() -> None:
    """Whoever hears of a failure may write to it at once: `elastic.run` restores a state there."""
    lab = Lab([(0,)], 0, fusion_threshold_bytes=0)
    executed, waiting = submission("a"), submission("b")
    (coordinator,), (owner,) = lab.ranks, lab.owners
    reason = ShutDownError("as a test")
    seen: list[tuple[bool, bool]] = []

    def execute(work: object) -> None:
        coordinator.close(reason)
        seen.append((executed.is_done, waiting.is_done))
        raise CollectiveError("a peer is gone")

    owner.execute = execute  # type: ignore[method-assign, assignment]
    owner.coordinator_died = lambda error: None  # type: ignore[method-assign]
    coordinator.submit(executed)
    coordinator.submit(waiting)
    for _ in range(1000):
        lab.turn()
    assert seen == [(False, True)]
    for made in (executed, waiting):
        with pytest.raises(ShutDownError, match="as a test"):
            made.wait()


def test_what_was_executed_has_succeeded_though_all_is_over() -> None:
    lab = Lab([(0,)], 0)
    made = submission("a")
    (coordinator,), (owner,) = lab.ranks, lab.owners
    owner.execute = lambda work: coordinator.close(ShutDownError("as a test")) or "a result"  # type: ignore[assignment]
    coordinator.submit(made)
    lab.settle([made])
    assert made.wait() == "a result"
    with pytest.raises(ShutDownError):
        coordinator.submit(submission("a"))


def test_what_is_interrupted_is_queued_or_can_be_submitted_again() -> None:
    for place in range(100):
        lab, made = Lab([(0,)], 0), submission("a")
        (coordinator,) = lab.ranks
        has_come, _ = interrupted(place, [Coordinator.submit], partial(coordinator.submit, made))
        if has_come and not coordinator._queue:
            coordinator.submit(made)
        lab.settle([made])
        if not has_come:
            assert place > 5
            return
    raise AssertionError("so many places there are not")


def test_what_others_count_on_and_cannot_be_left_ends_the_job() -> None:
    """As a tensor of a GPU that fails while its rank waits for others, who would wait for it."""
    lab = Lab([(0, 1)], 0)
    job = Job(lab, at_once=True)
    coordinator, owner = lab.ranks[0], lab.owners[0]
    while coordinator._plan.free is None:
        job.step([[("a", 4), ("|", 0)]] * 2)
    died: list[BaseException] = []

    def check() -> None:
        raise CollectiveError("what all ranks hear")

    owner.coordinator_died = died.append  # type: ignore[method-assign]
    owner.check = check  # type: ignore[method-assign]
    prepared = AtOnce(lab, 0, submission("a"))
    prepared.submission = fail = Mock(side_effect=RuntimeError("the GPU has failed"))  # type: ignore[method-assign]
    with pytest.raises(CollectiveError, match="what all ranks hear"):
        coordinator.at_once.run(prepared, NAMED, None, None)
    assert fail.called
    assert [str(error) for error in died] == ["the GPU has failed"]
    assert coordinator.has_ended


class Recipient:
    """Of what one collector has collected."""

    position = 0

    def __init__(self) -> None:
        shortcut = Lab([(0,)], 0).ranks[0].at_once.shortcut
        self.collector = Collector(InFlight(), lambda future: None, Pace(), self, shortcut, Instant(0.0), lambda: 0.0)
        self.queue: list[Future] = []

    def settle_started(self) -> None:
        pass

    def take_over(self, made: Sequence[Future], *, background: bool = True) -> None:
        self.collector.handed_over()
        self.queue.extend(made)

    def begin(self, burst: Burst) -> None:
        raise AssertionError("it is not complete")

    def look_within(self, seconds: float) -> None:
        pass


def test_what_was_collected_is_handed_over_once_though_an_interrupt_comes() -> None:
    for place in itertools.count():
        requests = [submission(name).request for name in "abc"]
        recipient = Recipient()
        collector = recipient.collector
        collector.follow({0: KnownBurst([(request, NAMED) for request in requests], 0)})
        for request in requests[:2]:
            assert collector.take(request, 0, 0, None, None) is not None
        at = [Collector.take_apart, Collector.interrupt, Burst.apart, Recipient.take_over]
        has_come, _ = interrupted(place, at, collector.take_apart)
        collector.take_apart()
        assert [getattr(made, "label", "") for made in recipient.queue] == ["a", "b"], place
        if not has_come:
            assert place > 5
            return


def test_what_is_being_prepared_while_settings_change_is_forgotten_as_well() -> None:
    """Another thread than the one that prepares it takes the new ones over."""
    (rank,) = Lab([(0,)], 0).ranks
    group: Any = SimpleNamespace(world=SimpleNamespace(coordinator=rank))
    made: list[Any] = [SimpleNamespace(is_valid=True) for _ in range(2)]

    def make() -> Any:
        rank.at_once.forget()
        return made[0]

    assert prepared_once(group, "a", make) is made[0]
    assert prepared_once(group, "a", lambda: made[1]) is made[1]
    assert prepared_once(group, "a", make) is made[1]
