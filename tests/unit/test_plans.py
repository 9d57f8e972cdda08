"""When an order repeats itself, and what becomes of operations that are a plan; no rank is simulated here."""

from __future__ import annotations

import weakref
from math import inf

import pytest

from coordinator_lab import submission, with_bursts
from hvdlite.coordinator.burst import Burst, KnownBurst
from hvdlite.coordinator.frozen_plan import FrozenPlan
from hvdlite.coordinator.messages import PlanMessage, Response, Verb
from hvdlite.coordinator.order_watch import OrderWatch
from hvdlite.coordinator.plan_leader import PlanLeader
from hvdlite.coordinator.plan_member import PlanMember
from hvdlite.coordinator.request import NAMED
from hvdlite.coordinator.submission import Submission


def period_of(names: str) -> int:
    watch = OrderWatch(longest=10)
    for name in names:
        watch.saw(Response(submission(name).request, NAMED))
    return watch.period()


@pytest.mark.parametrize(
    ("names", "period"),
    [
        ("", 0), ("a", 0), ("aa", 0), ("aaa", 0), ("aaaa", 1), ("abab", 0), ("ababab", 0), ("abababa", 2),
        ("abac" * 3 + "ab", 4), ("xyz" + "abc" * 4, 3), ("abcabcabcx", 0), ("abcabcabx" + "abc" * 4, 3),
        ("abcdefghijk" * 5, 0),
    ],
)  # fmt: skip
def test_what_repeats_is_found(names: str, period: int) -> None:
    assert period_of(names) == period


def test_what_does_not_repeat_is_never_frozen() -> None:
    watch = OrderWatch(longest=10)
    for _ in range(20):
        watch.saw(Response(submission("a", kind="allocate").request, NAMED))
        watch.saw(Response(submission("b").request, NAMED))
        assert watch.period() == 0


def test_names_that_never_come_again_are_forgotten() -> None:
    watch = OrderWatch(longest=10)
    for step in range(100):
        watch.saw(Response(submission(f"step {step}").request, NAMED))
        assert watch.length <= 20
    for _ in range(4):
        for name in "abc":
            watch.saw(Response(submission(name).request, NAMED))
    assert watch.period() == 3


def test_who_was_wrong_waits_longer() -> None:
    watch = OrderWatch(longest=10)

    def found_after() -> int:
        for count in range(1, 1000):
            watch.saw(Response(submission("a").request, NAMED))
            if watch.period():
                return count
        raise AssertionError

    first = found_after()
    waits = []
    for count in (0, 3, 9):  # of four operations, none of them has ended when a period did
        watch.broken(count, period=4)
        waits.append(found_after())
    assert first < waits[0] < waits[1] < waits[2]
    watch.broken(100, period=1)
    watch.forget()
    assert found_after() == first


@pytest.mark.parametrize("count", [4, 9, 10])
def test_who_goes_on_to_something_else_waits_no_longer(count: int) -> None:
    """When a period of four has ended, or after as many as it took to find it."""
    watch = OrderWatch(longest=10)
    assert seen(watch, "abcd" * 4) == 13
    watch.broken(count, period=4)
    assert seen(watch, "vw" * 4) == 7


def seen(watch: OrderWatch, names: str) -> int:
    """How many of ``names`` until there is a period, which is then frozen; 0: there was none."""
    for count, name in enumerate(names, start=1):
        watch.saw(Response(submission(name).request, NAMED))
        if watch.period():
            watch.freeze(watch.period(), ())
            return count
    return 0


def test_an_order_that_was_frozen_is_known_when_it_comes_again() -> None:
    """Wherever it begins; what is new has to repeat itself."""
    watch = OrderWatch(longest=10)
    assert seen(watch, "abcabcabcabc") == 10
    watch.broken(100, period=1)
    assert seen(watch, "vwvwvwvw") == 7
    watch.broken(100, period=1)
    assert seen(watch, "abcabc") == 3
    watch.broken(100, period=1)
    assert seen(watch, "wvwv") == 2
    watch.broken(100, period=1)
    assert seen(watch, "xcab") == 4
    watch.broken(100, period=1)
    assert seen(watch, "cbacbacba") == 0  # another order


def test_an_order_that_was_frozen_in_vain_twice_is_forgotten() -> None:
    watch = OrderWatch(longest=10)
    assert seen(watch, "ababab" * 2) == 7
    watch.broken(100, period=1)
    for _ in range(2):
        assert seen(watch, "abab") == 2
        watch.broken(0, period=2)
    assert seen(watch, "ababab") == 0


def test_only_so_many_orders_are_remembered() -> None:
    watch = OrderWatch(longest=10)
    for name in "abcdefghi":
        assert seen(watch, name * 5) == 4
        watch.broken(100, period=1)
    assert seen(watch, "bbb") == 1
    watch.broken(100, period=1)
    assert seen(watch, "aaa") == 0


@pytest.mark.parametrize(("count", "next_period"), [(100, 2), (3, 0)])
def test_what_has_repeated_itself_beside_a_plan_is_the_next_unless_the_plan_was_a_mistake(
    count: int, next_period: int
) -> None:
    watch = OrderWatch(longest=10)
    for name in "abababa":
        watch.saw(Response(submission(name).request, NAMED))
    watch.broken(count, period=2)
    assert watch.period() == next_period


@pytest.mark.parametrize("told_first", [True, False])
def test_an_order_that_changes_on_purpose_is_found_again_at_once(told_first: bool) -> None:
    watch = OrderWatch(longest=10)
    configure = Response(submission("settings", kind="configure").request, 0)
    for count in (40, 5, 0, 5):  # however short the plan was
        if told_first:
            watch.saw(configure)
        watch.broken(count, period=2)
        if not told_first:
            watch.saw(configure)
        for name in "abababa":
            watch.saw(Response(submission(name).request, NAMED))
        assert watch.period() == 2


def test_settings_that_change_end_a_plan() -> None:
    entry = submission("a")
    plan = FrozenPlan([(entry.request, entry.sequence)])
    assert plan.contradicts(submission("settings", kind="configure"))


def test_a_plan_counts_in_its_own_order() -> None:
    entries = [submission(name, sequence=at) for name, at in [("a", NAMED), ("u", 7), ("b", NAMED), ("u", 8)]]
    plan = FrozenPlan([(entry.request, entry.sequence) for entry in entries])
    assert plan.offer(submission("b"))
    assert (plan.ready, plan.waits, plan.has_gap) == (0, True, True)
    assert not plan.offer(submission("u", sequence=10))  # 9 is next
    assert not plan.offer(submission("c"))
    assert not plan.offer(submission("a", numel=5))
    assert plan.contradicts(submission("a", numel=5)) and not plan.contradicts(submission("c"))
    assert plan.offer(submission("a"))
    assert plan.offer(submission("u", sequence=9))
    assert (plan.ready, plan.has_gap) == (3, False)
    assert [response.key for response in plan.take(2)] == [("a", NAMED), ("u", 9)]
    assert plan.offer(submission("a"))  # of the next period
    assert [left.key for left in plan.leftovers()] == [("b", NAMED), ("a", NAMED)]
    assert plan.offer(submission("u", sequence=10))
    assert plan.offer(submission("u", sequence=11))
    assert plan.ready == 6


@pytest.mark.parametrize("verb", [Verb.FREEZE, Verb.RELEASE])
def test_a_plan_that_runs_free_takes_nothing_while_it_is_held_and_fuses_only_bursts_at_its_end(verb: Verb) -> None:
    """Other ranks may have done what is left one by one, or may not have been told that it will not be done."""
    member = PlanMember(longest=10, patience_s=1.0)
    for name in "abc":
        member.logged(Response(submission(name).request, NAMED), 0.0)
    member.obey(PlanMessage(Verb.HOLD), 0.0)
    runs_free = verb is Verb.RELEASE
    member.obey(PlanMessage(verb, 3, places=(0, 1) if runs_free else ()), 0.0)
    assert (member.free is not None) == runs_free
    for name in "abca":
        assert member.admit(submission(name), 0.0)
    member.obey(PlanMessage(Verb.HOLD), 0.0)
    assert member.free is None
    reaction = member.obey(PlanMessage(Verb.END, 4), 0.0)
    assert [len(batch) for batch in reaction.batches] == ([1, 2, 1] if runs_free else [4])
    assert reaction.withdraws == runs_free


def test_a_burst_is_told_and_done_once_all_of_it_is_there() -> None:
    member = with_bursts(2, 3)
    plan = member.plan
    assert plan is not None
    told = []
    for name in "abcdeab":
        assert member.admit(submission(name), 0.0)
        told.append(plan.tellable)
    assert told == [0, 2, 2, 2, 5, 5, 7]
    assert not [*member.due(1, 0.0)]
    assert [[response.request.name for response in burst] for burst in member.due(6, 0.0)] == [
        ["a", "b"],
        ["c", "d", "e"],
    ]
    assert plan.done == 5


@pytest.mark.parametrize("how", ["wait", "poll", "time"])
def test_who_waits_in_the_middle_of_a_burst_ends_the_plan(how: str) -> None:
    member = with_bursts(2, 3)
    made = [submission(name) for name in "abcd"]
    for each in made:
        assert member.admit(each, 0.0)
    made[0].is_awaited = True  # of a burst which is complete: others are late
    assert member.complaint(0.0) is None and member.patience_s(0.0) > 0
    if how == "wait":
        made[2].assist = lambda submission: submission.succeed()
        made[2].wait()
    elif how == "poll":
        assert not made[3].poll()
    assert member.complaint(1.0 if how == "time" else 0.0) == PlanMessage(Verb.BREAK, 4)
    assert member.complaint(2.0) is None  # once


def test_a_burst_that_is_done_keeps_no_memory_alive() -> None:
    """Who keeps the handle of one of its operations would keep the tensors of all."""

    class Memory:
        pass

    made = [submission(name) for name in "ab"]
    burst = Burst(KnownBurst([(each.request, NAMED) for each in made], 2), 0, inf, lambda: None)
    memory = [Memory() for _ in made]
    burst.parts += [(0, 0, NAMED, own) for own in memory]
    alive = [weakref.ref(own) for own in memory]
    burst.succeed()
    del memory
    assert [own() for own in alive] == [None, None]
    burst.wait(1)


def burst_of(plan: FrozenPlan, first: int) -> Burst:
    """What begins at place ``first`` of the plan, complete."""
    known = plan.known_bursts[first]
    burst = Burst(known, 0, inf, lambda: None)
    burst.parts += [(0, 0, NAMED, None) for _ in known.requests]
    return burst


def test_a_burst_is_taken_only_where_it_comes_next() -> None:
    plan = with_bursts(2, 3).plan
    assert plan is not None
    assert not plan.offer_burst(burst_of(plan, 2))
    assert plan.offer_burst(burst_of(plan, 0))
    assert plan.offer(submission("d"))  # before c
    assert not plan.offer_burst(burst_of(plan, 2))
    assert plan.offer(submission("c"))
    assert not plan.offer_burst(burst_of(plan, 2))  # two of its operations are there
    assert plan.offer(submission("e"))
    assert plan.offer_burst(burst_of(plan, 0)) and plan.ready == 7
    assert [type(batch) for batch in plan.take_bursts(7)] == [Burst, list, Burst]


@pytest.mark.parametrize("how", ["wait", "poll"])
def test_who_asks_for_a_burst_that_is_open_has_it_taken_apart(how: str) -> None:
    made = [submission(name) for name in "ab"]
    parts: list[Submission] = []
    burst = Burst(KnownBurst([(each.request, NAMED) for each in made], 2), 0, inf, lambda: parts.extend(burst.apart()))
    burst.assist = lambda future: future.succeed()  # type: ignore[attr-defined]
    burst.parts.append((0, 0, NAMED, None))
    if how == "wait":
        burst.wait(0)
    else:
        assert not burst.poll(0)
    assert [part.is_done for part in parts] == [how == "wait"]


def test_nothing_is_done_alone_in_a_burst() -> None:
    plan = with_bursts(1, 2).plan
    assert plan is not None
    a, b = submission("a"), submission("b")
    assert plan.begin_next(a.request, NAMED)
    plan.done = plan.ready
    assert not plan.begin_next(b.request, NAMED)


def test_what_comes_next_is_begun_once_all_before_is_done() -> None:
    a, b = submission("a"), submission("b")
    plan = FrozenPlan([(entry.request, entry.sequence) for entry in (a, b)])
    assert not plan.begin_next(b.request, NAMED)
    assert plan.begin_next(a.request, NAMED)
    assert not plan.begin_next(b.request, NAMED)  # a is under way
    plan.done = plan.ready
    assert plan.begin_next(b.request, NAMED)


@pytest.mark.parametrize("bursts", [None, (0, 1)])
def test_the_root_says_in_which_bursts_a_plan_runs_free(bursts: tuple[int, ...] | None) -> None:
    leader = PlanLeader([(0,)], [], OrderWatch(longest=10), own=[(0,)], bursts=lambda found: bursts)
    for name in "abc" * 4:
        leader.saw(Response(submission(name).request, NAMED))
    assert leader.propose(is_idle=True) == PlanMessage(Verb.HOLD, 3)
    expected = PlanMessage(Verb.FREEZE, 3) if bursts is None else PlanMessage(Verb.RELEASE, 3, places=bursts)
    assert leader.hear(PlanMessage(Verb.HELD, 0), (0,), is_idle=True) == expected
