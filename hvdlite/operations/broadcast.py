"""Broadcast: every rank gets the tensors of one.

Few bytes are summed over all ranks, of which all but that one contribute zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.request import Difference
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.base import Memory
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import TensorView
from hvdlite.operations.one_allreduce import OfTensors
from hvdlite.operations.operation import MUST_TAKE_PART, Work, nothing
from hvdlite.operations.prepared import PreparedOperation
from hvdlite.recorder import Lane


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
        raise ValueError(f"root_rank is {root_rank!r}, but the ranks of this process set are {list(group.ranks)}")
    request = Broadcast.of(name, tensors, int(root_rank), needs_all, names=names)
    return group.submit(request, name, tensors, tensors, background=background)


@dataclass(frozen=True, eq=False)
class Broadcast(OfTensors):
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
        submission, layout, byte = work[0][1], self.layout_in(engine), DType.UINT8
        if layout is not None:
            self.reduce(engine, submission, layout, label)
            return
        root = engine.ranks.index(self.root_rank)
        if engine.rank == root and submission.inputs is not submission.outputs:  # it was prepared while that was little
            for given, wanted in zip(submission.inputs, submission.outputs, strict=True):
                engine.memory.copy(wanted.address, given.address, given.nbytes)
        tensors = self.targets(engine, submission, self._layout)
        engine.backend.broadcast_tensors(tensors, self.nbytes, root, staging=engine.staging(byte), label=label)

    @cached_property
    def _layout(self) -> Layout:
        """Of all tensors, as bytes: a broadcast does not care for types."""
        nbytes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in self.tensors]
        return Layout.of(nbytes, DType.UINT8, DType.UINT8)

    @property
    def nbytes(self) -> int:
        """Of all tensors, as they lie one after the other."""
        return self._layout.end

    def layout_in(self, engine: Engine) -> Layout | None:
        return self._layout if 0 < self._layout.nbytes <= engine.backend.small_bytes else None

    def gives(self, rank: int) -> bool:
        return rank == self.root_rank

    def reduced_by(self, engine: Engine, layout: Layout) -> Reduction:
        return SUM


class PreparedBroadcast(PreparedOperation):
    """``request`` of one tensor which is not small, as few bytes are an allreduce."""

    lane = Lane.BROADCAST

    @classmethod
    def of(cls, group: Group, request: Broadcast) -> PreparedBroadcast | None:
        """None where there is no such call."""
        world, root = group.world, group.ranks.index(request.root_rank)
        counts, patience_s = world.coordinator.counts, world.config.caller_patience_s
        call = world.engine.backend.prepare_broadcast(counts, request.nbytes, root, patience_s, request.name)
        if call is None:
            return None
        prepared = cls(group, request, call, request.nbytes)
        prepared.gives = request.gives(group.ranks[group.rank])
        return prepared
