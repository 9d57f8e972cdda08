"""Blocking allreduces that repeat, as one call, where something comes between or one rank does otherwise."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
import machines_lab
from machines_lab import ONE_MACHINE, WORLD, Machines
from prepared_lab import early_bytes, freeze, runs, total

assert runs  # a fixture
machine_of = machines_lab.machine_of

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.skipif(WORLD.size == 1, reason="needs ranks that wait for one another"),
]


@pytest.mark.parametrize("seed", range(6))
def test_what_comes_between(runs: list[int], seed: int, machine_of: Machines) -> None:
    """At every place of a plan: more, less, another shape, no waiting, other operations, another thread, a join."""
    generator = random.Random(seed)
    names = ["a", None, "b", "c"]
    sizes = [1, 3, 2100, 40_000] if machine_of == ONE_MACHINE else [1, 3, 1000, early_bytes() // 4]

    def reduce(name: str | None, numel: int, number: int, in_place: bool = True) -> None:
        value = torch.full((numel,), float(hvd.rank() + number))
        result = (hvd.allreduce_ if in_place else hvd.allreduce)(value, op=hvd.Sum, name=name)
        assert torch.equal(result, torch.full((numel,), total(lambda rank: rank + number))), (name, numel, number)

    def step(number: int) -> None:
        for name, numel in zip(names, sizes, strict=True):
            reduce(name, numel, number)

    def other(number: int) -> None:
        way = generator.randrange(7)
        if way == 0:
            reduce("more", 5, number)
        elif way == 1:
            reduce(names[2], 77, number)
        elif way == 2:
            handle = hvd.allreduce_async(torch.full((9,), float(hvd.rank())), op=hvd.Sum, name="asynchronous")
            assert hvd.synchronize(handle)[8].item() == total(float)
        elif way == 3:
            assert hvd.allgather(torch.full((hvd.rank() + 1,), 1.0)).sum().item() == total(lambda rank: rank + 1)
        elif way == 4:
            thread = threading.Thread(target=reduce, args=("of a thread", 6, number))
            thread.start()
            thread.join()
        elif way == 5:
            hvd.barrier()
        else:
            hvd.join()

    for place in range(len(names)):
        freeze(step)
        for number in range(generator.randrange(4)):
            step(number)
        for at, (name, numel) in enumerate(zip(names, sizes, strict=True)):
            if at == place:
                other(place)
                if generator.random() < 0.3:
                    continue  # and one less
            reduce(name, numel, place, in_place=generator.random() < 0.5)
    assert runs


class Steps:
    """Blocking allreduces, one after the other; each of them can be told from all others by its result."""

    names = ("first", "second", None, "last")
    numels = (1, 3, 1000, 200)

    def value(self, place: int, number: int) -> torch.Tensor:
        return torch.full((self.numels[place],), float(hvd.rank() + 5 * place + number))

    def check(self, result: torch.Tensor, place: int, number: int) -> None:
        expected = torch.full((self.numels[place],), total(lambda rank: rank + 5 * place + number))
        assert torch.equal(result, expected), (place, number)

    def reduce(self, place: int, number: int) -> None:
        self.check(hvd.allreduce(self.value(place, number), op=hvd.Sum, name=self.names[place]), place, number)

    def begin(self, place: int, number: int) -> Callable[[], None]:
        handle = hvd.allreduce_async(self.value(place, number), op=hvd.Sum, name=self.names[place])
        return lambda: self.check(hvd.synchronize(handle), place, number)

    def rest(self, start: int, number: int) -> None:
        for place in range(start, len(self.names)):
            self.reduce(place, number)

    def __call__(self, number: int) -> None:
        self.rest(0, number)


def late(steps: Steps, place: int, number: int) -> None:
    time.sleep(0.015)  # longer than a plan waits for what is missing
    steps.rest(place, number)


def strided(steps: Steps, place: int, number: int) -> None:
    value = steps.value(place, number)
    wide = torch.stack([value, -value], dim=1)
    steps.check(hvd.allreduce(wide[:, 0], op=hvd.Sum, name=steps.names[place]), place, number)
    steps.rest(place + 1, number)


def tracked(steps: Steps, place: int, number: int) -> None:
    value = steps.value(place, number).requires_grad_()
    steps.check(hvd.allreduce(value, op=hvd.Sum, name=steps.names[place]).detach(), place, number)
    steps.rest(place + 1, number)


def asynchronous(steps: Steps, place: int, number: int) -> None:
    steps.begin(place, number)()
    steps.rest(place + 1, number)


def awaited_later(steps: Steps, place: int, number: int) -> None:
    wait = steps.begin(place, number)
    steps.rest(place + 1, number)
    wait()


def asynchronous_from_here(steps: Steps, place: int, number: int) -> None:
    for wait in reversed([steps.begin(at, number) for at in range(place, len(steps.names))]):
        wait()


def the_next_first(steps: Steps, place: int, number: int) -> None:
    waits = [steps.begin(at, number) for at in (place + 1,) if at < len(steps.names)]
    steps.reduce(place, number)
    for wait in waits:
        wait()
    steps.rest(place + 2, number)


def another_thread(steps: Steps, place: int, number: int) -> None:
    thread = threading.Thread(target=steps.reduce, args=(place, number))
    thread.start()
    thread.join()
    steps.rest(place + 1, number)


def more(steps: Steps, place: int, number: int) -> None:
    """The others begin that at the end of the step."""
    handle = hvd.allreduce_async(torch.full((5,), float(hvd.rank())), op=hvd.Sum, name="more")
    steps.rest(place, number)
    assert hvd.synchronize(handle)[4].item() == total(float)


def another_shape(steps: Steps, place: int, number: int) -> None:
    """All ranks hear of that."""
    with pytest.raises(hvdlite.MismatchError, match="shape is"):
        hvd.allreduce(torch.ones(77), op=hvd.Sum, name=steps.names[place])
    steps.rest(place + 1, number)


def as_ever(steps: Steps, place: int, number: int, otherwise: Callable[[Steps, int, int], None]) -> None:
    """Of the other ranks, while one does ``otherwise``."""
    if otherwise is more:
        steps.rest(place, number)
        more(steps, len(steps.names), number)
    elif otherwise is another_shape:
        with pytest.raises(hvdlite.MismatchError, match="shape is"):
            steps.reduce(place, number)
        steps.rest(place + 1, number)
    else:
        steps.rest(place, number)


@pytest.mark.parametrize(
    "otherwise",
    [
        late,
        strided,
        tracked,
        asynchronous,
        awaited_later,
        asynchronous_from_here,
        the_next_first,
        another_thread,
        more,
        another_shape,
    ],
)
def test_what_one_rank_does_otherwise(otherwise: Callable[[Steps, int, int], None], runs: list[int]) -> None:
    """At every place of a plan, while all others do what they ever do."""
    draw, steps = random.Random(otherwise.__name__), Steps()
    for place in range(len(steps.names)):
        for _ in range(3):  # what was done once by a native call does not come to Python the next time
            freeze(steps)
        for at in range(place):
            steps.reduce(at, place)
        if hvd.rank() == draw.randrange(hvd.size()):
            otherwise(steps, place, place)
        else:
            as_ever(steps, place, place, otherwise)
        steps(7)
    assert runs


def test_threads_that_do_not_know_of_one_another(runs: list[int]) -> None:
    """Each waits for its own; which comes first differs between ranks."""
    wrong: list[str] = []

    def work(name: str) -> None:
        for number in range(60):
            value = torch.full((2,), float(hvd.rank() + number))
            hvd.allreduce_(value, op=hvd.Sum, name=name)
            if value[1].item() != total(lambda rank, number=number: rank + number):  # type: ignore[misc]
                wrong.append(f"{name}: {number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
