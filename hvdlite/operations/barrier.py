"""Barrier: done once every rank has submitted it."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.coordinator.submission import Submission
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.operations.operation import Operation, Work
from hvdlite.operations.prepared import PreparedOperation, Tensors


def barrier_async(group: Group, *, background: bool = True) -> Submission:
    """Done once every rank has called it."""
    return group.submit(Barrier.of(None), None, background=background)


@dataclass(frozen=True, eq=False)
class Barrier(Operation):
    label = "barrier"
    repeats = True

    def run(self, engine: Engine, work: Work, label: str) -> None:
        """Nothing: to be agreed on is all there is."""


class PreparedBarrier(PreparedOperation):
    """One that a program repeats."""

    @classmethod
    def of(cls, group: Group) -> PreparedBarrier | None:
        """None where there is no such call."""
        world, request = group.world, Barrier.of(None)
        patience_s = world.config.caller_patience_s
        call = world.engine.backend.prepare_barrier(world.coordinator.counts, patience_s, request.name)
        return None if call is None else cls(group, request, call)

    def submission(self, sequence: int, tensors: Tensors) -> Submission:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        return Submission(self.request, sequence)
