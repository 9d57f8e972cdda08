"""Steps of operations that repeat until they come to no Python, and what of them Python does nevertheless."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.coordinator.at_once import AtOnce
from hvdlite.coordinator.collector import Collector
from hvdlite.coordinator.coordinator import Coordinator
from hvdlite.coordinator.submission import Submission
from prepared_lab import left_to_python


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that Python was asked to do at once, to collect, or to submit."""
    found = left_to_python(monkeypatch, AtOnce.run)
    take, submit = Collector.take, Coordinator.submit

    def seen_take(self: Collector, request: object, *rest: object) -> object:
        found.append(request.name)  # type: ignore[attr-defined]
        return take(self, request, *rest)  # type: ignore[arg-type]

    def seen_submit(self: Coordinator, submission: Submission, **how: bool) -> None:
        found.append(submission.label)
        submit(self, submission, **how)

    monkeypatch.setattr(Coordinator, "submit", seen_submit)
    monkeypatch.setattr(Collector, "take", seen_take)
    return found


def total(factor: float = 1.0) -> float:
    return factor * sum(range(1, hvd.size() + 1))


def most_by_python(step: Callable[[], object], by_python: list[str]) -> int:
    """Do ``step``, and one operation more: how many operations of the step some rank has left to Python."""
    by_python.clear()
    step()
    return int(hvd.allreduce(torch.tensor([float(len(by_python))]), op=hvd.Max, name="by Python").item())


def until_taken(step: Callable[[], object], by_python: list[str], most: int = 0) -> None:
    """Repeat ``step`` until Python does no more than ``most`` of its operations on any rank."""
    for _ in range(300):
        if most_by_python(step, by_python) <= most:
            return
    raise AssertionError(f"left to Python: {by_python}")


def blocking(names: Sequence[str | None], numel: int = 3) -> Callable[[], None]:
    """A step: each sum is what it must be."""
    turn = 0

    def step() -> None:
        nonlocal turn
        turn += 1
        for place, name in enumerate(names):
            tensor = torch.full((numel + place,), float((hvd.rank() + 1) * (turn % 7 + place)))
            if place % 2:
                result = hvd.allreduce_(tensor, op=hvd.Sum, name=name)
                assert result is tensor
            else:
                result = hvd.allreduce(tensor, op=hvd.Sum, name=name)
            assert torch.equal(result, torch.full_like(result, total(turn % 7 + place))), (turn, place)

    return step
