"""Alltoall: every rank sends some rows to each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.coordinator.submission import Allocate, Submission
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.views import TensorView
from hvdlite.operations.operation import Operation, Work


def alltoall_async(
    group: Group,
    tensor: TensorView,
    splits: Sequence[int],
    allocate: Allocate,
    *,
    name: str | None = None,
    background: bool = True,
) -> Submission:
    """Send ``splits[r]`` rows of ``tensor`` to each rank r, in the order of ranks, and receive likewise.

    The result is the number of rows received from each rank.

    Args:
        tensor: of at least one dimension; the others are the same on every rank.
        splits: one number per rank; together at most ``tensor.shape[0]``.
        allocate: called on the coordinator thread with (0, shape of the result) for the memory to fill.
        background: see `Group.submit`.
    """
    assert len(splits) == group.size and 0 <= sum(splits) <= tensor.shape[0], (splits, tensor.shape)
    request = Alltoall.of(name, [tensor])
    return group.submit(request, name, [tensor], background=background, splits=tuple(splits), allocate=allocate)


@dataclass(frozen=True, eq=False)
class Alltoall(Operation):
    """What ranks agree on; their splits they tell one another when they do it."""

    label = "alltoall"
    is_ragged = True
    repeats = True
    needs_all = True
    runs_on_device = False

    def run(self, engine: Engine, work: Work, label: str) -> tuple[int, ...]:
        ((_, submission),) = work
        assert submission.allocate is not None
        (spec,) = self.tensors
        splits = submission.splits
        received = tuple([told[engine.rank] for told in engine.exchange.tell(splits, label)])
        result = submission.allocate(0, (sum(received), *spec.shape))
        row_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        view = submission.inputs[0]
        sent, taken = ([rows * row_bytes for rows in shares] for shares in (splits, received))
        engine.exchange.exchange(view.address, result.address, sent, taken, label, (view, result))
        return received
