"""What every kind of operation must say of itself. One file per kind, with the function that submits it.

What it asks of peers, what contradicts, what it fuses with, what a rank that has joined gives, how it runs: whoever
adds a kind writes such a file, and nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hvdlite.coordinator.burst import Run
from hvdlite.coordinator.messages import KNOWN_REQUESTS, Response
from hvdlite.coordinator.prepared import PreparedBurst
from hvdlite.coordinator.request import Request, TensorSpec
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import DType
from hvdlite.engine import Engine
from hvdlite.memory.base import Memory
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import TensorView

if TYPE_CHECKING:
    from hvdlite._native import ReadyCounts

K = TypeVar("K", bound="Operation")

Work = Sequence[tuple[Response, Submission]]
"""What is done at once: one operation, or several that travel together."""

MUST_TAKE_PART = " and cannot take part. Call it before join(), or after join() has returned on every rank"
"""An objection to the absence of a rank, see `Request.objection`."""


@dataclass(frozen=True, eq=False)
class Operation(Request):
    """A kind of operation."""

    needs_all = False
    """It is an error where a rank has joined."""
    runs_on_device: ClassVar[bool] = True
    """`run` knows no other memory than that of the engine, so that it can be that of a GPU."""

    @classmethod
    def of(
        cls: type[K],
        name: str | None,
        views: Sequence[TensorView] = (),
        *options: object,
        names: Sequence[str] | None = None,
    ) -> K:
        """The request for an operation on ``views``; remembered, see `Request`.

        Args:
            name: the user's, if there is one.
            options: the fields of this kind.
            names: of the tensors; by default they are numbered.
        """
        skipped = int(cls.is_ragged)
        tensors = tuple([(view.dtype, view.shape[skipped:], view.device is not None) for view in views])
        return _made(cls, name, None if names is None else tuple(names), tensors, options)  # type: ignore[arg-type, return-value]

    @property
    def reduced_types(self) -> Iterable[DType]:
        """The types in which it adds what ranks give; none where it only moves bytes."""
        return ()

    def objection(self, absent: Sequence[int]) -> str | None:
        return MUST_TAKE_PART if self.needs_all else None

    def absentee(self, response: Response, memory: Memory) -> Submission:
        """What a rank that has joined takes part with: nothing, so that the result is that of the others."""
        return Submission(self, response.sequence)

    def prepare_burst(self, engine: Engine, requests: Sequence[Operation]) -> Run:
        """What does ``requests``, which travel together and of which this is the first, again and again."""
        raise NotImplementedError

    def prepare_small_burst(
        self, engine: Engine, requests: Sequence[Operation], counts: ReadyCounts, patience_s: float
    ) -> PreparedBurst | None:
        """The same as one native call of two phases; None where that is not of few bytes.

        Args:
            patience_s: how long the call waits for ranks to be ready, before it returns.
        """
        raise NotImplementedError

    def early_layout(self, engine: Engine) -> Layout | None:
        """Of the one allreduce that it is, if a rank may begin it before the others are ready; None: it may not."""
        return None

    def begin_early(self, engine: Engine, submission: Submission) -> None:
        """Begin what `hvdlite.early_operations.EarlyOperations` takes; `run` follows, or `drop_early`."""
        raise NotImplementedError

    def drop_early(self, engine: Engine) -> None:
        """Some ranks have begun what will not be done; all ranks call it at one place."""
        raise NotImplementedError

    def is_met(self, engine: Engine, address: int) -> bool:
        """Of what was begun early, and has come at ``address``: whether nobody has dropped it, so that all execute it.

        False, where nobody waits inside for others that have to be at it.
        """
        return False

    @abstractmethod
    def run(self, engine: Engine, work: Work, label: str) -> object:
        """Do it, together with all other ranks; return what the user gets.

        Args:
            work: of this request, and of those that travel with it.
            label: for errors and the timeline.
        """


@lru_cache(maxsize=KNOWN_REQUESTS)
def _made(
    kind: type[Operation],
    name: str | None,
    names: tuple[str, ...] | None,
    tensors: tuple[tuple[DType, tuple[int, ...], bool], ...],
    options: tuple[Any, ...],
) -> Operation:
    if name is None:
        name = f"{kind.label}.noname"
    names = names or ((name,) if len(tensors) == 1 else tuple(f"{name}.{i}" for i in range(len(tensors))))
    return kind(name, tuple(TensorSpec(own, *tensor) for own, tensor in zip(names, tensors, strict=True)), *options)


def nothing(spec: TensorSpec) -> TensorView:
    """Zeros that nobody stored, and a result that nobody wants."""
    return TensorView(0, spec.shape, spec.dtype, None)
