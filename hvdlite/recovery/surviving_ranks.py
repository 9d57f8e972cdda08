"""Ranks that go on after others have died, and the messages between them, without a communicator of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from hvdlite.errors import CollectiveError, StartupError
from hvdlite.naps import nap_until
from hvdlite.start.rendezvous import RendezvousRanks

if TYPE_CHECKING:
    from mpi4py import MPI

_CHANNELS = 8  # tags of one communicator
_LEAST_TAGS = 32768  # that MPI's standard promises
ROOM_FOR_SUBSETS = 64
"""Contexts that a generation finds unused: its communicators between nodes, and some process sets."""


class Medium:
    """What carries the messages of all generations: a duplicate of ``comm``, made while all ranks lived.

    Attributes:
        used: the number of the last context that this rank has taken part in.
        last: the number of the last one for which MPI has tags.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self.comm = comm.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.used = 0
        highest = self.comm.Get_attr(MPI.TAG_UB)
        self.last = (_LEAST_TAGS if highest is None else highest + 1) // _CHANNELS - 1

    def take(self, used: int, room: int) -> int:
        """The number of a new context, the one after ``used``.

        None is used twice: messages that a failure has left behind are never taken, and would meet others.

        Raises:
            StartupError: fewer than ``room`` would be left.
        """
        if used + 1 + room > self.last:
            raise StartupError(
                f"communicators of ranks that go on after failures have used {used} of the {self.last} ranges of tags "
                "that this MPI library has (MPI_TAG_UB): the ranks have to be started anew"
            )
        self.used = used + 1
        return self.used


class SurvivingRanks:
    """A `hvdlite.agreement.Bootstrap`, and, in MPI's words, what hvdlite asks of a communicator.

    Its messages are those of ``medium``, with a range of tags that no two communicators of a rank share, its context:
    what an operation that has failed leaves behind meets no later one.

    Args:
        meeting: where they tell one another whatever is not between two of them.
        members: what ``medium`` calls them, by rank.
        timeout_s: the longest wait for a message of `recv`.
        room: how many contexts shall be left for subsets of these ranks.

    Raises:
        StartupError: MPI has no tags for it; on all of them.
    """

    def __init__(
        self, meeting: RendezvousRanks, members: Sequence[int], medium: Medium, timeout_s: float, *, room: int = 0
    ) -> None:
        self.rank = meeting.rank
        self.size = meeting.size
        self._meeting = meeting
        self._members = tuple(members)
        self._medium = medium
        self._timeout_s = timeout_s
        self._context = medium.take(max(meeting.allgather(medium.used)), room)

    @property
    def comm(self) -> MPI.Intracomm:
        return cast("MPI.Intracomm", self)

    def allgather(self, value: Any, /) -> list[Any]:
        """Every rank's ``value``, by rank."""
        return self._meeting.allgather(value)

    def subset(self, ranks: Sequence[int], /) -> SurvivingRanks:
        """See `hvdlite.agreement.Bootstrap`."""
        members = [self._members[rank] for rank in ranks]
        return SurvivingRanks(self._meeting.subset(ranks), members, self._medium, self._timeout_s)

    def close(self) -> None:
        """Nothing is held."""

    # In MPI's words.

    def Split(self, color: int, key: int) -> SurvivingRanks | None:
        from mpi4py import MPI

        told = self.allgather((color, key))
        if color == MPI.UNDEFINED:
            return None
        places = sorted((its_key, rank) for rank, (its_color, its_key) in enumerate(told) if its_color == color)
        return self.subset([rank for _, rank in places])

    def Free(self) -> None:
        """Nothing is held."""

    def Set_errhandler(self, handler: MPI.Errhandler) -> None:
        """That of the medium returns errors."""

    def Isend(self, buffer: Any, to: int, tag: int = 0) -> MPI.Request:
        return self._medium.comm.Isend(buffer, self._members[to], self._tag(tag))

    def Irecv(self, buffer: Any, source: int, tag: int = 0) -> MPI.Request:
        return self._medium.comm.Irecv(buffer, self._members[source], self._tag(tag))

    def Send_init(self, buffer: Any, to: int, tag: int = 0) -> MPI.Prequest:
        return self._medium.comm.Send_init(buffer, self._members[to], self._tag(tag))

    def Recv_init(self, buffer: Any, source: int, tag: int = 0) -> MPI.Prequest:
        return self._medium.comm.Recv_init(buffer, self._members[source], self._tag(tag))

    def send(self, value: Any, to: int, tag: int = 0) -> None:
        request = self._medium.comm.isend(value, self._members[to], self._tag(tag))
        self._wait(lambda: request.test()[0], to)

    def recv(self, source: int, tag: int = 0) -> Any:
        found: list[Any] = []

        def arrived() -> bool:
            message = self._medium.comm.improbe(self._members[source], self._tag(tag))
            if message is not None:
                found.append(message.recv())
            return bool(found)

        self._wait(arrived, source)
        return found[0]

    def sendrecv(self, value: Any, to: int, sendtag: int = 0, *, source: int, recvtag: int = 0) -> Any:
        self.send(value, to, sendtag)
        return self.recv(source, recvtag)

    def _tag(self, tag: int) -> int:
        assert 0 <= tag < _CHANNELS, tag
        return int(self._context * _CHANNELS + tag)

    def _wait(self, done: Callable[[], bool], peer: int) -> None:
        from mpi4py import MPI

        try:
            late = f"rank {peer} did not send or take a message"
            nap_until(done, late, timeout_s=self._timeout_s, check=lambda: None)
        except MPI.Exception as error:
            raise CollectiveError(f"rank {peer} has ended: {error}") from error
