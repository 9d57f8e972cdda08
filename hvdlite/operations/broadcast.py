"""Broadcast: every rank gets the tensors of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.request import Difference
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import DType
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.base import Memory
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import TensorView
from hvdlite.operations.operation import MUST_TAKE_PART, Operation, Work, nothing


def broadcast_async(
    group: Group,
    tensors: Sequence[TensorView],
    *,
    root_rank: int,
    name: str | None = None,
    names: Sequence[str] | None = None,
    needs_all: bool = False,
    background: bool = True,
) -> Submission:
    """Overwrite ``tensors`` with those of rank ``root_rank`` of the job.

    Args:
        needs_all: it is an error where a rank has joined; otherwise only the root must not have.
        background: see `Group.submit`.

    Raises:
        ValueError: there is no such rank in the group.
    """
    if root_rank not in group.ranks:
        raise ValueError(f"root_rank is {root_rank}, but the ranks of this process set are {list(group.ranks)}")
    request = Broadcast.of(name, tensors, int(root_rank), needs_all, names=names)
    return group.submit(request, name, tensors, tensors, background=background)


@dataclass(frozen=True, eq=False)
class Broadcast(Operation):
    """What ranks agree on."""

    root_rank: int = 0
    needs_all: bool = False

    label = "broadcast"
    repeats = True

    def differences(self, other: Broadcast) -> Iterator[Difference]:
        yield from super().differences(other)
        yield Difference("", "root rank", self.root_rank, other.root_rank, "Pass the same root_rank on every rank")

    def objection(self, absent: Sequence[int]) -> str | None:
        return MUST_TAKE_PART if self.root_rank in absent else super().objection(absent)

    def absentee(self, response: Response, memory: Memory) -> Submission:
        views = [nothing(spec) for spec in self.tensors]
        return Submission(self, response.sequence, views, views)

    def run(self, engine: Engine, work: Work, label: str) -> None:
        views, byte = work[0][1].inputs, DType.UINT8
        layout = Layout.of([view.nbytes for view in views], byte, byte)  # a broadcast does not care for types
        tensors, root = engine.tensors(views, layout), engine.ranks.index(self.root_rank)
        engine.backend.broadcast_tensors(tensors, layout.end, root, staging=engine.staging(byte), label=label)
