"""Steps of a start that all ranks take together: where one fails, all learn of it at once, and none waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from hvdlite.errors import ConfigError, HorovodInternalError, StartupError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class Ranks(Protocol):
    """Who agrees."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, value: Any, /) -> list[Any]:
        """Every rank's ``value``, by rank. Collective."""


class Bootstrap(Ranks, Protocol):
    """What a world asks of whoever started its ranks, and nothing more; used while worlds are built.

    `hvdlite.mpi.MpiRanks` has it by MPI, `hvdlite.start.rendezvous.RendezvousRanks` without. Every call ends in a
    result or in an error; without MPI within the time that ranks have, and the error names those that did not come.
    """

    @property
    def comm(self) -> MPI.Intracomm | None:
        """What carries messages between nodes; None: nothing does, so all ranks have to be on one node."""

    def subset(self, ranks: Sequence[int], /) -> Bootstrap:
        """Some of these ranks, in this order, who alone call it; nothing else that is sent reaches them there."""

    def close(self) -> None:
        """Collective."""


def check_subset(ranks: Sequence[int], rank: int, size: int) -> None:
    """Whether ``rank`` of ``size`` may make a subset of ``ranks``.

    Raises:
        ConfigError: it is not among them, or they make no sense.
    """
    if rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < size for r in ranks):
        raise ConfigError(
            f"hvd.init(comm={list(ranks)}) on rank {rank} of {size}: the list must hold this rank, each rank once, and "
            "only ranks that were started; ranks outside the list must not call init"
        )


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


def agreed(comm: Ranks, make: Callable[[], T]) -> T:
    """What ``make()`` returned here, if it returned on every rank; values stay where they are. Collective.

    Raises:
        StartupError: it raised RuntimeError on some rank; on every rank alike, unless the job has failed.
    """
    made: list[T] = []

    def try_to_make() -> None:
        try:
            made.append(make())
        except (HorovodInternalError, StartupError):
            raise
        except RuntimeError as error:
            raise StartupError(str(error)) from error

    exchange(comm, try_to_make)
    return made[0]


def exchange(comm: Ranks | None, make: Callable[[], T]) -> list[T]:
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
