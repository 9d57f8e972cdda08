"""Operations that are one allreduce, always or while they have few bytes.

What an exchange of few bytes takes between nodes hardly depends on what it does with them, so it need not be another
one for each kind of operation. Ranks begin it there before all are ready (hvdlite/early_operations.py); an allreduce or
a broadcast that a program repeats and waits for is one native call, there and in a node (prepared.py).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdlite.collectives.base import TensorReduction
from hvdlite.collectives.early import EarlyAllreduce
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import Reduction
from hvdlite.engine import Engine
from hvdlite.memory.layout import Layout
from hvdlite.operations.operation import Operation

if TYPE_CHECKING:
    from hvdlite._native import TensorList


@dataclass(frozen=True, eq=False)
class OneAllreduce(Operation):
    """A kind of operation that may be one."""

    @abstractmethod
    def layout_in(self, engine: Engine) -> Layout | None:
        """Of what is reduced; None where it is not done as one allreduce. Alike on all ranks."""

    @abstractmethod
    def sources(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        """What this rank contributes."""

    @abstractmethod
    def targets(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        """Where the result goes."""

    @abstractmethod
    def reduced_by(self, engine: Engine, layout: Layout) -> Reduction:
        """How, with nothing left to be resolved."""

    def reduce(self, engine: Engine, submission: Submission, layout: Layout, label: str) -> None:
        """Do all of it."""
        sources, targets = (part(engine, submission, layout) for part in (self.sources, self.targets))
        job = TensorReduction(sources, targets, layout, self.reduced_by(engine, layout))
        engine.backend.allreduce_tensors(job, staging=engine.chunk(layout.wire_dtype), label=label).wait()

    def early_layout(self, engine: Engine) -> Layout | None:
        return None if self.tensors_on_device else self.layout_in(engine)

    def begin_early(self, engine: Engine, submission: Submission) -> None:
        early, layout = self._early(engine)
        sources = self.sources(engine, submission, layout)
        early.begin(sources, layout, self.reduced_by(engine, layout), submission.label)

    def drop_early(self, engine: Engine) -> None:
        self._drop_early(engine, None)

    def _drop_early(self, engine: Engine, sources: TensorList | None) -> None:
        """With ``sources`` of who has not begun."""
        early, layout = self._early(engine)
        early.drop(sources, layout, self.reduced_by(engine, layout), self.name)

    def _early(self, engine: Engine) -> tuple[EarlyAllreduce, Layout]:
        layout = self.layout_in(engine)
        assert layout is not None and engine.early is not None, self
        return engine.early, layout


@dataclass(frozen=True, eq=False)
class OfTensors(OneAllreduce):
    """One of the tensors themselves, or of zeros in their place."""

    @abstractmethod
    def gives(self, rank: int) -> bool:
        """Whether its tensors are what ``rank`` of the job contributes; else zeros are."""

    def sources(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        if self.gives(engine.ranks[engine.rank]):
            return engine.tensors(submission.inputs, layout)
        return engine.memory.tensors([0] * len(layout.numels), layout.numels, layout.offsets)

    def targets(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        return engine.tensors(submission.outputs, layout)
