"""Where ranks wait or pause in an order: how long a plan is, and where its bursts end; no rank is simulated here."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

import pytest

from coordinator_lab import submission, with_bursts
from hvdlite.coordinator.messages import TOO_SHORT, PlanMessage, Response, Verb
from hvdlite.coordinator.order_watch import Found, OrderWatch
from hvdlite.coordinator.plan_leader import PlanLeader
from hvdlite.coordinator.plan_member import PlanMember
from hvdlite.coordinator.request import NAMED
from hvdlite.coordinator.submission import Pace, Submission


@pytest.mark.parametrize(
    ("pauses", "places"),
    [
        (["000", "000", "000"], ()), (["0x0"], (1,)), (["x00", "000", "000", "000"], ()),  # long ago
        (["x00", "0x0", "000"], (0, 1)), (["111", "1x0", "110"], (0, 1)),  # waited once; or always slow
        # With something else in between: slow once; always slow; waited now; waited before that.
        (["000", "000", "o", "111"], ()), (["101", "100", "o", "110"], (0,)),
        (["000", "o", "1x1"], (1,)), (["0x0", "o", "000"], ()),
    ],
)  # fmt: skip
def test_ranks_say_where_they_have_paused(pauses: list[str], places: tuple[int, ...]) -> None:
    member = PlanMember(longest=3, patience_s=1.0)
    member.logged(Response(submission("other").request, NAMED), inf)
    for period in pauses:
        for name, pause in [("other", "x")] if period == "o" else zip("abc", period, strict=True):
            member.logged(Response(submission(name).request, NAMED), inf if pause == "x" else float(pause))
    assert member.obey(PlanMessage(Verb.HOLD, 3), 0.0).answer == PlanMessage(Verb.HELD, places=places)


@pytest.mark.parametrize(
    ("waits", "period", "times"),
    [
        ("", 1, 0), ("x", 1, 0), ("xx", 1, 0), ("xxx", 1, 1), ("x..x..x..", 1, 3), ("x..x..x.", 1, 0),
        ("..x..x..x", 1, 3), ("x..x..x..", 3, 3), ("xx.xx.xx.", 1, 3), ("x..x.x..x.", 1, 0),
        ("x..x.x..x.x..x.", 1, 5), ("x...x...x...", 2, 4), ("x..x..x..", 2, 0), (6 * "x..", 2, 6),
        ("xxxxxx..x..x..", 1, 3), ("x.x..x...x....", 1, 0), (35 * ".", 1, 0), (36 * ".", 1, 1),
        ("x.x..x...x....x.....x......x........", 1, 1), (3 * "x...........", 1, 12), (3 * "x............", 1, 1),
    ],
)  # fmt: skip
def test_equal_operations_that_are_submitted_together_are_one_period(waits: str, period: int, times: int) -> None:
    member = PlanMember(longest=12, patience_s=1.0)
    member.logged(Response(submission("other").request, NAMED), inf)
    for number, wait in enumerate(waits):
        member.logged(Response(submission("abc"[number % period]).request, NAMED), inf if wait == "x" else 0.0)
    assert member.rhythm(period, len(waits)) == times


@pytest.mark.parametrize(
    ("waits", "says"), [("x", False), ("x.", True), ("x...", True), ("xx.", False), (1000 * "x" + 500 * "x.", True)]
)
def test_a_plan_that_is_begun_again_without_a_wait_could_be_longer(waits: str, says: bool) -> None:
    member = with_bursts(1)
    said: list[PlanMessage] = []
    for number in range(max(200, len(waits))):
        made = submission("a")
        made.pause_s = inf if waits[number % len(waits)] == "x" else 0.0
        assert member.admit(made, 0.0)
        assert len([*member.due(number + 1, 0.0)]) == 1
        complaint = member.complaint(0.0)
        said += [complaint] if complaint is not None else []
    assert said == [PlanMessage(Verb.BREAK, TOO_SHORT)] * says  # once


@pytest.mark.parametrize(
    ("together", "waited", "says"), [(63, 0, False), (64, 0, True), (64, 85, True), (64, 90, False), (0, 10**9, False)]
)
def test_periods_that_others_have_begun_count_too(together: int, waited: int, says: bool) -> None:
    member = with_bursts(1)
    member.count_periods(together, waited)
    assert member.could_be_longer == says
    assert member.complaint(0.0) == (PlanMessage(Verb.BREAK, TOO_SHORT) if says else None)
    assert not member.could_be_longer  # this rank has said so


def test_what_could_be_longer_is_looked_at_once_unless_something_is_found() -> None:
    times = 0
    watch = OrderWatch(longest=10, rhythm=lambda period, length: period * times)
    leader = PlanLeader([(0,)], [], watch, own=[(0,)], bursts=lambda found: range(len(found.requests)))

    def is_held_as_too_short() -> bool:
        message = leader.hear(PlanMessage(Verb.BREAK, TOO_SHORT), (0,), is_idle=True)
        if message is None:
            return False
        leader.obey(message)
        end = leader.hear(PlanMessage(Verb.HELD, 100), (0,), is_idle=True)
        assert end == PlanMessage(Verb.END, 100)
        leader.obey(end)
        return True

    def freeze() -> int:
        for _ in range(7):
            leader.saw(Response(submission("a").request, NAMED))
        hold = leader.propose(is_idle=True)
        assert hold is not None
        leader.obey(hold)
        frozen = leader.hear(PlanMessage(Verb.HELD), (0,), is_idle=True)
        assert frozen is not None
        leader.obey(frozen)
        return frozen.count

    times = 1
    assert freeze() == 1
    assert is_held_as_too_short()
    for _ in range(7):
        leader.saw(Response(submission("a").request, NAMED))
    times = 0
    assert leader.propose(is_idle=True) is None  # nor as an order that was frozen before
    times = 1
    assert freeze() == 1
    assert not is_held_as_too_short()
    leader.obey(leader.make_room() or PlanMessage(Verb.HOLD))
    leader.obey(leader.hear(PlanMessage(Verb.HELD, 1), (0,), is_idle=True) or PlanMessage(Verb.END))
    times = 3
    assert freeze() == 3
    assert is_held_as_too_short()  # it may be more by now
    times = 1
    assert freeze() == 1
    assert is_held_as_too_short()


def test_a_period_is_looked_for_as_often_as_it_comes_without_a_wait() -> None:
    rhythm = 0
    watch = OrderWatch(longest=10, rhythm=lambda period, length: period * rhythm)
    for _ in range(7):
        watch.saw(Response(submission("a").request, NAMED))
    assert watch.period() == 0  # not known yet
    rhythm = 3
    assert watch.period() == 3
    found = watch.freeze(3, [1])
    assert (len(found.requests), found.after_pause) == (3, [1])
    for _ in range(3):
        watch.saw(Response(submission("a").request, NAMED))
    assert watch.period() == 0  # it may come more or less often the next time


def test_pauses_of_all_ranks_count_where_they_were() -> None:
    """Also if something was done between the moment when ranks were asked, and the last answer."""
    found: list[Found] = []
    watch = OrderWatch(longest=10)
    leader = PlanLeader([(0,), (1,)], [], watch, own=[(0,), (1,)], bursts=lambda one: found.append(one) or (0,))  # type: ignore[func-returns-value]
    order = "abcdefg"
    for name in order * 4:
        leader.saw(Response(submission(name).request, NAMED))
    assert leader.propose(is_idle=True) == PlanMessage(Verb.HOLD, 7)
    leader.obey(PlanMessage(Verb.HOLD, 7))
    assert leader.hear(PlanMessage(Verb.HELD, places=(0, 2)), (0,), is_idle=True) is None
    for name in "ab":
        leader.saw(Response(submission(name).request, NAMED))
    leader.hear(PlanMessage(Verb.HELD, places=(2, 4)), (1,), is_idle=True)
    assert [request.name for request in found[0].requests] == [*"cdefgab"]
    assert {order[place] for place in (0, 2, 4)} == {found[0].requests[place].name for place in found[0].after_pause}


def test_where_somebody_has_waited_a_burst_begins_the_next_time_wherever_the_order_does() -> None:
    watch = OrderWatch(longest=10)
    for name in "abcd" * 4:
        watch.saw(Response(submission(name).request, NAMED))
    assert not watch.freeze(watch.period(), ()).after_pause
    watch.waited(2)
    watch.broken(100, period=1)
    for name in "bcda":
        watch.saw(Response(submission(name).request, NAMED))
    assert watch.freeze(watch.period(), [3]).after_pause == {1, 3}


def test_what_comes_after_a_pause() -> None:
    pace = Pace()
    assert pace.step(10**9) == inf
    assert pace.step(10**9 + 1000) == pytest.approx(1e-6)
    made = submission("a")
    made.pace = pace
    made.succeed()
    made.wait()
    assert pace.step(10**9 + 2000) == inf
    assert pace.step(10**9 + 3000) == pytest.approx(1e-6)
    made.poll()
    assert pace.step(10**9 + 4000) == inf
    assert pace.step(2 * 10**9 + 4000) == pytest.approx(1.0)


def test_what_is_followed_soon() -> None:
    pace, request, now_ns = Pace(), submission("a").request, 0

    def submit_and(ask: Callable[[Submission], object] | None, after_us: int) -> bool:
        nonlocal now_ns
        now_ns += 10**9
        made = submission("a")
        made.pace = pace
        pace.step(now_ns, request)
        now_ns += after_us * 1000
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "monotonic_ns", lambda: now_ns)
            if ask is None:
                pace.step(now_ns)
            else:
                ask(made)
        return pace.is_followed_soon(request)

    assert [submit_and(Submission.ask, 100) for _ in range(4)] == [False, False, True, True]
    assert [submit_and(Submission.ask, 101), *(submit_and(None, 50) for _ in range(3))] == [False, False, False, True]
    assert [submit_and(Submission.poll, 50), *(submit_and(None, 50) for _ in range(3))] == [False, False, False, True]
    assert not submit_and(lambda made: (made.succeed(), made.ask()), 50)  # who does no work then


@pytest.mark.parametrize(("ask", "wakes"), [("poll", 1), ("wait", 0), ("wait for another", 1)])
def test_what_was_put_off_is_woken_for_by_who_does_not_do_it(ask: str, wakes: int) -> None:
    woken: list[int] = []
    pace = Pace(lambda: lambda: woken.append(1))
    pace.step(10**9, submission("a").request)
    pace.is_put_off = True
    made = submission("a" if ask != "wait for another" else "b")
    made.pace, made.assist = pace, lambda future: made.succeed()
    if ask == "wait for another":
        made.succeed()
    for _ in range(2):
        made.poll() if ask == "poll" else made.wait()
    assert len(woken) == wakes
