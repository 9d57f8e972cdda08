"""plan_buckets: what fuses, in which order, up to which size."""

import pytest

from hvdlite.coordinator.messages import NAMED, Kind, Request, Response, TensorSpec
from hvdlite.coordinator.plan import plan_buckets
from hvdlite.dtypes import DType, ReduceOp


def response(name, numel=10, dtype=DType.FLOAT32, kind=Kind.ALLREDUCE, **options):
    return Response(Request(kind, name, (TensorSpec(name, dtype, (numel,)),), **options), NAMED)


def names(buckets):
    return [[r.request.name for r in bucket] for bucket in buckets]


def test_small_allreduces_fuse():
    assert names(plan_buckets([response("a"), response("b"), response("c")], 1 << 20)) == [["a", "b", "c"]]


@pytest.mark.parametrize(("threshold", "expected"), [
    (0, [["a"], ["b"], ["c"]]),
    (79, [["a"], ["b"], ["c"]]),
    (80, [["a", "b"], ["c"]]),
    (120, [["a", "b", "c"]]),
])  # fmt: skip
def test_threshold_bounds_a_bucket(threshold, expected):
    assert names(plan_buckets([response("a"), response("b"), response("c")], threshold)) == expected


def test_a_tensor_above_the_threshold_goes_alone():
    assert names(plan_buckets([response("a", 1000), response("b")], 100)) == [["a"], ["b"]]


@pytest.mark.parametrize("other", [
    {"dtype": DType.FLOAT64},
    {"op": ReduceOp.MAX},
    {"prescale": 0.5},
    {"postscale": 0.5},
    {"wire_dtype": DType.FLOAT16},
    {"place": (0, 0)},
    {"kind": Kind.BROADCAST},
])  # fmt: skip
def test_only_equals_fuse_and_later_equals_join_the_first(other):
    plan = plan_buckets([response("a"), response("b", **other), response("c")], 1 << 20)
    assert names(plan) == [["a", "c"], ["b"]]


def test_tensors_in_their_slots_and_other_operations_go_alone():
    alone = [response(str(i), kind=Kind.ALLGATHER) for i in range(2)] + [response("s", place=(0, 0)) for _ in range(2)]
    assert [len(bucket) for bucket in plan_buckets(alone, 1 << 20)] == [1, 1, 1, 1]


def test_empty():
    assert plan_buckets([], 1) == []
