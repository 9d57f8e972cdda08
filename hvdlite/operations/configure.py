"""Configure: settings change between the same two operations on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvdlite.config import Tunable
from hvdlite.coordinator.request import Difference
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.operations.operation import Operation, Work


def configure(group: Group, settings: Tunable) -> None:
    """Change settings; blocks until every rank asks for the same."""
    group.submit(Configure.of(None, (), settings), None, background=False).wait()


@dataclass(frozen=True, eq=False)
class Configure(Operation):
    settings: Tunable = Tunable()  # noqa: RUF009 (a tuple)

    label = "configure"
    unsettles = True

    def differences(self, other: Configure) -> Iterator[Difference]:
        mine, theirs = tuple(self.settings), tuple(other.settings)
        yield Difference("", "settings", mine, theirs, "Choose the same settings on every rank")

    def run(self, engine: Engine, work: Work, label: str) -> None:
        engine.administrator.tune(self.settings)
