"""Which processes of an elastic job are ranks, and when those that wait become the next generation of them.

Pure: what has happened goes in, a generation comes out. `hvdlite.cli.elastic` has the processes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Join:
    """What a worker, a process of the job, says when it wants to be a rank.

    Attributes:
        worker: its number; a process that takes the place of another one has another number.
        failed: the rank whose failure has ended the worker's last generation; None: it is new, or none has failed.
        follows_rank_0: whether the state that all get is rank 0's, which then must not be new.
    """

    worker: int
    failed: int | None = None
    follows_rank_0: bool = True


@dataclass(frozen=True)
class Generation:
    """Ranks that begin together.

    Attributes:
        number: 1, 2, 3, ...
        workers: by rank.
        are_alike: whether all were in the generation before, and none has gone back because of a failure there.
    """

    number: int
    workers: tuple[int, ...]
    are_alike: bool


class Roster:
    """Living workers: members of the present generation, and those that are new.

    Each has a seat, which gives the ranks their order: who takes the seat of a dead rank gets its rank, and so its
    local rank, by which programs choose their GPU.

    Args:
        least: so many ranks a generation has to have.

    Attributes:
        number: of the present generation; 0 before the first.
        members: workers of the present generation that live, by number.
        waiting: those that want to be ranks of the next one.
    """

    def __init__(self, least: int) -> None:
        self.number = 0
        self.members: set[int] = set()
        self.waiting: dict[int, Join] = {}
        self._least = least
        self._seats: dict[int, int] = {}  # of all that live

    def add(self, worker: int, seat: int) -> None:
        """A process was started."""
        self._seats[worker] = seat

    def come(self, join: Join) -> None:
        """A worker waits for the next generation."""
        self.waiting[join.worker] = join

    def remove(self, worker: int) -> None:
        """It has ended, or is to be no rank any more."""
        self._seats.pop(worker, None)
        self.waiting.pop(worker, None)
        self.members.discard(worker)

    @property
    def workers(self) -> set[int]:
        """All that live."""
        return set(self._seats)

    @property
    def newcomers(self) -> set[int]:
        return self.workers - self.members

    @property
    def late(self) -> set[int]:
        """Members for whom others wait."""
        is_ending = any(worker in self.members for worker in self.waiting)
        return self.members - self.waiting.keys() if is_ending else set()

    @property
    def is_short(self) -> bool:
        """Whether all members wait, or there are none, for more workers to come."""
        return bool(self.waiting) and not self.members - self.waiting.keys()

    @property
    def knocks(self) -> bool:
        """Whether newcomers wait for the members to make room."""
        return bool(self.waiting.keys() - self.members) and bool(self.members)

    def next_generation(self) -> Generation | None:
        """The ranks that begin now, if all have come that are to come; the first generation has all workers.

        Later ones do not wait for who is still starting, unless there would be too few.
        """
        expected = self.members if self.number else self.workers
        if not self.waiting or expected - self.waiting.keys() or len(self.waiting) < self._least:
            return None
        order = sorted(self.waiting, key=lambda worker: self._seats[worker])
        old = [worker for worker in order if worker in self.members]
        if old and any(self.waiting[worker].follows_rank_0 for worker in old):
            order.remove(old[0])
            order.insert(0, old[0])
        is_after_failure = any(join.failed is not None for join in self.waiting.values())
        are_alike = len(old) == len(order) and not is_after_failure
        generation = Generation(self.number + 1, tuple(order), are_alike)
        self.number, self.members = generation.number, set(order)
        self.waiting.clear()
        return generation
