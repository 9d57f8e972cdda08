"""Steps of a start that all ranks take together: where one fails, all learn of it at once, and none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from hvdlite.errors import HorovodInternalError, StartupError

T = TypeVar("T")


class Bootstrap(Protocol):
    """What ranks need of whoever started them; an mpi4py communicator has it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, value: Any, /) -> list[Any]:
        """Every rank's ``value``, by rank."""


class _Complaint(NamedTuple):
    """Why a rank failed, and how far that is from the cause."""

    remoteness: int
    kind: type[StartupError]
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Complaint:
        text = str(error) or repr(error)
        if isinstance(error, StartupError):
            return cls(0, type(error), text)
        # A rank that finds its peer gone has less to say than the peer, which finds something wrong.
        return cls(2 if isinstance(error, HorovodInternalError) else 1, StartupError, text)


def exchange(comm: Bootstrap | None, make: Callable[[], T]) -> list[T]:
    """What ``make()`` returned on every rank, by rank. Collective over ``comm``; None stands for this process alone.

    Raises:
        Exception: what ``make`` raised here.
        StartupError: it raised on another rank; names the rank and says what. Of the kind that was raised there.
    """
    failure: Exception | None = None
    made: T | None = None
    try:
        made = make()
    except Exception as error:
        if comm is None or comm.size == 1:
            raise
        failure = error
    if comm is None or comm.size == 1:
        return [made]  # type: ignore[list-item]
    outcomes = comm.allgather((made, None if failure is None else _Complaint.of(failure)))
    complaints = {rank: complaint for rank, (_, complaint) in enumerate(outcomes) if complaint is not None}
    if complaints:
        culprit = min(complaints, key=lambda rank: (complaints[rank].remoteness, rank))
        complaint = complaints[culprit]
        if failure is not None and complaints[comm.rank].remoteness == complaint.remoteness:
            raise failure
        raise complaint.kind(f"rank {culprit}: {complaint.text}") from failure
    return [value for value, _ in outcomes]
