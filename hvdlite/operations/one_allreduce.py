"""Operations that are one allreduce, always or while they have few bytes.

Whoever repeats one and waits for it does it in one native call (prepared.py), and between nodes ranks begin it before
all are ready (hvdlite/early_operations.py). What an exchange of few bytes takes hardly depends on what it does with
them: so it need not be another one for each kind of operation.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    @property
    @abstractmethod
    def only_layout(self) -> Layout | None:
        """Of its tensors, where one allreduce has all of them."""

    @abstractmethod
    def is_one_allreduce(self, engine: Engine) -> bool:
        """Whether it is done as one, on all ranks alike; it has a layout then."""

    @abstractmethod
    def gives(self, rank: int) -> bool:
        """Whether its tensors are what ``rank`` of the job contributes; else zeros are."""

    @abstractmethod
    def reduced_by(self, engine: Engine) -> Reduction:
        """How, with nothing left to be resolved."""

    def sources(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        """What this rank contributes."""
        if self.gives(engine.ranks[engine.rank]):
            return engine.tensors(submission.inputs, layout)
        return engine.memory.tensors([0] * len(layout.numels), layout.numels, layout.offsets)

    @property
    def early_bytes(self) -> int | None:
        layout = None if self.tensors_on_device else self.only_layout
        return None if layout is None else layout.nbytes

    def begin_early(self, engine: Engine, submission: Submission) -> None:
        early, layout = self._early(engine)
        early.begin(self.sources(engine, submission, layout), layout, self.reduced_by(engine), submission.label)

    def drop_early(self, engine: Engine) -> None:
        early, layout = self._early(engine)
        early.drop(layout, self.reduced_by(engine), self.name)

    def _early(self, engine: Engine) -> tuple[EarlyAllreduce, Layout]:
        layout = self.only_layout
        assert layout is not None and engine.early is not None, self
        return engine.early, layout
