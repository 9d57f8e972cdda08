"""fuse: what fuses, in which order, up to which size."""

from itertools import pairwise

import pytest

from hvdlite.coordinator.fusion import bursts, fuse
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.request import NAMED, TensorSpec
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.operations.allgather import Allgather
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.broadcast import Broadcast


def response(name, numel=10, dtype=DType.FLOAT32, kind=Allreduce, **options):
    return Response(kind(name, (TensorSpec(name, dtype, (numel,)),), **options), NAMED)


def names(buckets):
    return [[r.request.name for r in bucket] for bucket in buckets]


def test_small_allreduces_fuse():
    assert names(fuse([response("a"), response("b"), response("c")], 1 << 20)) == [["a", "b", "c"]]


@pytest.mark.parametrize(("threshold", "expected"), [
    (0, [["a"], ["b"], ["c"]]),
    (79, [["a"], ["b"], ["c"]]),
    (80, [["a", "b"], ["c"]]),
    (120, [["a", "b", "c"]]),
])  # fmt: skip
def test_threshold_bounds_a_bucket(threshold, expected):
    assert names(fuse([response("a"), response("b"), response("c")], threshold)) == expected


def test_a_tensor_above_the_threshold_goes_alone():
    assert names(fuse([response("a", 1000), response("b")], 100)) == [["a"], ["b"]]


@pytest.mark.parametrize("other", [
    {"dtype": DType.FLOAT64},
    {"reduction": Reduction(ReduceOp.MAX)},
    {"reduction": Reduction(prescale=0.5)},
    {"reduction": Reduction(postscale=0.5)},
    {"wire_dtype": DType.FLOAT16},
    {"place": (0, 0)},
    {"kind": Broadcast},
])  # fmt: skip
def test_only_equals_fuse_and_later_equals_join_the_first(other):
    buckets = fuse([response("a"), response("b", **other), response("c")], 1 << 20)
    assert names(buckets) == [["a", "c"], ["b"]]


def test_tensors_in_their_slots_and_other_operations_go_alone():
    alone = [response(str(i), kind=Allgather) for i in range(2)] + [response("s", place=(0, 0)) for _ in range(2)]
    assert [len(bucket) for bucket in fuse(alone, 1 << 20)] == [1, 1, 1, 1]


def test_empty():
    assert fuse([], 1) == []


@pytest.mark.parametrize(
    ("after_pause", "limit", "begins"),
    [((), 1 << 20, [0, 3, 4]), ((2,), 1 << 20, [0, 2, 3, 4]), ((), 0, [0, 1, 2, 3, 4, 5]), ((4,), 32, [0, 2, 3, 4])],
)
def test_bursts_travel_together(after_pause: tuple[int, ...], limit: int, begins: list[int]) -> None:
    """16 bytes each; the fourth goes alone."""
    made = [response(name, 4, place=(0, 0) if name == "d" else None) for name in "abcdef"]
    requests = [one.request for one in made]
    assert bursts(requests, after_pause, limit) == begins
    for begin, end in pairwise([*begins, len(made)]):
        assert len(fuse(made[begin:end], limit)) == 1
