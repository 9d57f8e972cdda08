"""What every kind of operation must say of itself, and what it works with.

One file per kind: what it asks of peers, what contradicts, what it fuses with, what a rank that has joined gives, how
it runs, and the function that submits it. Whoever adds a kind writes such a file, and a row in operations/__init__.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from hvdlite.coordinator.messages import KNOWN_REQUESTS, Response
from hvdlite.coordinator.request import NAMED, Request, TensorSpec
from hvdlite.coordinator.submission import Submission
from hvdlite.memory.base import Memory
from hvdlite.memory.views import TensorView
from hvdlite.operations.engine import Engine

Work = Sequence[tuple[Response, Submission]]
"""What is done at once: one operation, or several that travel together."""


MUST_TAKE_PART = " and cannot take part. Call it before join(), or after join() has returned on every rank"
"""An objection to the absence of a rank, see `Request.objection`."""


@dataclass(frozen=True, eq=False)
class Operation(Request):
    """A kind of operation."""

    needs_all = False
    """It is an error where a rank has joined."""

    def objection(self, absent: Sequence[int]) -> str | None:
        return MUST_TAKE_PART if self.needs_all else None

    def absentee(self, response: Response, memory: Memory) -> Submission:
        """What a rank that has joined takes part with: nothing, so that the result is that of the others."""
        return Submission(self, response.sequence)

    @abstractmethod
    def run(self, engine: Engine, work: Work, label: str) -> object:
        """Do it, together with all other ranks; return what the user gets.

        Args:
            work: of this request, and of those that travel with it.
            label: for errors and the timeline.
        """


class Submitter(Protocol):
    """A process set, as far as submitting is concerned."""

    ranks: tuple[int, ...]
    size: int
    memory: Memory

    def count(self, label: str) -> int:
        """The sequence number of an unnamed operation of kind ``label``, which is about to be submitted."""

    def submit(self, submission: Submission, background: bool = True) -> Submission:
        """Hand it to the coordinator; with ``background=False`` the caller waits for it at once, and does the work."""


def submit_bare(
    group: Submitter, kind: type[Operation], *options: object, name: str | None = None, background: bool = True
) -> Submission:
    """Submit an operation without tensors."""
    request = _bare_request(kind, full_name(kind.label, name), options)  # type: ignore[arg-type]
    return group.submit(Submission(request, sequence_of(group, kind.label, name)), background)


@lru_cache(maxsize=KNOWN_REQUESTS)
def _bare_request(kind: Callable[..., Operation], name: str, options: tuple[Any, ...]) -> Operation:
    return kind(name, (), *options)


def tensor_specs(
    name: str, names: Sequence[str] | None, views: Sequence[TensorView], skip_dims: int = 0
) -> tuple[TensorSpec, ...]:
    """Those of ``views``, without their first ``skip_dims`` dimensions."""
    return tuple(
        TensorSpec(own, view.dtype, tuple(view.shape[skip_dims:]))
        for own, view in zip(names or tensor_names(name, len(views)), views, strict=True)
    )


def full_name(label: str, name: str | None) -> str:
    """That of an operation of kind ``label`` to which the user gave ``name``, or none."""
    return f"{label}.noname" if name is None else name


def sequence_of(group: Submitter, label: str, name: str | None) -> int:
    """Its sequence number; to be asked for once nothing can go wrong any more, since who asks counts."""
    return group.count(label) if name is None else NAMED


def tensor_names(name: str, count: int) -> tuple[str, ...]:
    """Names of ``count`` tensors of an operation, which have none of their own."""
    return (name,) if count == 1 else tuple(f"{name}.{i}" for i in range(count))


def nothing(spec: TensorSpec) -> TensorView:
    """Zeros that nobody stored, and a result that nobody wants."""
    return TensorView(0, spec.shape, spec.dtype, None)
