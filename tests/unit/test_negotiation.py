"""Negotiation without MPI: what is complete, in which order, and what is said when ranks contradict one another."""

import random

import pytest

from hvdlite.coordinator.messages import Claim, Fault, Response
from hvdlite.coordinator.negotiation import Negotiation
from hvdlite.coordinator.request import NAMED, TensorSpec
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.broadcast import Broadcast
from hvdlite.rank_list import rank_list

PATIENCE_S = 1.0


def request(name="layer3.weight", shape=(512, 512), dtype=DType.FLOAT32, kind=Allreduce, **options):
    return kind(name, (TensorSpec(name, dtype, shape),), **options)


def verdict(*requests):
    """What the root says when rank i claims requests[i]."""
    negotiation = Negotiation(range(len(requests)), PATIENCE_S)
    for rank, item in enumerate(requests):
        negotiation.add(Claim(item, NAMED), (rank,), 0.0)
    (result,) = negotiation.verdicts()
    assert not negotiation.is_waiting
    return result


def test_nothing_is_said_before_every_rank_is_ready():
    negotiation = Negotiation(range(3), PATIENCE_S)
    for rank in (2, 0):
        negotiation.add(Claim(request(), NAMED), (rank,), 5.0)
        assert negotiation.verdicts() == []
    assert negotiation.waiting() == [(("layer3.weight", NAMED), "allreduce 'layer3.weight'", 5.0)]
    negotiation.add(Claim(request(), NAMED), (1,), 6.0)
    assert negotiation.verdicts() == [Response(request(), NAMED)]
    assert negotiation.verdicts() == []


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_and_a_flat_root_say_the_same(seed):
    rng = random.Random(seed)
    names = [f"t{i}" for i in range(6)]
    flat, root = Negotiation(range(6), PATIENCE_S), Negotiation(range(6), PATIENCE_S)
    leaders = {(1, 3): Negotiation((1, 3), PATIENCE_S), (0, 2, 4, 5): Negotiation((0, 2, 4, 5), PATIENCE_S)}
    claims = [
        (rank, Claim(request(name, (rank == 5 and name == "t3", 4)), NAMED)) for rank in range(6) for name in names
    ]
    rng.shuffle(claims)
    said_flat, said_tree = [], []
    for rank, claim in claims:
        flat.add(claim, (rank,), 0.0)
        said_flat += flat.verdicts()
        ranks = next(key for key in leaders if rank in key)
        leaders[ranks].add(claim, (rank,), 0.0)
        for upward in leaders[ranks].upward():
            root.add(upward, ranks, 0.0)
        said_tree += root.verdicts()
    assert len(said_tree) == len(names)
    assert sorted(map(repr, said_tree)) == sorted(map(repr, said_flat))
    assert next(v for v in said_tree if isinstance(v, Fault)).key == ("t3", NAMED)


class _ManyRanks(tuple[int, ...]):
    """Ranks of a subtree, so many that nobody may go through them for every tensor."""

    def __iter__(self):
        raise AssertionError("a tensor that all ranks agree on costs more where there are more ranks")


def test_what_a_tensor_costs_does_not_grow_with_the_ranks():
    below, root = Negotiation(range(8), PATIENCE_S), Negotiation(range(12), PATIENCE_S)
    for negotiation in (below, root):
        for ranks in (_ManyRanks(range(4)), _ManyRanks(range(4, 8))):
            negotiation.add(Claim(request(), NAMED), ranks, 0.0)
    (upward,) = below.upward()
    assert upward == Claim(request(), NAMED)
    root.add(upward, _ManyRanks(range(8, 12)), 0.0)
    assert root.verdicts() == [Response(request(), NAMED)]


def test_who_is_late_is_told_once_others_have_waited():
    """In parts: first who is there, then who has come since."""
    below = Negotiation(range(3), 6.0)
    below.add(Claim(request(), NAMED), (1,), 10.0)
    below.add(Claim(request(), NAMED), (0,), 11.0)
    times = [10.0 + 0.2 * i for i in range(50)]
    told = [(now_s, claim) for now_s in times for claim in below.upward(now_s)]
    ((when_s, claim),) = told
    assert claim == Claim(request(), NAMED, (0, 1))
    assert 16.0 < when_s < 16.5
    below.add(Claim(request(), NAMED), (2,), 21.0)
    assert below.upward(21.0) == [Claim(request(), NAMED, (2,))]


def test_nobody_is_late_while_all_execute():
    """The leader comes back from a collective of 5 s, and so do its ranks, whose claims are not there yet."""
    below = Negotiation(range(2), PATIENCE_S)
    below.add(Claim(request(), NAMED), (1,), 10.0)
    assert below.upward(10.0) == below.upward(15.0) == below.upward(15.001) == []
    below.add(Claim(request(), NAMED), (0,), 15.002)
    assert below.upward(15.002) == [Claim(request(), NAMED)]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (request(shape=(512, 256)), ["shape", "(512, 512)", "(512, 256)", "allgather"]),
        (request(dtype=DType.FLOAT64), ["dtype", "float32", "float64"]),
        (request(reduction=Reduction(ReduceOp.MAX)), ["op", "Sum", "Max"]),
        (request(kind=Broadcast), ["operation", "allreduce", "broadcast"]),
    ],
)
def test_a_fault_names_tensor_ranks_and_both_values(other, words):
    result = verdict(request(), request(), other, request())
    assert isinstance(result, Fault)
    for word in ["layer3.weight", "ranks 0, 1 and 3", "rank 2", *words]:
        assert word in result.text


def test_a_fault_in_a_group_names_the_tensor():
    def group(second_shape):
        return Allreduce("group", (TensorSpec("a", DType.INT8, (1,)), TensorSpec("b", DType.INT8, second_shape)))

    result = verdict(group((2,)), group((3,)))
    assert isinstance(result, Fault)
    assert "'b'" in result.text
    assert "(2,) on rank 0 but (3,) on rank 1" in result.text


def test_ranks_may_differ_in_place_and_are_then_copied():
    assert verdict(request(place=(0, 0)), request(place=(0, 64))) == Response(request(), NAMED)
    assert verdict(request(place=(0, 0)), request(place=(0, 0))) == Response(request(place=(0, 0)), NAMED)
    assert verdict(request(place=(0, 0)), request()) == Response(request(), NAMED)


def test_a_fault_names_every_rank_of_a_value_wherever_its_tensors_live():
    result = verdict(request(place=(0, 0)), request(shape=(3,)), request(), request(place=(0, 64)))
    assert isinstance(result, Fault)
    assert "shape is (512, 512) on ranks 0, 2 and 3 but (3,) on rank 1." in result.text


def test_rank_list_reads_like_a_sentence():
    assert rank_list([2]) == "rank 2"
    assert rank_list([0, 1, 3]) == "ranks 0, 1 and 3"
    assert rank_list(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
