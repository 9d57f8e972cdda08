"""An operation that a program does again and again, and waits for: all that is the same every time, made once."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hvdlite.coordinator.request import Request
from hvdlite.coordinator.submission import Submission

if TYPE_CHECKING:
    from hvdlite._native import DirectCall, Signature

T = TypeVar("T")


class Outcome(IntEnum):
    """How the native call of a prepared operation ended."""

    DONE = 0
    NOT_YET = 1  # other ranks are late
    DONE_AND_RUNG = 2  # the doorbell has rung meanwhile, and nobody has looked why
    FAILED = 3  # in the middle, so that nobody can go on


_OUTCOMES = tuple(Outcome)


def outcome_of(result: int) -> Outcome:
    """Of what `hvdlite._native.DirectCall` returns."""
    return _OUTCOMES[min(result, Outcome.FAILED)]


def outcome_at(last: tuple[int, int, int], plan: int, count: int) -> Outcome | None:
    """Of `hvdlite._native.DirectCall.last`, if that was for operation ``count`` of ``plan``."""
    *where, result = last
    return outcome_of(result) if where == [plan, count] else None


class Prepared(Protocol[T]):
    """It tells the other ranks, waits for them and is done, with tensors as ``T`` describes them."""

    @property
    def request(self) -> Request:
        """What ranks must agree on."""

    @property
    def label(self) -> str:
        """Its name, for people."""

    @property
    def is_valid(self) -> bool:
        """Whether it is still what ranks do; else another one has to be made."""

    @property
    def native(self) -> Native[T] | None:
        """The same, if it is one native call, which others may make in its place."""

    def run(self, tensors: T, plan: int, count: int, heard: int) -> Outcome:
        """Say that this rank is ready for operation ``count``, from 1, of a plan that runs free; do it when all are.

        Args:
            plan: its number.
            heard: how many rings were followed.

        Raises:
            HorovodInternalError: it came to nothing.
        """

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """How the last `run` ended, if it was for operation ``count`` of ``plan``, and told the other ranks."""

    def submission(self, sequence: int, tensors: T) -> Submission:
        """The same for the coordinator, to wait for."""


class Native(Prepared[T], Protocol[T]):
    """All of it is one native call, to which no Python belongs.

    Attributes:
        signature: what a caller passes.
        direct: that call.
        new_result: makes a result, of what is passed and of as many rows as `direct` says; None where it is like that.
        gives: whether what is passed is what this rank contributes; else zeros are.
    """

    signature: Signature | None
    direct: DirectCall | None
    new_result: Callable[[Any, int], Any] | None
    gives: bool

    def ended(self, result: int, tensors: T) -> Outcome:
        """What `direct` has returned for ``tensors``, as `run` does; raises likewise."""

    def count_done(self, times: int) -> None:
        """So often `direct` was called by somebody else, and has done it."""

    def tensors(self, source: int, target: int, owner: object) -> T:
        """Of one tensor at the address ``source`` whose result goes to ``target``."""


class PreparedBurst(Protocol):
    """All of a burst as one native call of two phases, again and again; see `hvdlite.collectives.base.PreparedCall`."""

    @property
    def direct(self) -> DirectCall: ...

    def last(self) -> tuple[int, int, int]: ...

    def resume(self, result: int, /) -> int: ...

    def count_done(self, times: int, /) -> None: ...
