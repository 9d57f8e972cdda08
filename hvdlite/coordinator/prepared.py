"""An operation that a program does again and again, and waits for: all that is the same every time, made once."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

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


class Prepared(Protocol[T]):
    """One native call that tells the other ranks, waits for them and does it, with tensors as ``T`` describes them.

    Attributes:
        signature: what a caller passes; None where that is not one tensor.
        direct: that call, where no Python belongs to it.
    """

    signature: Signature | None
    direct: DirectCall | None

    @property
    def request(self) -> Request:
        """What ranks must agree on."""

    @property
    def label(self) -> str:
        """Its name, for people."""

    def run(self, tensors: T, plan: int, count: int, heard: int) -> Outcome:
        """Say that this rank is ready for operation ``count``, from 1, of a plan that runs free; do it when all are.

        Args:
            plan: its number.
            heard: how many rings were followed.

        Raises:
            HorovodInternalError: it came to nothing.
        """

    def ended(self, result: int) -> Outcome:
        """What `direct` has returned, as `run` does; raises likewise."""

    def count_done(self, times: int) -> None:
        """So often `direct` was called by somebody else, and has done it."""

    def tensors(self, source: int, target: int, owner: object) -> T:
        """Of one tensor at the address ``source`` whose result goes to ``target``."""

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """How the last `run` ended, if it was for operation ``count`` of ``plan``, and told the other ranks."""

    def submission(self, sequence: int, tensors: T) -> Submission:
        """The same for the coordinator, to wait for."""
