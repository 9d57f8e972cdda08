"""Allgather: every rank gets the rows of all, in the order of ranks; how many each has may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.submission import Allocate, Submission
from hvdlite.dtypes import DType
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.base import Memory
from hvdlite.memory.packets import Piece
from hvdlite.memory.views import TensorView
from hvdlite.operations.telling import Telling, Told
from hvdlite.recorder import Lane


def allgather_async(
    group: Group,
    inputs: Sequence[TensorView],
    allocate: Allocate,
    *,
    name: str | None = None,
    names: Sequence[str] | None = None,
    needs_all: bool = False,
    background: bool = True,
) -> Submission:
    """Concatenate along dimension 0, in the order of ranks; only that dimension may differ between ranks.

    Args:
        inputs: each of at least one dimension.
        allocate: called on the coordinator thread with (index, shape of the result) for the memory to fill.
        needs_all: it is an error where a rank has joined; otherwise that rank has no rows.
        background: see `Group.submit`.
    """
    request = Allgather.of(name, inputs, needs_all, names=names)
    return group.submit(request, name, inputs, background=background, allocate=allocate)


@dataclass(frozen=True, eq=False)
class Allgather(Telling):
    """What ranks agree on; how many rows each has they tell one another when they do it."""

    needs_all: bool = False

    label = "allgather"
    lane = Lane.ALLGATHER

    def absentee(self, response: Response, memory: Memory) -> Submission:
        inputs = [TensorView(0, (0, *spec.shape), spec.dtype, None) for spec in self.tensors]

        results: list[TensorView] = []  # alive as long as the submission: a GPU writes them later

        def allocate(index: int, shape: tuple[int, ...]) -> TensorView:
            results.append(memory.filled(shape, self.tensors[index].dtype, 0))
            return results[-1]

        return Submission(self, response.sequence, inputs, allocate=allocate)

    def packet(self, size: int) -> tuple[int, int]:
        return len(self.tensors), sum(self.row_bytes)

    def numbers(self, submission: Submission) -> Sequence[int]:
        """Rows of each tensor."""
        return [view.shape[0] for view in submission.inputs]

    def pieces(self, submission: Submission) -> Sequence[Piece]:
        return [(view.address, view.nbytes) for view in submission.inputs]

    def nbytes(self, numbers: Sequence[int]) -> int:
        return sum(map(mul, numbers, self.row_bytes))

    def column(self, rank: int) -> int:
        return 0

    def give(self, engine: Engine, submission: Submission, told: Told, label: str) -> None:
        assert submission.allocate is not None
        numbers_of, packets = told
        for i, (spec, view, row_bytes) in enumerate(zip(self.tensors, submission.inputs, self.row_bytes, strict=True)):
            rows = [numbers[i] for numbers in numbers_of]
            result = submission.allocate(i, (sum(rows), *spec.shape))
            nbytes = [row_bytes * count for count in rows]
            if packets is not None:
                before = [self.nbytes([*numbers[:i]]) for numbers in numbers_of]
                packets.read(result.address, [*zip(before, nbytes, strict=True)])
                continue
            targets = [result.address + start for start in accumulate(nbytes[:-1], initial=0)]
            staging = engine.staging(DType.UINT8)
            engine.backend.allgather_tensors(view.address, targets, nbytes, staging=staging, label=label)
