"""Barrier: done once every rank has submitted it."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.coordinator.submission import Submission
from hvdlite.operations.engine import Engine
from hvdlite.operations.operation import Operation, Submitter, Work, submit_bare


def barrier_async(group: Submitter, *, background: bool = True) -> Submission:
    """Done once every rank has called it."""
    return submit_bare(group, Barrier, background=background)


@dataclass(frozen=True, eq=False)
class Barrier(Operation):
    label = "barrier"
    repeats = True

    def run(self, engine: Engine, work: Work, label: str) -> None:
        """Nothing: to be agreed on is all there is."""
