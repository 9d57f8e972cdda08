"""Operations that repeat until they are one native call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.coordinator.at_once import AtOnce
from hvdlite.operations.prepared_allreduce import PreparedAllreduce

SMALL = 8 << 10  # bytes that pass at once, wherever they are
REPEATS = 20
"""More than it takes until an order is frozen."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The operations that were done, or left to the coordinator, by a native call: how each ended."""
    return ends_of(PreparedAllreduce, monkeypatch)


def ends_of(kind: type[Any], monkeypatch: pytest.MonkeyPatch, known: list[Any] | None = None) -> list[Any]:
    """How each `run` of a ``kind`` of operation ends from here on; added to ``known``, where that is given."""
    ends: list[Any] = [] if known is None else known
    run = kind.run

    def counted(*args: object) -> Any:
        ends.append(run(*args))
        return ends[-1]

    monkeypatch.setattr(kind, "run", counted)
    return ends


def left_to_python(monkeypatch: pytest.MonkeyPatch, *methods: Callable[..., object]) -> list[str]:
    """The operations for which these ``methods`` of `AtOnce` are called from here on, by their names."""
    found: list[str] = []

    def watch(method: Callable[..., object]) -> None:
        def seen(self: AtOnce, operation: Any, *rest: object) -> object:
            found.append(operation.label)
            return method(self, operation, *rest)

        monkeypatch.setattr(AtOnce, method.__name__, seen)

    for method in methods:
        watch(method)
    return found


def total(rank_value: Callable[[int], float]) -> float:
    return sum(rank_value(rank) for rank in range(hvd.size()))


def freeze(step: Callable[[int], object]) -> None:
    """Repeat ``step`` until its order is frozen on all ranks."""
    for number in range(200):
        step(number)
        if hvd.allreduce(torch.tensor([float(coordinator_runs_free())]), op=hvd.Min, name="free").item():
            return
    raise AssertionError("nothing was frozen")


def coordinator_runs_free() -> bool:
    return hvdlite.runtime().group.world.coordinator.runs_free


def early_bytes() -> int:
    """Of an operation that runs free across nodes, at most."""
    early = hvdlite.runtime().group.world.engine.early
    assert early is not None
    return early.most_bytes
