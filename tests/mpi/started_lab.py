"""Programs of asynchronous allreduces of few bytes that repeat, and whether all of one was started at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from harness_ranks import harness_ranks
from hvdlite._native import StartedBurst
from hvdlite.errors import HorovodInternalError
from hvdlite.torch.handle import HandleInBurst, StartedHandle

WORLD = harness_ranks()
TURNS = 20
FEW = 5


@pytest.fixture(autouse=True)
def running() -> Iterator[None]:
    """hvdlite.torch, initialized anew for each test of a module that takes this name."""
    hvd.init()
    yield
    hvd.shutdown()


def total(factor: float = 1.0) -> float:
    return factor * sum(range(1, hvd.size() + 1))


class Sum:
    """An operation under way: what it must bring, and whether it was started at once."""

    def __init__(self, value: float, name: str | None, numel: int = 3, *, in_place: bool = True) -> None:
        self.given = torch.full((numel,), (hvd.rank() + 1) * value)
        begin = hvd.allreduce_async_ if in_place else hvd.allreduce_async
        self.handle: Any = begin(self.given, op=hvd.Sum, name=name)
        self.is_in_place = in_place
        self.expected = torch.full((numel,), total(value))

    @property
    def is_started(self) -> bool:
        if self.is_in_burst:
            return self.is_native or self.handle._burst.complete is not None
        return isinstance(self.handle, StartedHandle)

    @property
    def is_native(self) -> bool:
        """Whether it is part of a burst of native code."""
        return self.is_in_burst and isinstance(self.handle._burst, StartedBurst)

    @property
    def is_in_burst(self) -> bool:
        return isinstance(self.handle, HandleInBurst)

    def check(self) -> None:
        result = hvd.synchronize(self.handle)
        assert (result is self.given) == self.is_in_place
        assert torch.equal(result, self.expected), (result, self.expected)
        assert hvd.synchronize(self.handle) is result


def fails_in_a_child(one: Sum) -> bool:
    """Whether ``one`` fails in a forked child, which has no part in the job."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            one.check()
        except HorovodInternalError:
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


class Alone:
    """Turns of one operation that is waited for before the next."""

    def __init__(self, name: str | None = "alone", numel: int = 3, *, in_place: bool = True) -> None:
        self._made = name, numel, in_place
        self.first_name = name
        self.turn = 0

    def begin(self) -> list[Sum]:
        self.turn += 1
        name, numel, in_place = self._made
        return [Sum(float(self.turn % 9), name, numel, in_place=in_place)]

    def step(self) -> bool:
        """Whether all of it was started."""
        begun = self.begin()
        are_started = all(one.is_started for one in begun)
        for one in begun:
            one.check()
        return are_started


class Few(Alone):
    """Turns of several, which are waited for together."""

    def __init__(self, prefix: str = "few") -> None:
        self._prefix = prefix
        self.first_name = f"{prefix} 0"
        self.turn = 0

    def begin(self) -> list[Sum]:
        self.turn += 1
        return self.go_on(0, FEW)

    def go_on(self, first: int, end: int) -> list[Sum]:
        """Operations of a turn, from ``first`` to before ``end``."""
        return [
            Sum(float((self.turn + i) % 9), None if i % 3 == 2 else f"{self._prefix} {i}", 3 + i, in_place=i % 2 == 0)
            for i in range(first, end)
        ]

    def is_native(self) -> bool:
        """Whether native code did all of a turn as one burst, of which nobody waits for the first before the last."""
        begun = self.begin()
        are_native = all(one.is_native for one in begun) and len({id(one.handle._burst) for one in begun}) == 1
        for one in begun:
            one.check()
        return are_native


def until_native() -> Few:
    """What native code does as one burst on all ranks; where they are slow a plan divides one, and another is made."""
    for attempt in range(100):
        program = Few(f"{attempt}. few")
        for _ in range(3):
            are_native = [program.is_native() for _ in range(TURNS)]
            if all(WORLD.allgather(all(are_native[-3:]))):
                return program
    raise AssertionError(f"always by Python: {are_native}")


def until_started(program: Alone) -> None:
    """Repeat it until all ranks have started all of it at once; where they are slow a plan divides it."""
    for attempt in range(100):
        are_started = [program.step() for _ in range(TURNS)]
        if all(WORLD.allgather(all(are_started[-3:]))):
            return
        if attempt % 4 == 3:
            hvd.allreduce(torch.ones(1), name=f"attempt {attempt}")  # so that another plan is made
    raise AssertionError(f"not started: {are_started}")
