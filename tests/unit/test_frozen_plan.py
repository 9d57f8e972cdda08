"""An order that repeats is frozen, and given up where it does not come true."""

from __future__ import annotations

import random

import pytest

from coordinator_lab import Lab, submission
from hvdlite.errors import CollectiveError
from job_lab import NODES, STEP, Job


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_steps_that_repeat_are_frozen(nodes: list[tuple[int, ...]], seed: int) -> None:
    lab = Lab(nodes, seed)
    job = Job(lab)
    n = len(lab.ranks)
    job.freeze(STEP)
    job.check_order()
    before = [len(owner.buckets) for owner in lab.owners]
    claims = lab.claims()
    for _ in range(20):
        job.step([STEP] * n)
    job.check_order()
    assert job.plans == [1] * n  # the same one still
    assert all(len(owner.buckets) > count for owner, count in zip(lab.owners, before, strict=True))
    assert lab.claims() == claims


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_one_message_per_edge_and_operation_at_most(nodes: list[tuple[int, ...]]) -> None:
    """In each direction, of operations that come one by one."""
    lab = Lab(nodes, 0)
    job = Job(lab)
    blocking = [entry for name in "abc" for entry in ((name, 4), ("|", 0))]
    job.freeze(blocking)
    sent = [tree.sent for tree in lab.trees]
    steps = 10
    for _ in range(steps):
        job.step([blocking] * len(lab.ranks))
    for tree, before in zip(lab.trees, sent, strict=True):
        edges = len(tree.children) + (tree.parent is not None)
        assert tree.sent - before <= steps * 3 * edges


@pytest.mark.parametrize("nodes", [nodes for nodes in NODES if len(nodes) > 1], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_between_nodes_what_is_submitted_together_goes_by_the_log(nodes: list[tuple[int, ...]], seed: int) -> None:
    """Which counts it at once."""
    lab = Lab(nodes, seed)
    job = Job(lab)
    job.freeze([(name, 4) for name in "abcdefgh"])
    assert not any(coordinator.runs_free for coordinator in lab.ranks)


@pytest.mark.parametrize(("names", "is_free"), [("a large", False), ("a b large", True), ("large largest", False)])
def test_between_nodes_a_plan_runs_free_where_operations_of_few_bytes_prevail(names: str, is_free: bool) -> None:
    lab = Lab([(0,), (1, 2)], 0)
    job = Job(lab, at_once=True)
    blocking = [entry for name in names.split() for entry in ((name, 4), ("|", 0))]
    job.freeze(blocking)
    assert [coordinator.runs_free for coordinator in lab.ranks] == [is_free] * 3
    for _ in range(10):
        job.step([blocking] * 3)
    job.check_order()


def test_what_is_collected_comes_after_what_is_queued() -> None:
    """Else all that is submitted before the thread has taken that would go one by one."""
    job = Job(Lab([(0,)], 0), collected=1.0)
    order = [("BROADCAST", 4), ("a", 4), ("b", 4), ("|", 0)]
    job.freeze(order)
    job.step([order])
    (coordinator,) = job.lab.ranks
    handles = job.begin(0, submission("BROADCAST", kind="broadcast"), waits=False)
    assert len(coordinator._queue) == 1
    before = job.collected
    for name in "ab":
        handles += job.begin(0, submission(name), waits=False)
    assert job.collected == before + 2
    job.lab.settle(handles)
    for handle in handles:
        handle.wait()
    job.check_order()


def varied(step: list[tuple[str, int]], how: str, rank: int, generator: random.Random) -> list[tuple[str, int]]:
    order = list(step)
    if how == "another order here":
        order = generator.sample(order[:4], 4) + order[4:]
    elif how == "one less":
        del order[2]
    elif how == "one more":
        order.insert(1, ("more", 3))
    elif how == "another shape":
        order[0] = ("a", 9)
    elif how == "a contradiction" and rank == 1:
        order[0] = ("a", 7)
    return order


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize(
    "how", ["another order here", "one less", "one more", "another shape", "a contradiction", "anything"]
)
@pytest.mark.parametrize("collected", [0.0, 0.9])
def test_what_changes_is_done_all_the_same(nodes: list[tuple[int, ...]], how: str, collected: float) -> None:
    lab = Lab(nodes, 1)
    job = Job(lab, collected=collected)
    n = len(lab.ranks)
    ways = ["another order here", "one less", "one more", "another shape", "a contradiction", "as ever"]
    wrong = 0
    for turn in range(6):
        job.freeze(STEP)
        for _ in range(turn % 3 + 1):
            way = lab.random.choice(ways) if how == "anything" else how
            wrong += way == "a contradiction"
            job.step([varied(STEP, way, rank, lab.random) for rank in range(n)])
        job.check_order()
    assert job.errors == wrong
    assert len(set(job.plans)) == 1
    job.freeze(STEP)
    job.check_order()


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_a_plan_that_is_not_followed_makes_room(nodes: list[tuple[int, ...]]) -> None:
    job = Job(Lab(nodes, 2))
    for step in ([("a", 4)], [("b", 4), ("|", 0), ("c", 4)], STEP):
        before = job.plans[0]
        for _ in range(300):
            job.step([step] * len(job.lab.ranks))
            if job.plans[0] > before and len(set(job.plans)) == 1 and all(job.frozen):
                break
        job.check_order()
        assert job.plans[0] > before and all(job.frozen)


ONE_BY_ONE = [entry for name in "a?Bc" for entry in ((name, 4), ("|", 0))]


@pytest.mark.parametrize("nodes", [[(0,)], *NODES], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_what_comes_one_by_one_needs_no_message_and_nobody_who_tells(nodes: list[tuple[int, ...]], seed: int) -> None:
    lab = Lab(nodes, seed)
    job = Job(lab, at_once=True)
    job.freeze(ONE_BY_ONE)
    assert all(coordinator.runs_free for coordinator in lab.ranks)
    claims, before = lab.claims(), job.done_at_once
    for _ in range(20):
        job.step([ONE_BY_ONE] * len(lab.ranks))
    job.check_order()
    assert job.done_at_once > before
    assert lab.claims() == claims
    assert not any(lab.pages[0]._shared.logs) and job.plans == [1] * len(lab.ranks)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("collected", [0.0, 1.0])
def test_what_is_submitted_at_once_is_done_at_once(collected: float, seed: int) -> None:
    """However it came; and needs no message."""
    lab = Lab([(0, 1, 2)], seed)
    job = Job(lab, collected=collected)
    burst = [(name, 4) for name in "abcdefgh"]
    job.freeze([*burst, ("|", 0), ("loss", 1)])
    claims, done = lab.claims(), [len(owner.buckets) for owner in lab.owners]
    for _ in range(10):
        job.step([[*burst, ("|", 0), ("loss", 1)]] * 3)
    job.check_order()
    assert lab.claims() == claims
    plan = lab.ranks[0]._plan.plan
    assert plan is not None and plan.is_free
    per_step = len({plan._burst_of(number) for number in range(9)})
    assert per_step < 9
    assert bool(job.collected) == bool(collected)
    assert [len(owner.buckets) - before for owner, before in zip(lab.owners, done, strict=True)] == [10 * per_step] * 3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("collected", [0.0, 0.9, 1.0])
def test_a_program_that_waits_where_it_did_not_before_gets_another_plan(collected: float, seed: int) -> None:
    """In which nobody has to complain."""
    lab = Lab([(0, 1, 2)], seed)
    job = Job(lab, collected=collected)
    job.freeze([(name, 4) for name in "abcdef"])
    waits = [(name, 4) for name in "abc|def"]
    for _ in range(20):
        job.step([waits] * 3)
    plans = job.plans
    for _ in range(20):
        job.step([waits] * 3)
    job.check_order()
    assert job.plans == plans and all(job.frozen)


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_who_is_told_how_far_to_go_does_nothing_at_once(nodes: list[tuple[int, ...]]) -> None:
    lab = Lab(nodes, 0, prepared_operations=False)
    job = Job(lab, at_once=True)
    job.freeze(ONE_BY_ONE)
    job.step([ONE_BY_ONE] * len(lab.ranks))
    assert not job.done_at_once and not any(coordinator.runs_free for coordinator in lab.ranks)


def test_what_fails_while_it_is_looked_for_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On whichever thread."""
    lab = Lab([(0,), (1,)], 0)
    Job(lab, at_once=True).freeze(ONE_BY_ONE)
    rank, died = lab.ranks[0], []
    monkeypatch.setattr(lab.owners[0], "coordinator_died", died.append)

    def fail(rings: int) -> bool:
        raise CollectiveError("no message comes any more")

    monkeypatch.setattr(rank._readiness, "look", fail)
    assert not rank.look(0)
    assert rank.has_ended and [type(error) for error in died] == [CollectiveError]


def test_who_is_held_says_to_be_ready_for_nothing_more() -> None:
    """Having done what all had begun; its answer is what the end of the plan goes by."""
    lab = Lab([(0,), (1,)], 0)
    job = Job(lab, at_once=True)
    job.freeze([("A", 4), ("|", 0), ("B", 4), ("|", 0)])
    made = [[submission(name, kind="broadcast") for name in "AB"] + [submission("more")] for _ in range(2)]
    (root, other), (_, owner) = lab.ranks, lab.owners
    for one in made[1][:2]:  # by two threads
        other.submit(one)
    other.cycle()
    for one in made[0][::2]:
        root.submit(one)
    root.cycle()
    before = len(owner.buckets)
    while len(owner.buckets) == before:
        other.cycle()
    assert other._plan.plan is not None and other._plan.free is None
    other.submit(made[1][2])
    other.cycle()
    root.submit(made[0][1])
    lab.settle([*made[0], *made[1]])
    job.check_order()


MANY = [(name, 4) for name in "ab?cd?"] + [("|", 0)] + [(name, 4) for name in "ef?"] + [("loss", 1), ("|", 0)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_what_deviates_from_bursts(size: int, seed: int) -> None:
    """At every place: all do the same in the same order, and are not in doubt about where a burst ends."""
    lab = Lab([tuple(range(size))], seed)
    job = Job(lab, at_once=True, collected=0.95)
    for place in range(len(MANY)):
        job.freeze(MANY)
        for _ in range(lab.random.randrange(4)):
            job.step([MANY] * size)
        orders = [list(MANY) for _ in range(size)]
        how = lab.random.choice(["more", "less", "a wait", "a wait on one rank", "another order on one rank"])
        if how in ("more", "less", "a wait"):
            for order in orders:
                order[place : place + (how == "less")] = [("more", 3)] if how == "more" else [("|", 0)]
        elif how == "a wait on one rank":
            orders[-1].insert(place, ("|", 0))
        else:
            end = MANY.index(("|", 0))  # which the others wait at
            orders[-1][:end] = lab.random.sample(orders[-1][:end], end)
        job.step(orders)
        job.check_order()
    assert len(set(job.plans)) == 1
    assert job.collected > 0


@pytest.mark.parametrize("nodes", [*NODES, [(0, 1, 2, 3)]], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_what_deviates_from_a_plan_that_runs_free(nodes: list[tuple[int, ...]], seed: int) -> None:
    """At every place of the plan, waited for or not: all do the same in the same order."""
    lab = Lab(nodes, seed)
    job = Job(lab, at_once=True)
    ranks = range(len(lab.ranks))
    for place in range(len(ONE_BY_ONE)):
        job.freeze(ONE_BY_ONE)
        for _ in range(lab.random.randrange(3)):
            job.step([ONE_BY_ONE] * len(ranks))
        orders = [list(ONE_BY_ONE) for _ in ranks]
        how = lab.random.choice(["more", "less", "asynchronous", "another order here"])
        for order in orders:
            if how == "more":
                order.insert(place, ("more", 3))
            elif how == "less":
                order[place] = ("|", 0)
            else:
                order[place:] = [entry for entry in order[place:] if entry[0] != "|"]
                if how == "another order here":
                    order[place:] = lab.random.sample(order[place:], len(order) - place)
        job.step(orders)
        job.check_order()
    assert len(set(job.plans)) == 1


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_programs_that_alternate(nodes: list[tuple[int, ...]]) -> None:
    """Training and validation: once both are known, a change costs the claims of one step."""
    lab = Lab(nodes, 3)
    job = Job(lab)
    ranks = len(lab.ranks)
    validation = [("accuracy", 1), ("|", 0), ("?", 4), ("|", 0)]
    blocking = [entry for name in ("a", "?", "b") for entry in ((name, 4), ("|", 0))]
    for _ in range(3):
        for step in (blocking, validation):
            job.freeze(step)
            for _ in range(10):
                job.step([step] * ranks)
    for step in (blocking, validation) * 3:
        claims = lab.ranks[-1].statistics()["claims_sent"]
        for _ in range(10):
            job.step([step] * ranks)
        assert lab.ranks[-1].statistics()["claims_sent"] - claims <= 2 * len(step)
    job.check_order()


TRAINING = [(name, 4) for name in "abc?d"] + [("|", 0), ("loss", 1), ("|", 0)]
VALIDATION = [("accuracy", 1), ("|", 0), ("?", 4), ("|", 0)]
ADVERSARY = [("?", 4), ("b", 4), ("|", 0), ("generator", 4), ("loss", 1), ("|", 0)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_on_one_node_a_plan_begins_anew_where_what_is_claimed_is_its_beginning(size: int, seed: int) -> None:
    """Then a change costs the claim that has shown it, wherever the plan had begun before."""
    lab = Lab([tuple(range(size))], seed)
    job = Job(lab, at_once=True)
    orders = [
        [entry for name in names for entry in ((name, 4), ("|", 0))] for names in ("abcd?efg", "hi?jkl?m", "nopq")
    ]
    for _ in range(2):
        for order in orders:
            job.freeze(order)
            for _ in range(lab.random.randrange(8, 12)):
                job.step([order] * size)
    for number in range(12):
        claims, plan = lab.claims()[-1], job.plans[-1]
        for _ in range(lab.random.randrange(1, 6)):
            job.step([orders[number % 3]] * size)
        assert lab.claims()[-1] - claims <= 2  # one, which a leader says and hears
        assert set(job.plans) == {plan + 1}
    job.check_order()


@pytest.mark.parametrize("seed", range(6))
def test_what_alternates_and_deviates(seed: int) -> None:
    lab = Lab([(0, 1, 2)], seed)
    job = Job(lab, at_once=True, collected=0.9)
    ways = ["another order here", "one less", "one more", "another shape", "as ever", "as ever", "as ever"]
    for _ in range(40):
        order = lab.random.choice([TRAINING, VALIDATION, ADVERSARY])
        for _ in range(lab.random.randrange(1, 8)):
            job.step([order] * 3)
        if order is TRAINING:
            way = lab.random.choice(ways)
            job.step([varied(order, way, rank, lab.random) for rank in range(3)])
        job.check_order()
    assert len(set(job.plans)) == 1


def test_who_joins_ends_the_plan() -> None:
    lab = Lab([(0, 1), (2,)], 0)
    job = Job(lab)
    job.freeze([("a", 4)])
    joins = [submission("join.noname", sequence=0, kind="join") for _ in range(3)]
    lab.ranks[1].submit(joins[1])
    job.step([[("a", 4)], [], [("a", 4)]])  # without rank 1
    for rank in (0, 2):
        lab.ranks[rank].submit(joins[rank])
    lab.settle(joins)
    job.freeze([("a", 4)])
    assert job.plans == [2] * 3


def test_a_rank_that_does_not_come_is_waited_for_in_the_open() -> None:
    """So that the watch for stalls sees what waits."""
    lab = Lab([(0, 1), (2,)], 0)
    job = Job(lab)
    job.freeze([("a", 4)])
    early = [submission("a") for _ in range(2)]
    lab.ranks[0].submit(early[0])
    lab.ranks[2].submit(early[1])
    for _ in range(100_000):
        lab.turn()
    assert not any(job.frozen)
    assert [label for _, label, _ in lab.ranks[0]._leader._negotiation.waiting()] == ["allreduce 'a'"]
    last = submission("a")
    lab.ranks[1].submit(last)
    lab.settle([last, *early])
    job.check_order()


def test_without_a_cache_nothing_is_frozen() -> None:
    job = Job(Lab([(0, 1)], 0, cache_capacity=0))
    for _ in range(30):
        job.step([[("a", 4)]] * 2)
    assert job.plans == [0, 0]
