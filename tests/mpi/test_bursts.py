"""Asynchronous allreduces that repeat: the same results as ever, collected or not, whatever comes between."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from harness_ranks import harness_ranks
from hvdlite.coordinator.collector import Collector
from hvdlite.torch.handle import HandleInBurst

WORLD = harness_ranks()
TURNS = 12
"""More than it takes until an order is frozen."""
SIZES = [0, 1, 7, 1024, 5000, 9000]
DTYPES = [torch.float32, torch.float64, torch.int32, torch.bfloat16]

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.skipif(WORLD.size == 1, reason="needs ranks that wait for one another"),
]


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


class Program:
    """Allreduces, begun one after the other; each of them can be told from all others by its result.

    Attributes:
        collected: how many of them were parts of bursts.
    """

    def __init__(self, count: int = 24, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.numels = [SIZES[i % len(SIZES)] for i in range(count)]
        self.turn = 0
        self.collected = 0

    def input(self, index: int, rank: int) -> torch.Tensor:
        return torch.full((self.numels[index],), (rank + 1) * (index % 5 + 1) + self.turn % 3).to(self.dtype)

    def begin(self, index: int) -> Callable[[], str | None]:
        """What waits for the operation, and says what is wrong with its result."""
        own = self.input(index, hvd.rank())
        name = None if index % 4 == 3 else f"operation {index}"
        if index % 3:
            handle = hvd.allreduce_async_(own, op=hvd.Sum, name=name)
        else:
            handle = hvd.allreduce_async(own, op=hvd.Sum, name=name)
        turn = self.turn
        self.collected += isinstance(handle, HandleInBurst)

        def problem() -> str | None:
            result = hvd.synchronize(handle)
            now, self.turn = self.turn, turn
            expected = sum(self.input(index, rank) for rank in range(WORLD.size))
            self.turn = now
            if (result is own) != bool(index % 3):
                return f"operation {index} has another tensor"
            return None if torch.equal(result, expected) else f"operation {index} is {result[:3]} for {expected[:3]}"

        return problem

    def step(self) -> list[str]:
        waits = [self.begin(index) for index in range(len(self.numels))]
        problems = [wait() for wait in waits]
        self.turn += 1
        return [problem for problem in problems if problem]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_repeats_is_collected_and_right(dtype: torch.dtype) -> None:
    program = Program(dtype=dtype)
    for _ in range(10):  # a plan that is disturbed again and again, as on a busy machine, is made later and later
        for _ in range(100):
            assert not program.step()
        if min(hvd.allgather_object(program.collected)) > len(program.numels):
            return
    raise AssertionError(f"{program.collected} of {1000 * len(program.numels)} operations were collected")


@pytest.mark.parametrize("count", [2, 16, 5])
def test_equal_operations_without_names_are_done_together(count: int) -> None:
    """As many as are begun before the first is waited for, also where it is another number before and after."""
    own = [torch.full((256,), float(WORLD.rank + i)) for i in range(count)]

    def step(tensors: list[torch.Tensor]) -> None:
        handles = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in tensors]
        for i, handle in enumerate(handles):
            assert hvd.synchronize(handle)[0] == sum(range(WORLD.size)) + i * WORLD.size

    def buckets_of_a_step() -> int:
        hvd.barrier()
        before = hvdlite.statistics()["buckets"]
        for _ in range(20):
            step(own)
        return hvdlite.statistics()["buckets"] - before

    for _ in range(100):
        step(own[:1])
    for _ in range(20):  # who is slow on a busy machine disturbs it
        if max(hvd.allgather_object(buckets_of_a_step())) <= 40:
            break
    else:
        raise AssertionError("operations were not done together")
    for fewer in range(count):
        step(own[:fewer])


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_who_waits_at_once_may_be_the_last_of_a_burst(
    in_place: bool, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = []
    complete = Collector._complete
    monkeypatch.setattr(Collector, "_complete", lambda *taken: (completed.append(taken), complete(*taken)))
    begin = hvd.allreduce_async_ if in_place else hvd.allreduce_async
    await_one = hvd.allreduce_ if in_place else hvd.allreduce

    def step(turn: int) -> None:
        own = [torch.full((256 + i,), float(WORLD.rank + i + turn % 5)) for i in range(3)]
        names = [f"ended {in_place} {i}" if is_named else None for i in range(3)]
        handles = [begin(own[i], op=hvd.Sum, name=names[i]) for i in range(2)]
        last = await_one(own[2], op=hvd.Sum, name=names[2])
        for i, result in enumerate([*map(hvd.synchronize, handles), last]):
            assert (result is own[i]) == in_place
            assert torch.equal(result, torch.full((256 + i,), sum(range(WORLD.size)) + WORLD.size * (i + turn % 5.0)))

    for _ in range(20):  # who is slow on a busy machine divides it
        for turn in range(20):
            step(turn)
        if min(hvd.allgather_object(len(completed))) > 10:
            return
    raise AssertionError("operations were not done together")


def test_more_than_one_burst_may_be_under_way() -> None:
    program = Program(count=300)
    for _ in range(TURNS):
        assert not program.step()


@pytest.mark.parametrize("how", ["a wait", "a poll", "a pause", "another operation", "one less", "blocking"])
def test_what_deviates(how: str) -> None:
    """At every place, on all ranks or on one; those that only wait may."""
    draw = random.Random(how)
    program = Program()
    for place in range(len(program.numels)):
        for _ in range(draw.randrange(3, 6)):
            assert not program.step()
        is_here = how not in ("a wait", "a poll", "a pause") or draw.randrange(hvd.size()) == hvd.rank()
        waits = []
        for index in range(len(program.numels)):
            if index == place and is_here:
                if how == "a wait" and waits:
                    assert waits[place * 7 % len(waits)]() is None
                elif how == "a pause" and place % 6 == 0:
                    time.sleep(0.15)
                elif how == "another operation":
                    assert hvd.allgather(torch.ones(1), name="another").numel() == hvd.size()
                elif how == "blocking":
                    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="blocking").item() == hvd.size()
            if how == "a poll" and index == place + 1 and is_here:
                own = hvd.allreduce_async_(torch.ones(1), op=hvd.Sum, name="polled")
                while not hvd.poll(own):
                    time.sleep(1e-3)
            elif how == "a poll" and index == place + 1:
                hvd.allreduce_async_(torch.ones(1), op=hvd.Sum, name="polled")
            if how != "one less" or index != place:
                waits.append(program.begin(index))
        assert not [problem for problem in (wait() for wait in waits) if problem]
        program.turn += 1


def test_a_poll_in_the_middle_comes_true() -> None:
    """The rest of the burst is submitted only when the first of it is done, on every rank."""
    program = Program(count=8)
    for _ in range(TURNS):
        assert not program.step()
    for _ in range(3):
        handle = hvd.allreduce_async_(torch.full((1024,), 1.0), op=hvd.Sum, name="asked")
        program.begin(0)()
        while not hvd.poll(handle):
            time.sleep(1e-3)
        assert hvd.synchronize(handle)[0] == hvd.size()


def test_a_name_that_is_in_flight() -> None:
    tensors = [torch.ones(16) for _ in range(8)]

    def begin() -> list[hvd.Handle]:
        return [hvd.allreduce_async_(each, op=hvd.Sum, name=f"twice {i}") for i, each in enumerate(tensors)]

    for _ in range(TURNS):
        for handle in begin():
            hvd.synchronize(handle)
    handles = begin()
    with suppress(hvdlite.DuplicateNameError):  # unless all of them were done by then
        begin()
    for handle in handles:
        hvd.synchronize(handle)
    hvd.barrier()


def test_memory_that_is_taken_away_is_kept_alive() -> None:
    for _ in range(TURNS):
        tensors = [torch.ones(1 << 15) for _ in range(6)]
        handles = [hvd.allreduce_async_(each, op=hvd.Sum, name=f"set {i}") for i, each in enumerate(tensors)]
        for each in tensors:
            each.set_()  # type: ignore[call-overload]
        del tensors
        for handle in handles:
            hvd.synchronize(handle)


def test_what_is_open_when_hvdlite_is_shut_down_ends_alike() -> None:
    """On all ranks; what one of them has not begun fails."""
    for _ in range(10):
        program = Program(count=8)
        for _ in range(TURNS):
            assert not program.step()
        waits = [program.begin(index) for index in range(3 if WORLD.rank else 2)]
        WORLD.exchange(0, 60.0)  # all have begun
        hvd.shutdown()
        failed = [is_failed(wait) for wait in waits]
        assert len(set(WORLD.exchange(failed[0] + 2 * failed[1], 60.0))) == 1
        assert failed[2:] in ([], [True])
        hvd.init()
    assert not Program(count=8).step()


def is_failed(wait: Callable[[], str | None]) -> bool:
    """If not, it has succeeded."""
    try:
        assert wait() is None
    except hvdlite.ShutDownError:
        return True
    return False
