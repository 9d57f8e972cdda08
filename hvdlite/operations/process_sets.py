"""Process sets are added and removed by all ranks of the job, in the order of its log: no rank is late for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.coordinator.request import Difference
from hvdlite.coordinator.submission import Submission
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.operations.operation import Operation, Work


def add_process_set_async(group: Group, ranks: Sequence[int]) -> Submission:
    """Of the whole job: a new process set of ``ranks``; the result is what `Administrator.add_process_set` returns."""
    return group.submit(AddProcessSet.of(None, (), tuple(ranks)), None)


def remove_process_set_async(group: Group, number: int, ranks: Sequence[int]) -> Submission:
    """Of the whole job: end process set ``number``, of ``ranks``."""
    return group.submit(RemoveProcessSet.of(None, (), tuple(ranks), number), None)


@dataclass(frozen=True, eq=False)
class AddProcessSet(Operation):
    ranks: tuple[int, ...] = ()

    label = "add_process_set"
    needs_all = True

    def differences(self, other: Any) -> Iterator[Difference]:
        yield Difference("", "ranks of the process set", self.ranks, other.ranks, "Name the same ranks on every rank")

    def run(self, engine: Engine, work: Work, label: str) -> object:
        return engine.administrator.add_process_set(self.ranks)


@dataclass(frozen=True, eq=False)
class RemoveProcessSet(AddProcessSet):
    number: int = 0

    label = "remove_process_set"

    def differences(self, other: Any) -> Iterator[Difference]:
        yield from super().differences(other)
        yield Difference(
            "", "number of the process set", self.number, other.number, "Remove the same one on every rank"
        )

    def run(self, engine: Engine, work: Work, label: str) -> None:
        engine.administrator.remove_process_set(self.number)
