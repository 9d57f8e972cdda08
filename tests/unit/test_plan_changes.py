"""How ranks change from one frozen order to another without the log: what each wants, and whether all want the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from coordinator_lab import submission
from hvdlite import _native
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.frozen_plan import FrozenPlan
from hvdlite.coordinator.messages import PlanMessage, Response, Verb
from hvdlite.coordinator.order_watch import OrderWatch
from hvdlite.coordinator.plan_leader import PlanLeader
from hvdlite.coordinator.plan_member import PlanMember, Wish
from hvdlite.coordinator.readiness import ReadinessInNode
from hvdlite.coordinator.request import NAMED
from thread_comm import ThreadComm, on_ranks

LINE = 64


def freeze(member: PlanMember, order: str, bursts: Sequence[int] = (), numbers: dict[str, int] | None = None) -> None:
    """``order``, done once; "u" has no name, and is numbered."""
    for name in order:
        sequence = NAMED
        if name == "u":
            assert numbers is not None
            sequence = numbers["u"] = numbers.get("u", -1) + 1
        member.logged(Response(submission(name, sequence=sequence).request, sequence), 0.0)
    member.obey(PlanMessage(Verb.HOLD), 0.0)
    member.obey(PlanMessage(Verb.RELEASE, len(order), places=tuple(bursts or range(len(order)))), 0.0)


def do(member: PlanMember, names: str, numbers: dict[str, int] | None = None) -> None:
    """What comes next, one at a time."""
    plan = member.plan
    assert plan is not None
    for name in names:
        sequence = NAMED
        if name == "u":
            assert numbers is not None
            sequence = numbers["u"] = numbers["u"] + 1
        assert plan.begin_next(submission(name, sequence=sequence).request, sequence), name
        plan.done = plan.told = plan.ready


def end(member: PlanMember) -> None:
    assert member.plan is not None
    member.obey(PlanMessage(Verb.HOLD), 0.0)
    member.obey(PlanMessage(Verb.END, member.plan.done), 0.0)


def wanted(member: PlanMember, name: str) -> Wish | None:
    return member.wish(submission(name).request)


@pytest.fixture
def member() -> PlanMember:
    """Plan 1 was abc, for two periods; plan 2 is xyz."""
    made = PlanMember(longest=10, patience_s=1.0)
    freeze(made, "abc")
    do(made, "abcabc")
    end(made)
    freeze(made, "xyz")
    do(made, "xy")
    return made


def test_an_earlier_order_is_wanted_where_it_begins_and_ends(member: PlanMember) -> None:
    assert wanted(member, "a") == Wish(1, 0)
    assert wanted(member, "b") == Wish(1, 1)
    assert wanted(member, "z") is None  # comes next
    assert wanted(member, "x") is None  # the order is wrong perhaps
    assert wanted(member, "other") is None
    member.change(Wish(1, 1), 0.0)
    assert member.number == 3
    do(member, "bcabca")
    assert wanted(member, "x") is None  # was done less than twice
    end(member)
    assert wanted(member, "x") is None


def test_two_orders_in_turns_are_the_same_two_plans(member: PlanMember) -> None:
    do(member, "zxy")
    member.change(Wish(1, 0), 0.0)
    seen = [member.plan]
    for number in range(4, 12):
        assert member.admit(submission("a" if number % 2 == 0 else "x"), 0.0)
        assert [*member.due(1, 0.0)]
        do(member, "bcabca" if number % 2 == 0 else "yzxyzxy")
        wish = wanted(member, "x" if number % 2 == 0 else "a")
        assert wish is not None and wish.plan == number - 2
        member.change(wish, 0.0)
        assert member.number == number
        seen.append(member.plan)
    assert len({id(plan) for plan in seen}) == 2


def test_nothing_is_wanted_while_something_is_under_way(member: PlanMember) -> None:
    do(member, "zxyz")
    assert member.admit(submission("x"), 0.0)
    assert wanted(member, "a") is None
    assert [*member.due(7, 0.0)]
    assert wanted(member, "a") == Wish(1, 0)
    member.obey(PlanMessage(Verb.HOLD), 0.0)
    assert wanted(member, "a") is None


def test_the_order_that_is_done_is_not_wanted_begun_elsewhere(member: PlanMember) -> None:
    """What comes out of place in it may be all there is to come."""
    do(member, "zxyz")
    member.change(Wish(1, 1), 0.0)
    do(member, "bcabc")
    assert [wanted(member, name) for name in "bc"] == [None, None]
    assert wanted(member, "x") == Wish(2, 0)


def test_who_has_asked_for_the_end_of_the_plan_wants_no_other(member: PlanMember) -> None:
    do(member, "z")
    member.admit(submission("x", numel=5), 0.0)
    assert member.complaint(0.0) is not None
    assert wanted(member, "a") is None


def test_an_order_that_was_given_up_at_once_is_not_wanted_again(member: PlanMember) -> None:
    do(member, "zxyz")
    member.change(Wish(1, 0), 0.0)
    do(member, "ab")
    end(member)
    freeze(member, "pq")
    do(member, "pqpq")
    assert wanted(member, "x") == Wish(2, 0)
    assert wanted(member, "a") is None


def test_the_latest_order_counts(member: PlanMember) -> None:
    do(member, "zxyz")
    end(member)
    freeze(member, "ax")
    do(member, "axaxa")
    assert wanted(member, "b") == Wish(1, 1)
    end(member)
    freeze(member, "m")
    assert wanted(member, "a") == Wish(3, 0)
    assert wanted(member, "x") == Wish(3, 1)
    assert wanted(member, "z") == Wish(2, 2)


def test_an_operation_that_is_no_beginning_is_not_wanted() -> None:
    """One that comes twice, or in a burst of several."""
    member = PlanMember(longest=10, patience_s=1.0)
    freeze(member, "abbcde", bursts=(0, 1, 2, 3, 5))
    do(member, "abb")
    plan = member.plan
    assert plan is not None
    for name in "cdeabb":
        assert member.admit(submission(name), 0.0)
    assert [*member.due(9, 0.0)]
    end(member)
    freeze(member, "xy")
    assert [wanted(member, name) for name in "bcd"] == [None] * 3
    assert wanted(member, "e") == Wish(1, 5)
    member.change(Wish(1, 5), 0.0)
    assert isinstance(member.plan, FrozenPlan)
    assert [*member.plan.known_bursts] == [4]
    do(member, "eabb")


def test_unnamed_operations_go_on_counting() -> None:
    member, numbers = PlanMember(longest=10, patience_s=1.0), {"u": -1}
    freeze(member, "auu", numbers=numbers)
    do(member, "auuauu", numbers)
    end(member)
    freeze(member, "ux", numbers=numbers)
    do(member, "uxuxu", numbers)
    member.change(Wish(1, 0), 0.0)
    do(member, "auuau", numbers)
    member.change(Wish(2, 1), 0.0)
    do(member, "xuxu", numbers)


def watched(watch: OrderWatch, order: str, number: int) -> None:
    for name in order * 4:
        watch.saw(Response(submission(name).request, NAMED))
    watch.freeze(len(order), ())
    watch.opened(number)


def test_the_root_follows_and_remembers() -> None:
    """What ends after a change is the order that it was for; and it begins where that began."""
    watch = OrderWatch(longest=10)
    leader = PlanLeader([(0,)], [], watch, own=[(0,)], bursts=lambda found: range(len(found.requests)))
    for number, order in enumerate(("abc", "xyz"), 1):
        for name in order * 4:
            leader.saw(Response(submission(name).request, NAMED))
        assert leader.propose(is_idle=True) is not None
        leader.obey(PlanMessage(Verb.HOLD))
        released = leader.hear(PlanMessage(Verb.HELD), (0,), is_idle=True)
        assert released is not None and released.verb is Verb.RELEASE
        leader.obey(released)
        if number == 1:
            assert leader.make_room() is not None
            leader.obey(PlanMessage(Verb.HOLD))
            ended = leader.hear(PlanMessage(Verb.HELD, 12), (0,), is_idle=True)
            assert ended == PlanMessage(Verb.END, 12)
            leader.obey(ended)
    leader.changed(Wish(1, 1), done=9, period=3)
    assert (leader.number, leader.is_open, leader.runs_free) == (3, True, True)
    assert leader.make_room() is not None
    leader.obey(PlanMessage(Verb.HOLD))
    claimed = [submission("y").request]
    reopened = leader.hear(PlanMessage(Verb.HELD, 6), (0,), True, lambda: claimed)
    assert reopened == PlanMessage(Verb.REOPEN, 6, places=(0, 1, 2), plan=2, first=1)
    leader.obey(reopened)
    assert leader.make_room() is not None
    leader.obey(PlanMessage(Verb.HOLD))
    claimed = [submission("a").request]
    reopened = leader.hear(PlanMessage(Verb.HELD, 6), (0,), True, lambda: claimed)
    assert reopened is not None and (reopened.plan, reopened.first) == (3, 2)  # plan 3 was bca


def test_the_root_knows_where_an_order_began_that_began_elsewhere_before() -> None:
    watch = OrderWatch(longest=10)
    watched(watch, "abc", 1)
    for number, first in ((2, 1), (3, 1)):  # bca, cab
        watch.broken(12, 3)
        watch.resumed(number - 1, first)
        watch.opened(number)
    watch.broken(12, 3)
    watched(watch, "xyz", 4)
    watch.broken(12, 3)
    reopened = watch.reopen([submission("a").request], 0)
    assert reopened is not None and (reopened.number, reopened.first) == (3, 1)


def test_the_root_may_have_forgotten_the_order() -> None:
    watch = OrderWatch(longest=10)
    watched(watch, "abc", 1)
    watch.broken(12, 3)
    watch.resumed(7, 0)
    watch.opened(8)
    watch.waited(1)
    watch.broken(12, 3)
    assert watch.reopen([submission("a").request], 0) is not None


class Node:
    """Shared memory of threads that are ranks."""

    def __init__(self, size: int) -> None:
        self._memory = np.zeros((2 * size + 1) * LINE, np.uint8)
        self._size = size
        self._address = -self._memory.ctypes.data % LINE + self._memory.ctypes.data

    def counts(self, rank: int) -> _native.ReadyCounts:
        return _native.ReadyCounts(self._address, self._address + self._size * LINE, rank, self._size)

    def bell(self, rank: int) -> int:
        return self._address + (self._size + rank) * LINE


@pytest.mark.parametrize("first", [1, (1 << 20) - 150, (1 << 40) - 150])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("spin_us", [0, 50])
def test_all_ranks_find_the_same(size: int, spin_us: int, first: int) -> None:
    """Whatever they want, and whoever is rung, late, or goes on; where all want the same and nobody is, they agree.

    Also where numbers of plans, of which counts have 20 bits and wishes 40, wrap.
    """
    node, rounds = Node(size), 300
    draw = random.Random(size)
    kinds = [draw.choice(["agree", "agree", "differ", "ring", "late", "ahead"]) for _ in range(rounds)]
    odd = [draw.randrange(size) for _ in range(rounds)]

    def work(comm: ThreadComm) -> list[bool]:
        counts, bell, found = node.counts(comm.rank), node.bell(comm.rank), []
        for number, (kind, other) in enumerate(zip(kinds, odd, strict=True), first):
            is_odd = other == comm.rank
            counts.set(number, 5)
            comm.allgather(None)
            assert counts.all(number) == 5
            heard = _native.load32(bell)
            if is_odd and kind == "ring":
                _native.doorbell_ring(bell)
            if is_odd and kind == "ahead":
                counts.set(number, 6)
                found.append(False)
            elif is_odd and kind == "late":
                assert not counts.wait(number, 6, heard, 0.02, 0)
                found.append(counts.agree(number, 3, _native.load32(bell), 10.0, spin_us))
            else:
                wish = 4 if kind == "differ" and is_odd else 3
                found.append(counts.agree(number, wish, heard, 10.0 if kind in ("agree", "differ") else 0.01, spin_us))
            comm.allgather(None)
        return found

    verdicts = on_ranks(size, work, timeout_s=60.0)
    for number, kind in enumerate(kinds):
        told = {verdict[number] for verdict in verdicts}
        assert len(told) == 1, (number, kind, told)
        if kind == "agree":
            assert told == {True}, number
        if size > 1 and kind in ("differ", "ahead"):
            assert told == {False}, number


def test_who_comes_when_it_is_decided_finds_the_same() -> None:
    node = Node(2)
    first, second = node.counts(0), node.counts(1)
    assert not first.agree(1, 3, 0, 0.0, 0)
    assert not second.agree(1, 3, 0, 10.0, 0)
    assert not first.agree(1, 3, 0, 10.0, 0)


def test_a_wish_says_which_plan_and_where() -> None:
    wishes: list[int] = []

    class Page(ControlPage):
        def __init__(self) -> None:
            pass

        def agree(self, plan: int, wish: int, heard: int, timeout_s: float, spin_us: int) -> bool:
            wishes.append(wish)
            return True

    readiness = ReadinessInNode(Page(), lambda: 0, 0)
    most = 1 << 18
    assert readiness.agree(100, Wish(37, most - 1), 0) and readiness.agree(100, Wish(99, 0), 0)
    assert not readiness.agree(100, Wish(99, most), 0)
    assert len({*wishes}) == 2 and max(wishes) < 1 << _native.ReadyCounts.NEXT_BITS
