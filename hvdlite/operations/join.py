"""Join: a rank takes part in whatever the others do, with nothing, until all have joined."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.coordinator.submission import Submission
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.operations.operation import Operation, Work


def join_async(group: Group) -> Submission:
    """The result is the last rank that joined."""
    return group.submit(Join.of(None), None)


@dataclass(frozen=True, eq=False)
class Join(Operation):
    label = "join"
    departs = True
    unsettles = True

    def run(self, engine: Engine, work: Work, label: str) -> int:
        engine.administrator.all_have_joined()
        return work[0][0].last
