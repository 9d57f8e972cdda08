"""Allgathers, alltoalls, reducescatters and barriers that repeat: one native call each, if of few bytes.

What each rank gives may be another amount each time, and more than passes at once on some ranks only.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite._native import PlacesInTurn
from hvdlite.coordinator.at_once import AtOnce
from hvdlite.errors import MismatchError
from hvdlite.operations.reducescatter import row_bounds
from hvdlite.recorder import Lane
from hvdlite.torch.shortcuts import performed
from hvdlite.torch.start import new_result
from machines_lab import ONE_AND_SEVERAL, ONE_MACHINE, WORLD, Machines, running_on
from prepared_lab import coordinator_runs_free, freeze, left_to_python
from torch_lab import rank_input

SIZE = WORLD.size
LATE_S = 0.03  # longer than a caller waits in a native call
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]

pytestmark = [pytest.mark.any_mpi, pytest.mark.not_with_three_ranks]


@pytest.fixture(scope="module", params=ONE_AND_SEVERAL, ids=str, autouse=True)
def running(request: pytest.FixtureRequest) -> Iterator[Machines]:
    with running_on(request.param):
        yield request.param


def place_bytes() -> int:
    """What a rank gives at most, with one number that says how much it is."""
    return PlacesInTurn.bytes_needed(SIZE) // SIZE // 2 // 64 * 64 - 8


def gathered(rows: list[int], number: int, width: int = 2, dtype: torch.dtype = torch.float32) -> None:
    """An allgather to which each rank gives so many rows."""
    given = [rank_input(rank + number, (count, width), torch.float32).to(dtype) for rank, count in enumerate(rows)]
    own = given[hvd.rank()].clone()
    result = hvd.allgather(own, name=f"gathered {width} {dtype}")
    assert torch.equal(result, torch.cat(given)), (rows, number)
    assert torch.equal(own, given[hvd.rank()])


def exchanged(rows: list[int], number: int, dtype: torch.dtype = torch.float32) -> None:
    """An alltoall to which each rank gives so many rows for each."""
    given = [rank_input(rank + number, (count * SIZE, 3), torch.float32).to(dtype) for rank, count in enumerate(rows)]
    me = hvd.rank()
    result = hvd.alltoall(given[me].clone(), name=f"exchanged {dtype}")
    expected = [tensor[count * me : count * (me + 1)] for tensor, count in zip(given, rows, strict=True)]
    assert torch.equal(result, torch.cat(expected)), (rows, number)


def scattered(rows: int, number: int, dtype: torch.dtype = torch.int64, width: int = 3) -> None:
    """A reducescatter of so many rows."""
    given = [((torch.arange(rows * width).reshape(rows, width) + rank + number) % 5).to(dtype) for rank in range(SIZE)]
    first, last = row_bounds(rows, SIZE)[hvd.rank() : hvd.rank() + 2]
    result = hvd.reducescatter(given[hvd.rank()].clone(), op=hvd.Sum, name=f"scattered {rows} {width} {dtype}")
    assert torch.equal(result, sum(given)[first:last]), (rows, number)  # type: ignore[index]


def test_each_is_native_once_it_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are begun without Python, and each has come to its end so: where ranks share a core some are late."""
    begun, ended = (left_to_python(monkeypatch, method) for method in (AtOnce.run, AtOnce._go_on))
    known: set[str] = set()
    native: set[str] = set()

    def step(number: int) -> None:
        gathered([rank + 1 for rank in range(SIZE)], number)
        exchanged([rank + 1 for rank in range(SIZE)], number)
        scattered(2 * SIZE + 1, number)
        hvd.barrier()

    for number in range(3000):
        begun.clear(), ended.clear()
        step(number)
        left = len(begun) if coordinator_runs_free() else 4  # nobody is asked before there is a plan
        known.update(begun)
        native |= known - {*begun, *ended}
        left += 4 - len(native)
        if hvd.allreduce(torch.tensor([left]), op=hvd.Max, name="by Python").item() <= 1:
            return  # the first one, after that question
    raise AssertionError(f"begun by Python: {begun}; never ended without: {known - native}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types(dtype: torch.dtype) -> None:
    for number in range(30):
        gathered([rank + 1 for rank in range(SIZE)], number, dtype=dtype)
        exchanged([2] * SIZE, number, dtype)
        if dtype is not torch.bool:
            scattered(SIZE + 1, number, dtype)


@pytest.mark.parametrize("extra", [-1, 0, 1], ids=["less", "all", "more"])
def test_as_much_as_there_is_room_for(extra: int) -> None:
    """Of all ranks, and then of one alone."""
    nbytes = place_bytes() + extra
    for number in range(30):
        gathered([nbytes] * SIZE, number, 1, torch.uint8)
    for number in range(30):
        gathered([nbytes if rank == SIZE - 1 else 1 for rank in range(SIZE)], number, 1, torch.uint8)
    scattered_bytes = PlacesInTurn.bytes_needed(SIZE) // SIZE // 2 // 64 * 64 + extra
    for number in range(30):
        scattered(scattered_bytes, number, torch.uint8, 1)


def test_other_amounts_each_time() -> None:
    """None, few, and more than there is room for."""
    generator = random.Random(1)
    choices = [0, 0, 1, 2, 5, place_bytes() // 8, place_bytes() // 8 + 1, 20_000]
    for number in range(300):
        rows = [generator.choice(choices) for _ in range(SIZE)]
        gathered(rows, number)
        exchanged([count % 7 for count in rows], number)
        if number % 7 == 0:  # as often as not the same as before
            for again in range(3):
                gathered(rows, number + again)


@pytest.mark.parametrize("rows", [100, 5_000, 50_000, 400_000])
def test_sizes(rows: int) -> None:
    """Also of results that ask for large pages, and with a row that is nobody's to divide."""
    for number in range(20 if rows < 50_000 else 8):
        gathered([rows] * SIZE, number)
        exchanged([rows // SIZE] * SIZE, number)
        scattered(rows + 1, number, width=1)


def test_scalars_and_nothing() -> None:
    for number in range(30):
        result = hvd.allgather(torch.tensor(float(hvd.rank() + number)), name="scalar")
        assert result.tolist() == [rank + number for rank in range(SIZE)]
        assert hvd.allgather(torch.empty(0, 4), name="nothing").shape == (0, 4)
        assert hvd.alltoall(torch.empty(0, 4), name="nothing for all").shape == (0, 4)
        assert hvd.reducescatter(torch.empty(0, 4), name="nothing reduced").shape == (0, 4)


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.bf16], ids=["plain", "bf16"])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
def test_reductions_are_those_of_an_allreduce(op: int, compression: type[hvd.Compressor]) -> None:
    tensor = rank_input(hvd.rank(), (2 * SIZE + 1, 5), torch.float32)
    factors = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    first, last = row_bounds(2 * SIZE + 1, SIZE)[hvd.rank() : hvd.rank() + 2]
    expected = hvd.allreduce(tensor, op=op, compression=compression, **factors)[first:last]  # type: ignore[arg-type]
    for _ in range(30):
        result = hvd.reducescatter(tensor, op=op, compression=compression, name="reduced", **factors)  # type: ignore[arg-type]
        assert torch.equal(result, expected)


def test_another_kind_of_operation_on_the_same_tensor() -> None:
    own = torch.arange(2.0 * SIZE) + 10 * hvd.rank()
    everything = torch.cat([torch.arange(2.0 * SIZE) + 10 * rank for rank in range(SIZE)])
    mine = torch.cat([torch.arange(2.0) + 2 * hvd.rank() + 10 * rank for rank in range(SIZE)])
    freeze(lambda _: hvd.allgather(own))
    for _ in range(3):
        assert torch.equal(hvd.allgather(own), everything)
        assert torch.equal(hvd.alltoall(own), mine)
    freeze(lambda _: hvd.alltoall(own))
    assert torch.equal(hvd.allgather(own), everything)
    assert torch.equal(hvd.alltoall(own), mine)


def test_results_are_new_each_time() -> None:
    kept = []
    for number in range(30):
        own = torch.full((SIZE,), float(number))
        kept.append([hvd.allgather(own), hvd.alltoall(own), hvd.reducescatter(own)])
    for number, results in enumerate(kept):
        assert all((result == number).all() for result in results)


def test_no_room_is_made_for_what_nobody_has_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank may have more than there is memory for, if all had it."""
    made = []

    def noted(source: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        made.append(shape[0])
        return new_result(source, shape)

    monkeypatch.setattr("hvdlite.torch.repeated_rows.new_result", noted)

    for number in range(300):
        own = torch.full((0 if hvd.rank() else 1_000, 2), float(number))
        assert (hvd.allgather(own, name="of one rank") == number).all()
        if hvd.allreduce(torch.tensor([float(len(made) > 2)]), op=hvd.Min, name="all have made").item():
            break
    assert made and max(made) == 1_000


def test_a_result_has_memory_of_its_size() -> None:
    """Though room was made for what ranks gave the last time."""
    freeze(lambda _: hvd.allgather(torch.ones(100, 2), name="grown"))
    for rows in (100, 1, 100):
        result = hvd.allgather(torch.ones(100 if hvd.rank() == 0 else rows, 2), name="grown")
        assert result.untyped_storage().nbytes() == result.nbytes == 8 * (100 + rows * (SIZE - 1))


@pytest.mark.skipif(SIZE == 1, reason="needs ranks that differ")
@pytest.mark.parametrize(
    ("before", "then"), [(2, performed), (3, new_result)], ids=["by Python", "by the shortcut, which knows these rows"]
)
@pytest.mark.parametrize("rows", [100, 4_000], ids=["which fits", "which does not fit"])
def test_a_thread_that_comes_in_between_is_given_something_else(
    rows: int, before: int, then: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment at which a caller makes room, and its operation, as a handler of a signal may, too."""
    few, much = [3] * SIZE, [3, *[rows] * (SIZE - 1)]

    def step(rows: list[int], number: int = 0) -> None:
        gathered(rows, number)
        hvd.allreduce(torch.ones(1), op=hvd.Min, name="free")

    freeze(lambda number: gathered(few, number))
    for number in range(3):
        step(few, number)
        step([before] * SIZE, number)
    others = [much]

    def after_another(*args: Any) -> Any:
        while others:
            step(others.pop())
        return then(*args)

    if hvd.rank() == 0:
        monkeypatch.setattr(f"hvdlite.torch.repeated_rows.{then.__name__}", after_another)
    else:
        others.clear()
        step(much)
    step(much)
    while others:  # a rank was late, so that the one before was done another way
        step(others.pop())
    step(few, 2)


def test_gradients_go_their_way_all_the_same() -> None:
    for _ in range(30):
        own = torch.ones(SIZE, 2)
        hvd.allgather(own, name="a"), hvd.alltoall(own, name="b"), hvd.reducescatter(own, name="c")
    own = torch.ones(SIZE, 2, requires_grad=True)
    for function, name in ((hvd.allgather, "a"), (hvd.alltoall, "b"), (hvd.reducescatter, "c")):
        torch.autograd.backward(function(own, name=name).sum())
        assert own.grad is not None
        own.grad = None


def late_now_and_then(step: Callable[[int], None]) -> None:
    """Ranks by turns, for longer than others wait in a native call."""
    freeze(step)
    generator = random.Random(2)
    for number in range(12):
        late = generator.randrange(SIZE)
        if hvd.rank() == late:
            time.sleep(LATE_S)
        step(number)
    freeze(step)


STEPS: dict[str, Callable[[int], None]] = {
    "allgather": lambda number: gathered([rank + 1 for rank in range(SIZE)], number),
    "allgather of other amounts": lambda number: gathered([(rank + number) % 3 for rank in range(SIZE)], number),
    "allgather of too much": lambda number: gathered([20_000 * ((rank + number) % 2) for rank in range(SIZE)], number),
    "alltoall": lambda number: exchanged([rank + 1 for rank in range(SIZE)], number),
    "reducescatter": lambda number: scattered(2 * SIZE + 1, number),
    "barrier": lambda number: hvd.barrier(),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_what_was_begun_is_finished_when_the_late_come(step: Callable[[int], None]) -> None:
    late_now_and_then(step)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_who_waits_hears_of_other_things(step: Callable[[int], None]) -> None:
    """What a native call has begun is left to the coordinator."""
    freeze(step)

    def do_something_else() -> None:
        time.sleep(0.005)
        hvd.allreduce(torch.ones(1), name="other")

    for _ in range(5):
        other = threading.Thread(target=do_something_else)
        other.start()
        if hvd.rank() == SIZE - 1:
            time.sleep(0.01)
        step(1)
        other.join()


def test_inference_mode() -> None:
    """A result is made by one thread, and gets another size by another one."""

    def step(number: int) -> None:
        with torch.inference_mode():
            STEPS["allgather of other amounts"](number)

    late_now_and_then(step)


def test_a_timeline_shows_each_once(running: Machines) -> None:
    lanes = (Lane.ALLGATHER,) if running == ONE_MACHINE else (Lane.RING, Lane.NODE_ALLREDUCE)  # of packets
    freeze(STEPS["allgather of other amounts"])
    recorder = hvdlite.runtime().group.recorder
    recorder.start()
    try:
        for number in range(9):
            STEPS["allgather of other amounts"](number)
        assert sum(event[1] in lanes for event in recorder.drain()[0]) == 9
    finally:
        recorder.stop()


@pytest.mark.skipif(SIZE == 1, reason="needs ranks that differ")
@pytest.mark.parametrize(
    ("step", "name"),
    [
        (STEPS["allgather"], "gathered 2 torch.float32"),
        (STEPS["reducescatter"], f"scattered {2 * SIZE + 1} 3 torch.int64"),
    ],
    ids=["allgather", "reducescatter"],
)
def test_another_operation_of_this_name_is_a_mismatch_that_all_hear_of(step: Callable[[int], None], name: str) -> None:
    freeze(step)
    with pytest.raises(MismatchError):
        if hvd.rank() == 0:
            step(1)
        else:
            hvd.allgather(torch.ones(1, 5), name=name)
    freeze(step)


@pytest.mark.skipif(SIZE == 1, reason="needs another set than that of all")
def test_process_sets() -> None:
    made = hvd.add_process_set([SIZE - 1])
    try:
        for number in range(30):
            if made.included():
                assert hvd.allgather(torch.tensor([number]), process_set=made).tolist() == [number]
                hvd.barrier(process_set=made)
            gathered([1] * SIZE, number)
    finally:
        hvd.remove_process_set(made)
