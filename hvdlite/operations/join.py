"""Join: a rank takes part in whatever the others do, with nothing, until all have joined."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import ReduceOp, Reduction
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.views import TensorView
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.operation import Operation, Work


def join(group: Group) -> int:
    """Wait until all ranks have; returns the last of them. From here on they number alike what they use."""
    last: int = join_async(group).wait()
    numbered = np.array([group.numbered], np.int64)
    view = TensorView.of_numpy(numbered)
    allreduce_async(group, [view], [view], Reduction(ReduceOp.MAX), name="join.numbered").wait()
    group.have_joined(int(numbered[0]))
    return last


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
