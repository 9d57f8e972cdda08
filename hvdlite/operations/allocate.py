"""Allocate: every rank gets a fusion buffer of the same size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvdlite.coordinator.request import Difference
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.base import FusionBuffer
from hvdlite.operations.operation import Operation, Work


def allocate(group: Group, nbytes: int, name: str | None = None) -> FusionBuffer:
    """A fusion buffer of ``nbytes`` per rank, zeroed; blocks until every rank asks for the same.

    Tensors made from its `memory` are reduced where they are.
    """
    buffer: FusionBuffer = group.submit(Allocate.of(name, (), int(nbytes)), name).wait()
    return buffer


@dataclass(frozen=True, eq=False)
class Allocate(Operation):
    nbytes: int = 0

    label = "allocate"

    def differences(self, other: Allocate) -> Iterator[Difference]:
        yield Difference("", "size in bytes", self.nbytes, other.nbytes, "Ask for the same size on every rank")

    def run(self, engine: Engine, work: Work, label: str) -> FusionBuffer:
        return engine.memory.allocate(self.nbytes)
