"""Barrier: done once every rank has submitted it."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.coordinator.submission import Submission
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.operations.operation import Operation, Work


def barrier_async(group: Group, *, background: bool = True) -> Submission:
    """Done once every rank has called it."""
    return group.submit(Barrier.of(None), None, background=background)


@dataclass(frozen=True, eq=False)
class Barrier(Operation):
    label = "barrier"
    repeats = True

    def run(self, engine: Engine, work: Work, label: str) -> None:
        """Nothing: to be agreed on is all there is."""
