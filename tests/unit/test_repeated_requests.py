"""What is remembered of operations that come again: their requests, and how their tensors lie in a fusion buffer."""

from __future__ import annotations

import pytest

from hvdlite.coordinator.execute import _layouts, _one_behind_the_other
from hvdlite.coordinator.messages import Kind, Request, TensorSpec
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.group import _reduction_request

FLOATS = ((DType.FLOAT32, (3, 5)),)


def reduction(name: str, tensors: tuple[tuple[DType, tuple[int, ...]], ...] = FLOATS, prescale: float = 1.0) -> Request:
    return _reduction_request(Kind.ALLREDUCE, name, None, tensors, ReduceOp.SUM, prescale, 1.0, None, None, False)


def test_an_operation_that_comes_again_has_the_same_request() -> None:
    assert reduction("a") is reduction("a")
    assert reduction("a").tensors == (TensorSpec("a", DType.FLOAT32, (3, 5)),)
    others = [reduction("b"), reduction("a", prescale=0.5), reduction("a", ((DType.FLOAT64, (3, 5)),))]
    assert len({reduction("a"), *others}) == 4
    assert [spec.name for spec in reduction("a", FLOATS * 2).tensors] == ["a.0", "a.1"]


def test_an_operation_that_is_refused_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="allreduce of bool is not defined"):
            reduction("a", ((DType.BOOL, (1,)),))


@pytest.mark.parametrize("sizes", [[[1]], [[1], [16], [17]], [[0], [3, 40], [0], [5, 0]]])
def test_requests_that_are_fused_lie_as_one_request_of_all_their_tensors(sizes: list[list[int]]) -> None:
    requests = [
        reduction(f"{i}", tuple((DType.FLOAT32, (numel,)) for numel in numels)) for i, numels in enumerate(sizes)
    ]
    fused = _one_behind_the_other([_layouts(request, False)[0] for request in requests])
    (whole,) = _layouts(reduction("all", tuple((DType.FLOAT32, (n,)) for numels in sizes for n in numels)), False)
    assert [*fused.indices] == [*whole.indices]
    assert fused.numels == whole.numels and fused.offsets == whole.offsets
    assert (fused.end, fused.following, fused.wire) == (whole.end, whole.following, whole.wire)


@pytest.mark.parametrize(("at_home", "wire"), [(False, DType.FLOAT16), (True, DType.FLOAT32)])
def test_only_floats_that_travel_are_cast(at_home: bool, wire: DType) -> None:
    specs = (
        TensorSpec("x", DType.FLOAT32, (40,)),
        TensorSpec("n", DType.INT64, (2,)),
        TensorSpec("y", DType.FLOAT32, ()),
    )
    request = Request(Kind.ALLREDUCE, "a", specs, wire_dtype=DType.FLOAT16)
    integers, floats = _layouts(request, at_home)
    assert (integers.dtype, integers.wire, [*integers.indices]) == (DType.INT64, DType.INT64, [1])
    assert (floats.dtype, floats.wire, [*floats.indices], floats.numels) == (DType.FLOAT32, wire, [0, 2], [40, 1])
    assert floats.offsets == [0, 64 if wire is DType.FLOAT16 else 48]
