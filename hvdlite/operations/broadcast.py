"""Broadcast: every rank gets the tensors of one.

Few bytes are summed over all ranks, of which all but that one contribute zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hvdlite.collectives.base import TensorReduction
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.request import Difference
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.base import Memory
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import TensorView
from hvdlite.operations.one_allreduce import OneAllreduce
from hvdlite.operations.operation import MUST_TAKE_PART, Work, nothing


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
class Broadcast(OneAllreduce):
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
        submission, layout, byte = work[0][1], self.only_layout, DType.UINT8
        targets = engine.tensors(submission.outputs, layout)
        if self.is_one_allreduce(engine):
            job = TensorReduction(self.sources(engine, submission, layout), targets, layout, SUM)
            engine.backend.allreduce_tensors(job, staging=engine.chunk(byte), label=label).wait()
            return
        staging, root = engine.staging(byte), engine.ranks.index(self.root_rank)
        if engine.rank == root and submission.inputs is not submission.outputs:  # it was prepared while that was little
            engine.memory.pack(engine.tensors(submission.inputs, layout), byte, staging.narrow(0, layout.end), 0)
            engine.memory.unpack(staging.narrow(0, layout.end), 0, targets, byte)
        engine.backend.broadcast_tensors(targets, layout.end, root, staging=staging, label=label)

    @cached_property
    def only_layout(self) -> Layout:
        """Of all tensors, as bytes: a broadcast does not care for types."""
        nbytes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in self.tensors]
        return Layout.of(nbytes, DType.UINT8, DType.UINT8)

    def is_one_allreduce(self, engine: Engine) -> bool:
        return 0 < self.only_layout.nbytes <= engine.backend.small_bytes

    def gives(self, rank: int) -> bool:
        return rank == self.root_rank

    def reduced_by(self, engine: Engine) -> Reduction:
        return SUM
