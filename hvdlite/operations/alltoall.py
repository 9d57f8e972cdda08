"""Alltoall: every rank sends some rows to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.coordinator.submission import Allocate, Submission
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.packets import Piece
from hvdlite.memory.views import TensorView
from hvdlite.operations.telling import Telling, Told
from hvdlite.recorder import Lane


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
class Alltoall(Telling):
    """What ranks agree on; their splits they tell one another when they do it."""

    label = "alltoall"
    lane = Lane.ALLTOALL
    is_alltoall = True
    needs_all = True
    runs_on_device = False

    def packet(self, size: int) -> tuple[int, int]:
        return size, size * self.row_bytes[0]

    def numbers(self, submission: Submission) -> Sequence[int]:
        """Rows for each rank."""
        return submission.splits

    def pieces(self, submission: Submission) -> Sequence[Piece]:
        return [(submission.inputs[0].address, self.nbytes(submission.splits))]

    def nbytes(self, numbers: Sequence[int]) -> int:
        return sum(numbers) * self.row_bytes[0]

    def column(self, rank: int) -> int:
        return rank

    def give(self, engine: Engine, submission: Submission, told: Told, label: str) -> tuple[int, ...]:
        assert submission.allocate is not None
        numbers_of, packets = told
        received = tuple([numbers[engine.rank] for numbers in numbers_of])
        result = submission.allocate(0, (sum(received), *self.tensors[0].shape))
        row_bytes = self.row_bytes[0]
        taken = [rows * row_bytes for rows in received]
        if packets is not None:
            before = [self.nbytes(numbers[: engine.rank]) for numbers in numbers_of]
            packets.read(result.address, [*zip(before, taken, strict=True)])
            return received
        sent = [rows * row_bytes for rows in submission.splits]
        view = submission.inputs[0]
        engine.exchange.exchange(view.address, result.address, sent, taken, label, (view, result))
        return received
