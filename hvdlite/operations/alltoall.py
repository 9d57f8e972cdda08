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
    group: Group, tensor: TensorView, splits: Sequence[int], allocate: Allocate, *, name: str | None = None
) -> Submission:
    """Send ``splits[r]`` rows of ``tensor`` to each rank r, in the order of ranks, and receive likewise.

    The result is the number of rows received from each rank.

    Args:
        tensor: of at least one dimension; the others are the same on every rank.
        splits: one number per rank; together at most ``tensor.shape[0]``.
        allocate: called on the coordinator thread with (0, shape of the result) for the memory to fill.
    """
    assert len(splits) == group.size and 0 <= sum(splits) <= tensor.shape[0], (splits, tensor.shape)
    return group.submit(Alltoall.of(name, [tensor]), name, [tensor], sizes=tuple(splits), allocate=allocate)


@dataclass(frozen=True, eq=False)
class Alltoall(Operation):
    """What ranks agree on; splits travel beside it."""

    label = "alltoall"
    is_ragged = True
    needs_all = True
    runs_on_device = False

    def run(self, engine: Engine, work: Work, label: str) -> tuple[int, ...]:
        ((response, submission),) = work
        assert submission.allocate is not None
        (spec,) = self.tensors
        received = tuple(rows[engine.rank] for rows in response.sizes)
        result = submission.allocate(0, (sum(received), *spec.shape))
        row_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        nbytes = [[rows * row_bytes for rows in sizes] for sizes in response.sizes]
        view = submission.inputs[0]
        engine.exchange.exchange(view.address, result.address, nbytes, label, (view, result))
        return received
