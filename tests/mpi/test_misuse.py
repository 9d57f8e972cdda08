"""Misuse of hvdlite.torch: the same error on every rank, with tensor, ranks and both values; then all goes on.

Every door (synchronous, asynchronous, in place, grouped) is tried with everything in which ranks can contradict one
another, on all ranks and on another process set.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.errors import DuplicateNameError, HorovodInternalError, MismatchError, NotInitializedError, UsageError

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.not_with_three_ranks,
    pytest.mark.usefixtures("running"),
]

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Door:
    """One public function that communicates tensors.

    Args:
        call: (tensors, options) -> its result, waited for.
        takes: the options in which ranks can contradict one another.
    """

    kind: str
    call: Callable[[Tensors, dict[str, Any]], Any]
    takes: tuple[str, ...] = ()
    is_grouped: bool = False


def _doors() -> dict[str, Door]:
    doors = {}
    scales = ("op", "prescale_factor", "postscale_factor")
    for kind, takes in {
        "allreduce": scales, "reducescatter": scales, "allgather": (), "alltoall": (), "broadcast": ("root_rank",),
    }.items():  # fmt: skip
        for name in (
            f"{group}{kind}{wait}{place}"
            for group in ("", "grouped_")
            for wait in ("", "_async")
            for place in ("", "_")
        ):
            function = getattr(hvd, name, None)
            if function is not None:
                compresses = kind in ("allreduce", "reducescatter") and not name.endswith(("_async", "_"))
                more = ("compression",) * compresses
                doors[name] = Door(kind, _caller(function, name), (*takes, *more), name.startswith("grouped_"))
    return doors


def _caller(function: Callable[..., Any], name: str) -> Callable[[Tensors, dict[str, Any]], Any]:
    def call(tensors: Tensors, options: dict[str, Any]) -> Any:
        if "broadcast" in name and "root_rank" not in options:
            options = {"root_rank": options.get("process_set", hvd.global_process_set).ranks[0], **options}
        result = function(tensors if name.startswith("grouped_") else tensors[0], **options)
        return hvd.synchronize(result) if "_async" in name else result

    return call


DOORS = _doors()
ROWS = 12  # divide by 2, 3 and 4


@pytest.fixture(params=["all", "pair"])
def chosen(request: pytest.FixtureRequest) -> Iterator[hvd.ProcessSet]:
    """All ranks, or the first and the last of at least three."""
    if request.param == "all":
        yield hvd.global_process_set
        return
    made = hvd.add_process_set([0, hvd.size() - 1]) if hvd.size() > 2 else hvd.global_process_set
    yield made
    hvd.remove_process_set(made)


def tensors_of(door: Door, **options: Any) -> Tensors:
    return [torch.ones(ROWS, 2, **options) for _ in range(1 + door.is_grouped)]


def goes_on(door: Door, process_set: hvd.ProcessSet) -> None:
    """The same door, used rightly, under the same name and under none."""
    for name in ("weight", None):
        options = {"op": hvd.Sum} if "op" in door.takes else {}
        result = door.call(tensors_of(door), {"name": name, "process_set": process_set, **options})
        size = process_set.size()
        rows = {"allgather": ROWS * size, "reducescatter": ROWS // size}.get(door.kind, ROWS)
        value = float(size) if "op" in door.takes else 1.0
        if isinstance(result, tuple):  # of an alltoall, and what came from whom
            result = result[0]
        for tensor in result if door.is_grouped else [result]:
            assert torch.equal(tensor, torch.full((rows, 2), value))


def contradiction(
    difference: str, odd: bool, door: Door, process_set: hvd.ProcessSet
) -> tuple[Tensors, dict[str, Any]]:
    """(tensors, options) of a rank."""
    tensors, options = tensors_of(door), {}
    if difference == "dtype":
        tensors[-1] = tensors[-1].double() if odd else tensors[-1]
    elif difference == "shape":
        tensors[-1] = torch.ones(ROWS, 3) if odd else tensors[-1]
    elif difference == "number":
        tensors = tensors[: 1 if odd else 2]
    else:
        ranks = process_set.ranks
        usual, other = {
            "op": (hvd.Sum, hvd.Average),
            "prescale_factor": (1.0, 0.5),
            "postscale_factor": (1.0, 0.5),
            "root_rank": (ranks[0], ranks[-1]),
            "compression": (hvd.Compression.none, hvd.Compression.fp16),
        }[difference]
        options[difference] = other if odd else usual
    return tensors, options


def expected_words(difference: str, door: Door, process_set: hvd.ProcessSet) -> str:
    ragged = " after the first dimension" * (door.kind in ("allgather", "alltoall"))
    shapes = ("(2,)", "(3,)") if ragged else (f"({ROWS}, 2)", f"({ROWS}, 3)")
    ranks = process_set.ranks
    what, usual, other = {
        "dtype": ("dtype", "float32", "float64"),
        "shape": (f"shape{ragged}", *shapes),
        "number": ("number of tensors", 2, 1),
        "op": ("op", "Sum", "Average"),
        "prescale_factor": ("prescale factor", 1.0, 0.5),
        "postscale_factor": ("postscale factor", 1.0, 0.5),
        "root_rank": ("root rank", ranks[0], ranks[-1]),
        "compression": ("compression", "none", "float16"),
    }[difference]
    most = ranks[:-1]
    those = f"rank {most[0]}" if len(most) == 1 else f"ranks {', '.join(map(str, most[:-1]))} and {most[-1]}"
    name = "weight.1" if door.is_grouped and difference in ("dtype", "shape") else "weight"
    return f"{door.kind} '{name}': {what} is {usual} on {those} but {other} on rank {ranks[-1]}. "


CONTRADICTIONS = [
    (name, difference)
    for name, door in DOORS.items()
    for difference in ("dtype", "shape", *["number"] * door.is_grouped, *door.takes)
]


@pytest.mark.parametrize(("name", "difference"), CONTRADICTIONS)
def test_contradictions(name: str, difference: str, chosen: hvd.ProcessSet) -> None:
    """The last rank of the set passes something else."""
    if hvd.size() == 1:
        pytest.skip("one rank contradicts nobody")
    if not chosen.included():
        return
    door = DOORS[name]
    odd = hvd.rank() == chosen.ranks[-1]
    tensors, options = contradiction(difference, odd, door, chosen)
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(MismatchError) as caught:
        door.call(tensors, {"name": "weight", "process_set": chosen, **options})
    assert str(caught.value).startswith(expected_words(difference, door, chosen))
    assert all(map(torch.equal, tensors, before))
    goes_on(door, chosen)


@pytest.mark.parametrize("name", [name for name in DOORS if name != "broadcast_"])
def test_different_operations_under_one_name(name: str, chosen: hvd.ProcessSet) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank contradicts nobody")
    if not chosen.included():
        return
    door = DOORS[name]
    other = DOORS["allgather" if door.kind == "broadcast" else "broadcast_"]
    mine = other if hvd.rank() == chosen.ranks[-1] else door
    with pytest.raises(
        MismatchError, match=f"'weight': operation is {door.kind} on .*but {other.kind} on rank {chosen.ranks[-1]}."
    ):
        mine.call(tensors_of(mine), {"name": "weight", "process_set": chosen})
    goes_on(door, chosen)


UNSUPPORTED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "complex": (lambda: torch.ones(ROWS, dtype=torch.complex64), r"torch.complex64; pass torch.view_as_real\("),
    "sparse": (lambda: torch.eye(ROWS).to_sparse(), r"the layout is torch.sparse_coo; pass tensor.to_dense\(\)"),
    "meta": (
        lambda: torch.ones(ROWS, device="meta"),
        r"on meta, hvdlite communicates CPU and CUDA tensors; give it memory first",
    ),
    "quantized": (lambda: quantized(ROWS), "cannot communicate torch.qint8; convert"),
    "no tensor": (lambda: [1.0] * ROWS, "expected a torch.Tensor, got list"),  # type: ignore[dict-item, return-value]
}


def quantized(rows: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop them some day
        return torch.quantize_per_tensor(torch.ones(rows), 0.5, 0, torch.qint8)


@pytest.mark.parametrize("what", UNSUPPORTED)
@pytest.mark.parametrize("name", DOORS)
def test_unsupported_tensors(name: str, what: str) -> None:
    """Refused before anything is submitted, so that one rank alone may err."""
    make, text = UNSUPPORTED[what]
    door = DOORS[name]
    if hvd.rank() == hvd.size() - 1:
        tensors = [*tensors_of(door)[:-1], make()]
        for label in ("weight", None):
            with pytest.raises(ValueError, match=text):
                door.call(tensors, {"name": label})
    goes_on(door, hvd.global_process_set)


@pytest.mark.parametrize("name", DOORS)
def test_names_that_are_no_strings(name: str) -> None:
    """Refused before anything is submitted."""
    door = DOORS[name]
    if hvd.rank() == hvd.size() - 1:
        for given, text in ((3, "3, of type int"), (b"weight", "b'weight', of type bytes")):
            with pytest.raises(TypeError, match=f"{door.kind}: name is {text}; pass a string, or None"):
                door.call(tensors_of(door), {"name": given})
    goes_on(door, hvd.global_process_set)


@pytest.mark.parametrize("name", [name for name, door in DOORS.items() if "op" in door.takes])
def test_what_does_not_reduce(name: str) -> None:
    door = DOORS[name]
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=f"{door.kind} of bool is not defined"):
            door.call(tensors_of(door, dtype=torch.bool), {"op": hvd.Max if door.kind == "allreduce" else hvd.Sum})
        for op in (77, -1, "sum", None) if door.kind == "reducescatter" else (77, -1, "sum"):
            with pytest.raises(UsageError, match=f"op is {op!r}; pass hvd.Average"):
                door.call(tensors_of(door), {"op": op})
        if door.kind == "reducescatter":
            for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
                with pytest.raises(UsageError, match="pass hvd.Average or hvd.Sum"):
                    door.call(tensors_of(door), {"op": op})
            with pytest.raises(ValueError, match="scalar"):
                door.call([torch.tensor(1.0)], {})
    goes_on(door, hvd.global_process_set)


@pytest.mark.parametrize("name", [name for name, door in DOORS.items() if door.kind == "allreduce"])
def test_adasum_where_it_cannot_be(name: str) -> None:
    size = hvd.size()
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match=f"power of two of ranks, and there are {size}"):
            DOORS[name].call(tensors_of(DOORS[name]), {"op": hvd.Adasum})
    elif size > 1:
        made = hvd.add_process_set([0])
        if made.included():
            with pytest.raises(NotImplementedError, match="global process set only"):
                DOORS[name].call(tensors_of(DOORS[name]), {"op": hvd.Adasum, "process_set": made})
        hvd.remove_process_set(made)
    goes_on(DOORS[name], hvd.global_process_set)


def every_operation(process_set: hvd.ProcessSet) -> dict[str, Callable[[], object]]:
    """Also those that move no tensors; rank 0 is the root where there is one."""

    def at(door: Door) -> Callable[[], object]:
        root = {"root_rank": 0} if door.kind == "broadcast" else {}
        return lambda: door.call(tensors_of(door), {"name": "weight", "process_set": process_set, **root})

    sparse = torch.eye(3).to_sparse()
    return {name: at(door) for name, door in DOORS.items()} | {
        "barrier": lambda: hvd.barrier(process_set=process_set),
        "broadcast_object": lambda: hvd.broadcast_object(1, 0, process_set=process_set),
        "sparse_allreduce_async": lambda: hvd.sparse_allreduce_async(sparse, "s", hvd.Average, process_set)(),
    }


def of_all_ranks() -> dict[str, Callable[[], object]]:
    parameter = torch.nn.Parameter(torch.zeros(2))
    return {
        "join": hvd.join,
        "allgather_object": lambda: hvd.allgather_object(1),
        "broadcast_parameters": lambda: hvd.broadcast_parameters([("p", parameter)], 0),
        "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([parameter], 0.1), 0),
        "add_process_set": lambda: hvd.add_process_set([0]),
        "remove_process_set": lambda: hvd.remove_process_set(hvd.ProcessSet([0])),
    }


OPERATIONS = [*every_operation(hvd.ProcessSet([0]))]


@pytest.mark.parametrize("name", OPERATIONS)
def test_ranks_outside_a_set_and_unknown_sets(name: str) -> None:
    if hvd.size() > 1:
        made = hvd.add_process_set([0])
        if hvd.rank():
            with pytest.raises(ValueError, match=rf"rank {hvd.rank()} is not a member of ProcessSet\(.*ranks=\[0\]\)"):
                every_operation(made)[name]()
        hvd.remove_process_set(made)
        with pytest.raises(ValueError, match=r"ProcessSet\(process_set_id=None, ranks=\[0\]\) is not registered"):
            every_operation(made)[name]()
    with pytest.raises(ValueError, match="is not registered; pass it to hvd.add_process_set"):
        every_operation(hvd.ProcessSet([hvd.rank()]))[name]()
    for nonsense in (1, None, [0], "global"):
        with pytest.raises(ValueError, match="process_set is .*; pass hvd.global_process_set or an hvd.ProcessSet"):
            every_operation(nonsense)[name]()  # type: ignore[arg-type]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@pytest.mark.parametrize("name", [name for name, door in DOORS.items() if door.kind == "broadcast"])
def test_invalid_roots(name: str, chosen: hvd.ProcessSet) -> None:
    if not chosen.included():
        return
    for root in {-1, hvd.size(), "0", *range(hvd.size())}.difference(chosen.ranks):
        with pytest.raises(ValueError, match=f"root_rank is {root!r}, but the ranks of this process set are"):
            DOORS[name].call([torch.ones(ROWS, 2)], {"root_rank": root, "process_set": chosen})
    goes_on(DOORS[name], chosen)


@pytest.mark.parametrize("name", ["alltoall", "alltoall_async"])
def test_bad_splits(name: str, chosen: hvd.ProcessSet) -> None:
    """On one rank only, before it sends what the others wait for."""
    if not chosen.included():
        return
    door, size = DOORS[name], chosen.size()
    for splits, text in [
        (torch.ones(size + 1, dtype=torch.int32), f"splits has {size + 1} numbers for {size} ranks"),
        (torch.full((size,), ROWS + 1), f"but the tensor has {ROWS} rows"),
        (torch.tensor([-1] + [1] * (size - 1)), r"splits are \[-1"),
        (torch.ones(size), "one dimension of integers"),
        (torch.ones(1, size, dtype=torch.int32), "one dimension of integers"),
        (torch.tensor(1), "one dimension of integers"),
    ]:
        if chosen.rank() == 0:
            with pytest.raises(ValueError, match=f"alltoall 'weight': .*{text}"):
                door.call(tensors_of(door), {"name": "weight", "splits": splits, "process_set": chosen})
    with pytest.raises(ValueError, match="scalar"):
        door.call([torch.tensor(1.0)], {"process_set": chosen})
    goes_on(door, chosen)


ASYNC = [name for name in DOORS if "_async" in name]


@pytest.mark.parametrize("name", ASYNC)
def test_a_name_in_flight(name: str, chosen: hvd.ProcessSet) -> None:
    """The last rank comes late, so that the others' operation is surely in flight; it is not disturbed."""
    if not chosen.included() or hvd.size() == 1:
        return
    door, late = DOORS[name], hvd.rank() == chosen.ranks[-1]

    def start() -> Any:
        root = {"root_rank": chosen.ranks[0]} if door.kind == "broadcast" else {}
        tensors = tensors_of(door)
        return getattr(hvd, name)(tensors if door.is_grouped else tensors[0], **root, name="weight", process_set=chosen)

    handle = None if late else start()
    if not late:
        for other in DOORS.values():
            with pytest.raises(
                DuplicateNameError, match=f"{other.kind} 'weight' was submitted while an operation of that"
            ):
                other.call(tensors_of(other), {"name": "weight", "process_set": chosen})
        assert not hvd.poll(handle)
    hvd.barrier(process_set=chosen)
    hvd.synchronize(handle or start())
    goes_on(door, chosen)


@pytest.mark.parametrize("name", DOORS)
def test_non_contiguous_tensors(name: str, chosen: hvd.ProcessSet) -> None:
    """Strided on the first rank of the set only: how a tensor lies in memory is nobody else's business."""
    if not chosen.included():
        return
    door, first = DOORS[name], hvd.rank() == chosen.ranks[0]

    def make() -> Tensors:
        values = torch.arange(2.0 * ROWS).reshape(2, ROWS)
        return [values.t() if first else values.t().contiguous() for _ in range(1 + door.is_grouped)]

    options = {"op": hvd.Max} if door.kind == "allreduce" else {}
    if door.kind == "alltoall":
        options["splits"] = torch.tensor([ROWS] + [0] * (chosen.size() - 1))
    tensors = make()
    result = door.call(tensors, {"process_set": chosen, **options})
    size, right = chosen.size(), make()[0].contiguous()
    expected = {
        "allgather": right.repeat(size, 1),
        "alltoall": right.repeat(size, 1) if first else right[:0],
        "reducescatter": right[chosen.rank() * ROWS // size : (chosen.rank() + 1) * ROWS // size],
    }.get(door.kind, right)
    for tensor in result if door.is_grouped else [result[0] if door.kind == "alltoall" else result]:
        assert torch.allclose(tensor, expected)
    if first:
        assert all(not tensor.is_contiguous() for tensor in tensors)


def test_what_is_in_flight_at_shutdown() -> None:
    """Rank 0 shuts down; the others' operations, in flight and later ones, say so; all may start again."""
    if hvd.size() == 1:
        pytest.skip("nothing is in flight with one rank")
    me = hvd.rank()
    handles = []
    for name in ASYNC if me else ():
        door = DOORS[name]
        tensors = tensors_of(door)
        root = {"root_rank": 0} if door.kind == "broadcast" else {}
        handles.append(getattr(hvd, name)(tensors if door.is_grouped else tensors[0], **root, name=f"last {name}"))
    hvd.barrier()
    if me == 0:
        hvd.shutdown()
    for handle in handles:
        with pytest.raises(HorovodInternalError, match="rank 0 has shut down hvdlite"):
            hvd.synchronize(handle)
        assert hvd.poll(handle)
    calls = every_operation(hvd.global_process_set) | of_all_ranks()
    del calls["remove_process_set"]  # that of an unknown set asks nobody
    for call in calls.values() if me else ():
        with pytest.raises(HorovodInternalError, match="rank 0 has shut down hvdlite"):
            call()
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.barrier()


def test_everything_after_shutdown() -> None:
    """And before the first init(), which is the same state."""
    calls = every_operation(hvd.global_process_set) | of_all_ranks()
    calls["Adasum"] = lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    calls["rank"] = hvd.rank
    hvd.shutdown()
    try:
        for call in calls.values():
            with pytest.raises(NotInitializedError, match=r"not running in this process; call hvd\.init\(\) first"):
                call()
    finally:
        hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
