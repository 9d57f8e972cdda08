"""Join: a rank takes part in whatever the others do, with nothing, until all have joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import ReduceOp, Reduction
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.views import TensorView
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.operation import Operation, Work


def join(group: Group, gpu: int | None = None) -> int:
    """Wait until all ranks have; returns the last of them. From here on they number alike what they use.

    Args:
        gpu: that of this rank, if it is known, for what the others reduce on theirs.
    """
    group.world.executor.own_gpu = gpu
    last: int = join_async(group).wait()
    own = group.numbered
    most, negative_least = _highest(group, [len(own), -len(own)])
    if most > -negative_least:
        group.have_joined(_highest(group, [*own, *[-1] * (most - len(own))]))
    return last


def _highest(group: Group, numbers: Sequence[int]) -> list[int]:
    """Of each, that of all ranks. Collective."""
    array = np.array(numbers, np.int64)
    view = TensorView.of_numpy(array)
    allreduce_async(group, [view], [view], Reduction(ReduceOp.MAX), name="join.numbered").wait()
    found: list[int] = array.tolist()
    return found


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
