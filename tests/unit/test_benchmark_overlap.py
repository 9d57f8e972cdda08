"""What the schedule of benchmarks/overlap.py can hide at most; closed forms."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("overlap")


def test_shares_of_backward(overlap: ModuleType) -> None:
    assert overlap.shares(3) == [1 / 5, 2 / 5, 2 / 5]


@pytest.mark.parametrize(
    ("layers", "backward_s", "communication_s", "hidden_share"),
    [
        (1, 1.0, 1.0, 0.0),  # nothing is ready before backward is over
        (3, 5.0, 6.0, 1 / 2),  # communication begins after 2 of 5 seconds and never waits
        (3, 5.0, 50.0, 3 / 50),  # communication takes longer: it begins after 2 seconds, too
        (3, 50.0, 3.0, 2 / 3),  # backward does: only the last gradient is left
    ],
)
def test_schedule_bound(
    overlap: ModuleType, layers: int, backward_s: float, communication_s: float, hidden_share: float
) -> None:
    assert overlap.schedule_bound(layers, backward_s, communication_s) == pytest.approx(hidden_share)
