"""Ranks that meet without MPI: whatever they tell one another goes through a place that all of them know.

`hvdlite.start.meeting_point` has hvdliterun's place, `hvdlite.start.torch_store` a store of torch.distributed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from hvdlite import plain
from hvdlite.agreement import check_subset
from hvdlite.errors import StartupError
from hvdlite.naps import Patience

START_LIMIT = "HVDLITE_START_TIMEOUT (seconds)"
GROUP_LIMIT = "the timeout that the process group was given"


class Wait(NamedTuple):
    """For ranks that are to come.

    Attributes:
        timeout_s: the longest.
        where: what errors call it.
        limit: what ``timeout_s`` comes from.
    """

    timeout_s: float
    where: str = "hvd.init()"
    limit: str = START_LIMIT


class Place(Protocol):
    """Where the processes of a job leave bytes for one another. ``ranks`` and ``rank`` are what the launcher says."""

    def gather(self, key: str, ranks: Sequence[int], rank: int, data: bytes, patience: Patience) -> list[bytes]:
        """The ``data`` of every one of ``ranks``, in their order, once all have come; ``rank`` is this process's.

        Args:
            key: used once, by these ranks only.

        Raises:
            MissingError: a rank has ended, or did not come before the end of ``patience``.
            StartupError: the place is gone.
        """


class MissingError(StartupError):
    """Not all ranks have come; says which, and why.

    Attributes:
        missing: they; empty where it is not known.
    """

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)

    @classmethod
    def of(cls, missing: Sequence[int], how: str) -> MissingError:
        """``how`` goes on with the sentence."""
        return cls(f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} {how}", missing)

    @classmethod
    def late(cls, missing: Sequence[int], timeout_s: float, limit: str = START_LIMIT) -> MissingError:
        """``limit`` says what ``timeout_s`` comes from."""
        return cls.of(missing, f"did not come within {timeout_s:.1f} s; if the start is only slow, raise {limit}")


def read(told: Sequence[bytes]) -> list[Any]:
    """The values that ranks have written by `hvdlite.plain` where strangers may have written as well.

    Raises:
        StartupError: they have.
    """
    try:
        return [plain.loads(data) for data in told]
    except ValueError as error:
        raise StartupError(f"another program has written where ranks meet: {error}") from None


class RendezvousRanks:
    """A `hvdlite.agreement.Bootstrap`: ``ranks`` of the launcher, of which this process is ``rank``, at ``place``.

    Args:
        name: what no other ranks at ``place`` are called.
        timeout_s: how long this process may wait for the others in all, where they build a world.
        waits_in: what errors call the wait.

    Attributes:
        timeout_s: of the subsets that follow.
    """

    comm = None

    def __init__(
        self,
        place: Place,
        name: str,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        *,
        waits_in: str = "hvd.init()",
    ) -> None:
        self.rank = ranks.index(rank)
        self.size = len(ranks)
        self._place = place
        self._name = name
        self._ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self._waits_in = waits_in
        self._patience = Patience(timeout_s)
        self._gathered = 0
        self._subsets: Counter[tuple[int, ...]] = Counter()

    def allgather(self, value: Any, /) -> list[Any]:
        """Every rank's ``value``, by rank.

        Raises:
            StartupError: names the ranks that did not come.
        """
        self._gathered += 1
        key = f"{self._name}:{self._gathered}"
        own = self._ranks[self.rank]
        try:
            told = self._place.gather(key, self._ranks, own, plain.dumps(value), self._patience)
        except MissingError as error:
            raise StartupError(f"rank {own} has waited in {self._waits_in}, but {error}") from None
        return read(told)

    def subset(self, ranks: Sequence[int], /) -> RendezvousRanks:
        """See `hvdlite.agreement.Bootstrap`. A rank that has made the same subset before makes another one."""
        check_subset(ranks, self.rank, self.size)
        members = tuple(self._ranks[rank] for rank in ranks)
        self._subsets[members] += 1
        # Not the members themselves: each of 1,024 ranks would name all of them 1,024 times in each of its messages.
        digest = blake2b(",".join(map(str, members)).encode(), digest_size=8).hexdigest()
        name = f"{self._name}/{digest}#{self._subsets[members]}"
        own = self._ranks[self.rank]
        return RendezvousRanks(self._place, name, members, own, self.timeout_s, waits_in=self._waits_in)

    def close(self) -> None:
        """Nothing is held."""
