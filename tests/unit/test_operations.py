"""What each operation says of itself: on the wire, where ranks differ, where one is absent, and what is remembered."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from coordinator_lab import OPERATIONS
from hvdlite.config import Tunable
from hvdlite.coordinator.messages import Claim, Fault, Response
from hvdlite.coordinator.negotiation import Negotiation
from hvdlite.coordinator.request import NAMED, Request, TensorSpec
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.memory.layout import Layout, concatenated
from hvdlite.memory.views import TensorView
from hvdlite.operations.allreduce import Allreduce

TENSORS = (TensorSpec("layer3.weight", DType.FLOAT32, (4, 5)), TensorSpec("bias", DType.BFLOAT16, ()))
REDUCING = {"reduction": Reduction(ReduceOp.MAX, 0.5, -2.0), "wire_dtype": DType.FLOAT16}
OPTIONS: dict[str, dict[str, Any]] = {  # other than the defaults
    "allreduce": {**REDUCING, "place": (4, 64), "needs_all": True},
    "reducescatter": REDUCING,
    "allgather": {"needs_all": True},
    "broadcast": {"root_rank": 1, "needs_all": True},
    "alltoall": {},
    "barrier": {},
    "join": {},
    "allocate": {"nbytes": 1 << 40},
    "configure": {"settings": Tunable(1, 2, 3, 4)},
    "add_process_set": {"ranks": (0, 2)},
    "remove_process_set": {"ranks": (0, 2), "number": 3},
}


@pytest.mark.parametrize("label", OPERATIONS)
def test_a_request_survives_the_wire(label: str) -> None:
    request = OPERATIONS[label]("größe/ü", TENSORS, **OPTIONS[label])
    arrived = pickle.loads(pickle.dumps(request))
    assert arrived == request and hash(arrived) == hash(request) and arrived is not request
    assert type(arrived) is type(request) and repr(arrived) == repr(request)
    assert arrived != OPERATIONS["join"]("other")


def verdict(*requests: Request, joined: tuple[int, ...] = ()) -> Response | Fault:
    """What the root says when rank i claims requests[i], and ``joined`` have joined."""
    negotiation = Negotiation(range(len(requests) + len(joined)), 1.0)
    for rank, request in enumerate(requests):
        negotiation.add(Claim(request, NAMED), (rank,), 0.0)
    for rank in joined:
        negotiation.add(Claim(OPERATIONS["join"]("join"), 0), (rank,), 0.0)
    (result,) = negotiation.verdicts()
    return result


DIFFERENCES = [
    ("allreduce", "reduction", Reduction(ReduceOp.MAX), "op is Sum on rank 0 but Max on rank 1. Pass the same op"),
    ("allreduce", "reduction", Reduction(prescale=0.5), "prescale factor is 1.0 on rank 0 but 0.5 on rank 1. Pass"),
    ("reducescatter", "reduction", Reduction(postscale=0.5), "postscale factor is 1.0 on rank 0 but 0.5 on rank 1"),
    ("allreduce", "wire_dtype", DType.FLOAT16, "compression is none on rank 0 but float16 on rank 1"),
    ("broadcast", "root_rank", 1, "root rank is 0 on rank 0 but 1 on rank 1. Pass the same root_rank on every rank."),
    ("allocate", "nbytes", 8, "size in bytes is 0 on rank 0 but 8 on rank 1. Ask for the same size on every rank."),
    ("configure", "settings", Tunable(rails=1), "settings is (0, 64512, 32768, 0) on rank 0 but (0, 64512, 32768, 1)"),
    ("add_process_set", "ranks", (0, 2), "ranks of the process set is () on rank 0 but (0, 2) on rank 1. Name the"),
    ("remove_process_set", "number", 2, "number of the process set is 0 on rank 0 but 2 on rank 1"),
]


@pytest.mark.parametrize(("label", "option", "value", "words"), DIFFERENCES, ids=lambda value: str(value)[:20])
def test_what_ranks_must_not_differ_in(label: str, option: str, value: object, words: str) -> None:
    result = verdict(OPERATIONS[label]("x"), OPERATIONS[label]("x", (), **{option: value}))
    assert isinstance(result, Fault) and words in result.text and result.text.startswith(f"{label} 'x': ")


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_ranks_differ_in_is_always_named(label: str) -> None:
    """Every option of every operation, but where its tensors live, and whether all must take part."""
    for option, value in OPTIONS[label].items():
        mine, theirs = OPERATIONS[label]("x"), OPERATIONS[label]("x", (), **{option: value})
        said = [row.what for row in mine.differences(theirs) if row.mine != row.theirs]
        assert bool(said) == (option not in ("place", "needs_all")), (option, said)


@pytest.mark.parametrize("label", OPERATIONS)
def test_who_must_take_part(label: str) -> None:
    """Rank 1 has joined."""
    if label == "join":
        return
    must = {"alltoall", "add_process_set", "remove_process_set"}
    result = verdict(OPERATIONS[label]("x", TENSORS[:1]), joined=(1,))
    assert isinstance(result, Fault) == (label in must), result
    if "needs_all" in OPTIONS[label]:
        result = verdict(OPERATIONS[label]("x", TENSORS[:1], needs_all=True), joined=(1,))
    if isinstance(result, Fault):
        subject = f"{label} 'layer3.weight': rank 1 called join() and cannot take part. Call it before join(), or"
        assert result.text.startswith(subject)


def test_a_root_that_is_absent_and_a_product_without_identity_are_faults() -> None:
    broadcast = OPERATIONS["broadcast"]("x", (), root_rank=1)
    assert isinstance(verdict(broadcast, joined=(1,)), Fault)
    integers = (TensorSpec("n", DType.UINT8, (2,)),)
    for prescale, is_fault in ((1.0, False), (0.5, False), (2.0, True), (-1.0, True)):
        request = Allreduce("x", integers, Reduction(ReduceOp.PRODUCT, prescale))
        result = verdict(request, joined=(1,))
        assert isinstance(result, Fault) == is_fault, result
        assert not is_fault or "called join(), and no integer times the prescale factor" in result.text  # type: ignore[union-attr]


FLOATS = ((DType.FLOAT32, (3, 5)),)


def allreduce(
    name: str, tensors: tuple[tuple[DType, tuple[int, ...]], ...] = FLOATS, prescale: float = 1.0
) -> Allreduce:
    return Allreduce.of(
        name, [TensorView(0, shape, dtype, None) for dtype, shape in tensors], Reduction(prescale=prescale)
    )


def test_an_operation_that_comes_again_has_the_same_request() -> None:
    assert allreduce("a") is allreduce("a")
    assert allreduce("a").tensors == (TensorSpec("a", DType.FLOAT32, (3, 5)),)
    others = [allreduce("b"), allreduce("a", prescale=0.5), allreduce("a", ((DType.FLOAT64, (3, 5)),))]
    assert len({allreduce("a"), *others}) == 4
    assert [spec.name for spec in allreduce("a", FLOATS * 2).tensors] == ["a.0", "a.1"]


def test_an_operation_that_is_refused_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="allreduce of bool is not defined"):
            allreduce("a", ((DType.BOOL, (1,)),))


@pytest.mark.parametrize("sizes", [[[1]], [[1], [16], [17]], [[0], [3, 40], [0], [5, 0]]])
def test_layouts_one_behind_the_other_are_that_of_all_tensors(sizes: list[list[int]]) -> None:
    layouts = [Layout.of(numels, DType.FLOAT32, DType.FLOAT16) for numels in sizes]
    whole = Layout.of([numel for numels in sizes for numel in numels], DType.FLOAT32, DType.FLOAT16)
    assert concatenated(layouts) == whole


def test_only_floats_that_travel_are_cast() -> None:
    specs = (
        TensorSpec("x", DType.FLOAT32, (40,)),
        TensorSpec("n", DType.INT64, (2,)),
        TensorSpec("y", DType.FLOAT32, ()),
    )
    request = Allreduce("a", specs, wire_dtype=DType.FLOAT16)
    (integers, as_integers), (floats, as_floats) = request._layouts
    assert (integers, as_integers.dtype, as_integers.wire_dtype) == ([1], DType.INT64, DType.INT64)
    assert (floats, as_floats.dtype, as_floats.wire_dtype) == ([0, 2], DType.FLOAT32, DType.FLOAT16)
    assert (as_floats.numels, as_floats.offsets) == ([40, 1], [0, 64])
    at_home = Allreduce("a", (specs[0], specs[2]), wire_dtype=DType.FLOAT16, place=(0, 64))._home_layout
    assert (at_home.dtype, at_home.wire_dtype, at_home.offsets) == (DType.FLOAT32, DType.FLOAT32, [0, 48])
