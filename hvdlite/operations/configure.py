"""Configure: settings change between the same two operations on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.config import Tunable
from hvdlite.coordinator.request import Difference, Request
from hvdlite.operations.engine import Engine
from hvdlite.operations.operation import Operation, Submitter, Work, submit_bare


def configure(group: Submitter, settings: Tunable) -> None:
    """Change settings; blocks until every rank asks for the same."""
    submit_bare(group, Configure, settings, background=False).wait()


@dataclass(frozen=True, eq=False)
class Configure(Operation):
    settings: Tunable = Tunable()  # noqa: RUF009 (a tuple)

    label = "configure"
    unsettles = True

    @classmethod
    def decode(cls, name: str, tensors: Sequence[Any], settings: Sequence[int] = ()) -> Request:
        return super().decode(name, tensors, Tunable(*settings))

    def differences(self, other: Configure) -> Iterator[Difference]:
        mine, theirs = tuple(self.settings), tuple(other.settings)
        yield Difference("", "settings", mine, theirs, "Choose the same settings on every rank")

    def run(self, engine: Engine, work: Work, label: str) -> None:
        engine.administrator.tune(self.settings)
