"""An order that repeats is frozen, and then a count says what otherwise takes a claim and a response per operation.

Training does the same operations in the same order in every step. When the log has repeated itself for long enough, the
root freezes the period: from then on every rank counts how many operations of the plan it is ready for, in the plan's
order; leaders pass on the smallest count of those below them; the root writes into the log how far all may go.
Operations that are not of the plan are negotiated as ever, in between.

A rank for which the plan does not come true (something of it is missing, or is different now, or others do not come)
asks the root to end it. Before a plan begins or ends, everybody holds new claims back for a moment, so that no
operation is claimed in one way here and in the other there.

Pure: no MPI, no clock, no shared memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdlite.coordinator.messages import NAMED, Kind, Request, Response
from hvdlite.coordinator.submission import Submission

_FREEZABLE = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.BARRIER, Kind.REDUCESCATTER)  # nothing of them varies between ranks
_LONGEST_PATIENCE = 64
_WORTH_IT = 4  # times as long as it took to find it


class OrderWatch:
    """The root's: finds out when the responses of the log repeat themselves.

    Args:
        longest: period that is looked for, in operations; 0 for none at all.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._patience = 2  # periods that must have come again
        self._restart()

    def _restart(self) -> None:
        self._numbers: dict[Request, int] = {}  # small integers compare faster than requests
        self._history: list[int] = []
        self._last_seen: dict[int, int] = {}
        self._period = 0
        self._matches = 0

    def saw(self, response: Response) -> None:
        """The next response of the log."""
        if response.request.kind is Kind.CONFIGURE:
            self._patience = 1  # the order changes on purpose: that this plan ends says nothing about the next one
        if response.request.kind not in _FREEZABLE or len(self._history) >= self._longest * (_LONGEST_PATIENCE + 2):
            self._restart()
            return
        number = self._numbers.setdefault(response.request, len(self._numbers))
        at = len(self._history)
        if self._period and self._history[at - self._period] == number:
            self._matches += 1
        else:
            self._period = at - self._last_seen.get(number, at)
            self._matches = 0
        self._history.append(number)
        self._last_seen[number] = at

    def period(self) -> int:
        """How many operations repeat; 0 while they do not, or not for long enough."""
        enough = self._matches >= self._patience * self._period and self._period <= self._longest
        return self._period if enough else 0

    def forget(self) -> None:
        """What the log says now is no longer all that is done."""
        if self._history:
            self._restart()

    def broken(self, periods: int) -> None:
        """A plan was ended after so many periods: wait longer before the next, unless it was worth it.

        In that case what has repeated itself beside it counts for the next: it may be all that is left to wait for.
        """
        if periods >= _WORTH_IT * self._patience:
            self._patience = 2
        else:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
            self._restart()


@dataclass(slots=True)
class _Turns:
    """Of a request: where it is in the plan's period, and how often it was submitted so far."""

    found_by: Request
    positions: list[int] = field(default_factory=list)
    offered: int = 0


class FrozenPlan:
    """What this rank has of a plan. Operations count from 0, on and on through the periods.

    Args:
        entries: (request, sequence) of the period that the log ended with.
    """

    def __init__(self, entries: Sequence[tuple[Request, int]]) -> None:
        self.ready = 0  # operations of the plan, in its order, that this rank has submitted
        self.told = 0  # of these, those that the leader knows of
        self.done = 0
        self._entries = entries
        self._turns: dict[Request, _Turns] = {}
        for position, (request, _) in enumerate(entries):
            self._turns.setdefault(request, _Turns(request)).positions.append(position)
        self._per_period = Counter(request.name for request, _ in entries)
        self._named = [Response(request, NAMED) for request, _ in entries]
        self._pending: dict[int, Submission] = {}

    def offer(self, submission: Submission) -> bool:
        """Whether it is an operation of the plan, and the one that comes next of its kind."""
        turns = self._turns_of(submission.request)
        if turns is None:
            return False
        turn, which = divmod(turns.offered, len(turns.positions))
        position = turns.positions[which]
        request, sequence = self._entries[position]
        if sequence != NAMED:
            sequence += (turn + 1) * self._per_period[request.name]
        if submission.sequence != sequence:
            return False
        turns.offered += 1
        self._pending[turn * len(self._entries) + position] = submission
        while self.ready in self._pending:
            self.ready += 1
        return True

    def _turns_of(self, request: Request) -> _Turns | None:
        turns = self._turns.get(request)
        if turns is None:  # unless not all ranks have it in the same place
            return None if request.place is None else self._turns.get(request.at(None))
        if turns.found_by is not request:
            # From now on without a comparison of contents, as long as the same operation has the same request.
            del self._turns[request]
            self._turns[request] = turns
            turns.found_by = request
        return turns

    def contradicts(self, submission: Submission) -> bool:
        """Of something that the plan does not take: whether the plan will not come true therefore."""
        return submission.request.kind in (Kind.JOIN, Kind.CONFIGURE) or submission.request.name in self._per_period

    def take(self, count: int) -> list[Response]:
        """What all ranks are ready for, up to operation ``count``; this rank does it now."""
        assert self.done <= count <= self.ready, (self.done, count, self.ready)
        responses = []
        for index in range(self.done, count):
            response = self._named[index % len(self._entries)]
            sequence = self._pending.pop(index).sequence
            responses.append(response if sequence == NAMED else Response(response.request, sequence))
        self.done = count
        return responses

    @property
    def waits(self) -> bool:
        """Whether this rank has submitted anything that is not done."""
        return bool(self._pending)

    @property
    def has_gap(self) -> bool:
        """Whether it has submitted something, but not what comes before that in the plan."""
        return len(self._pending) > self.ready - self.done

    def leftovers(self) -> list[Submission]:
        """What was submitted and is not done, in the plan's order."""
        return [self._pending[index] for index in sorted(self._pending)]
