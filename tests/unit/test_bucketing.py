"""Which gradients travel together, and who decides what when: pure decisions."""

from __future__ import annotations

import random

import pytest

from hvdlite.torch.bucketing import (
    Bucketing,
    Phase,
    arrival_order,
    assign_buckets,
    choose_bucket_bytes,
    choose_homes,
    split_evenly,
)


def test_edges_are_small_and_the_middle_is_full() -> None:
    # 32 tensors of 100 bytes, buckets of 800: edges of 100.
    buckets = assign_buckets([100] * 32, ["f"] * 32, range(32), 800)
    assert [len(bucket) for bucket in buckets] == [1, 8, 8, 8, 6, 1]
    assert [tensor for bucket in buckets for tensor in bucket] == list(range(32))


def test_without_edges() -> None:
    assert assign_buckets([100] * 3, ["f"] * 3, range(3), 1000, edge_bytes=1000) == [[0, 1, 2]]
    assert assign_buckets([100] * 3, ["f"] * 3, range(3), 200, edge_bytes=200) == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("nodes", "cores", "threads", "bytes_per_s", "expected"),
    [
        (1, 2, 2, 0, None),
        (1, 2, 0, 0, 32 << 20),
        (1, 2, 1, 0, 8 << 20),
        (1, 2, 2, 1e9, None),
        (2, 2, 2, 0, 8 << 20),
        (2, 2, 0, 0, 8 << 20),
        (2, 2, 1, 250e6, 2_000_000),
        (2, 2, 1, 1e6, 1 << 20),
        (2, 2, 1, 12.5e9, 8 << 20),
    ],
)
def test_bucket_bytes(nodes: int, cores: int, threads: int, bytes_per_s: float, expected: int | None) -> None:
    assert choose_bucket_bytes(nodes, cores, threads, bytes_per_s) == expected


def test_follows_the_order_of_arrival() -> None:
    order = [3, 1, 0, 2]
    assert assign_buckets([100] * 4, ["f"] * 4, order, 100) == [[3], [1], [0], [2]]


def test_few_bytes_make_one_bucket() -> None:
    assert assign_buckets([4] * 10, ["f"] * 10, range(10), 800) == [list(range(10))]


def test_no_fusion() -> None:
    assert assign_buckets([4] * 3, ["f"] * 3, [2, 1, 0], 0) == [[2], [1], [0]]


def test_a_tensor_above_the_limit_is_alone() -> None:
    nbytes = [10, 10, 5000, 10, 10, 10]
    assert assign_buckets(nbytes, ["f"] * 6, range(6), 160) == [[0, 1], [2], [3], [4, 5]]


def test_an_empty_tensor_joins_its_neighbours() -> None:
    assert assign_buckets([0, 8, 0], ["f"] * 3, range(3), 800) == [[0, 1, 2]]


def test_kinds_stay_apart_and_come_when_they_are_complete() -> None:
    # Of "b" the last arrives before that of "a".
    assert assign_buckets([4] * 4, ["a", "b", "b", "a"], range(4), 800) == [[1, 2], [0, 3]]


def test_tensors_that_did_not_arrive_are_in_no_bucket() -> None:
    assert assign_buckets([4] * 4, ["a"] * 4, [2, 0], 800) == [[2, 0]]


def test_groups_stay_together_whatever_their_size() -> None:
    buckets = assign_buckets([100] * 6, ["f"] * 6, range(6), 100, groups=[[0, 4, 2]])
    assert buckets == [[1], [3], [0, 2, 4], [5]]


def test_a_group_of_two_kinds_is_two_buckets() -> None:
    assert assign_buckets([1] * 3, ["a", "b", "a"], range(3), 100, groups=[[0, 1, 2]]) == [[1], [0, 2]]


@pytest.mark.parametrize("seed", range(20))
def test_every_tensor_is_in_one_bucket_and_limits_hold(seed: int) -> None:
    rng = random.Random(seed)
    n, limit = rng.randint(1, 60), rng.choice([0, 64, 1000])
    nbytes = [rng.choice([0, 1, 8, 100, 5000]) for _ in range(n)]
    kinds = [rng.choice("ab") for _ in range(n)]
    order = rng.sample(range(n), rng.randint(1, n))
    buckets = assign_buckets(nbytes, kinds, order, limit)
    assert sorted(tensor for bucket in buckets for tensor in bucket) == sorted(order)
    position = {tensor: place for place, tensor in enumerate(order)}
    complete = [max(position[tensor] for tensor in bucket) for bucket in buckets]
    assert complete == sorted(complete)
    for bucket in buckets:
        assert len({kinds[tensor] for tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(nbytes[tensor] for tensor in bucket) <= limit
        assert [position[tensor] for tensor in bucket] == sorted(position[tensor] for tensor in bucket)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 20])
def test_split_evenly(parts: int) -> None:
    split = split_evenly(range(7), parts)
    assert [tensor for part in split for tensor in part] == list(range(7))
    assert len(split) == min(parts, 7)
    assert max(map(len, split)) - min(map(len, split)) <= 1


def test_the_last_time_of_each_counts() -> None:
    assert arrival_order([], [2, 1, 0]) == [2, 1, 0]
    assert arrival_order([1, 0, 2, 1, 0], [2, 1, 0]) == [2, 1, 0]
    assert arrival_order([0, 1, 0, 1], [3, 2, 1, 0]) == [0, 1, 3, 2]
    assert arrival_order([5], [1, 0]) == [5, 1, 0]  # switched off since it came


@pytest.mark.parametrize("order", [[], [2, 0], [3, 1, 0, 2]])
@pytest.mark.parametrize("has_homes", [True, False])
def test_a_choice_travels_as_integers(order: list[int], has_homes: bool) -> None:
    chosen = Bucketing(8 << 20, has_homes, order)
    sent = chosen.encode(4)
    assert len(sent) == 6
    assert {type(number) for number in sent} == {int}
    assert Bucketing.decode(sent) == chosen


def test_homes_once_made_stay() -> None:
    assert choose_homes(2, have=False, stay=False)
    assert not choose_homes(1, have=False, stay=False)
    assert choose_homes(1, have=True, stay=False)
    assert choose_homes(1, have=False, stay=True)


def test_phases() -> None:
    """One more step shows whether gradients stay, where that would change something."""
    assert Phase.BY_REGISTRATION.after_agreement(homes_may_follow=True) is Phase.BY_ARRIVAL
    assert Phase.BY_REGISTRATION.after_agreement(homes_may_follow=False) is Phase.SETTLED
    assert Phase.BY_ARRIVAL.after_agreement(homes_may_follow=True) is Phase.SETTLED
    assert Phase.SETTLED.after_agreement(homes_may_follow=True) is Phase.SETTLED
