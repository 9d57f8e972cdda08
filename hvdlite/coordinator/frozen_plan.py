"""A frozen plan: which operations come, in which order, and how far one rank has come; see plan_member.py for its use.

Pure: no MPI, no clock, no shared memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from hvdlite.coordinator.burst import Burst, KnownBurst
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.request import NAMED, Key, Request
from hvdlite.coordinator.submission import Submission

Batch = Sequence[Response] | Burst
"""What is done together."""

_serials = count()


@dataclass(slots=True)
class _Turns:
    """Of a request: where it is in the plan's period, and how often it was submitted so far."""

    found_by: Request  # the object that was looked for last
    positions: list[int] = field(default_factory=list)
    offered: int = 0


class FrozenPlan:
    """What this rank has of a plan. Operations count from 0, on and on through the periods.

    Args:
        entries: (request, sequence) of the period that the log ended with.
        is_free: every rank sees for itself how far to go.
        bursts: at which places of a period they begin; empty: each operation is done alone.

    Attributes:
        serial: of no other plan of this process.
        ready: operations of the plan, in its order, that this rank has submitted.
        told: of these, those that other ranks know of.
        counts: some operations have no names, and are numbered.
    """

    def __init__(
        self, entries: Sequence[tuple[Request, int]], is_free: bool = False, bursts: Sequence[int] = ()
    ) -> None:
        self.serial = next(_serials)
        self.is_free = is_free
        self.ready = self.told = self.done = 0
        self.counts = any(sequence != NAMED for _, sequence in entries)
        self._entries = entries
        self._turns: dict[Request, _Turns] = {}
        self._by_identity: dict[int, _Turns] = {}  # of `_Turns.found_by`
        for position, (request, _) in enumerate(entries):
            self._turns.setdefault(request, _Turns(request)).positions.append(position)
        self._per_period = Counter(request.name for request, _ in entries)
        self._named = [Response(request, NAMED) for request, _ in entries]
        self._pending: dict[int, Submission | Burst] = {}
        begins = [*(bursts or range(len(entries))), len(entries)]
        self._burst_at = [(start, end) for start, end in pairwise(begins) for _ in range(start, end)]
        known = {start: KnownBurst(entries[start:end], end) for start, end in pairwise(begins) if end - start > 1}
        self.known_bursts = {start: burst for start, burst in known.items() if burst.can_be_collected}
        """By the places of their first operations in the period."""
        self._in_burst = {
            start: [
                (self._turns[request], *self._numbers_of(request, sequence)) for request, sequence in entries[start:end]
            ]
            for start, end in pairwise(begins)
            if start in self.known_bursts
        }

    def restart(self) -> None:
        """Begin anew, with nothing submitted; only if it does not count."""
        assert not self.counts
        self.ready = self.told = self.done = 0
        self._pending.clear()
        for turns in self._turns.values():
            turns.offered = 0

    def __len__(self) -> int:
        """Of the period, in operations."""
        return len(self._entries)

    def place_after(self, request: Request) -> int:
        """In the period, of what comes after ``request``; -1 where that is in no place, or in several."""
        turns = self._turns.get(request)
        return (turns.positions[0] + 1) % len(self) if turns is not None and len(turns.positions) == 1 else -1

    def _burst_of(self, number: int) -> tuple[int, int]:
        """Where the burst of operation ``number`` begins, and ends."""
        turn, position = divmod(number, len(self._entries))
        start, end = self._burst_at[position]
        return turn * len(self._entries) + start, turn * len(self._entries) + end

    @property
    def tellable(self) -> int:
        """Of what is ready, all that is not of a burst which is incomplete."""
        return self._burst_of(self.ready)[0]

    def offer(self, submission: Submission) -> bool:
        """Whether it is an operation of the plan, and the one that comes next of its kind."""
        turns = self._turns_of(submission.request)
        if turns is None:
            return False
        turn, which = divmod(turns.offered, len(turns.positions))
        position = turns.positions[which]
        if submission.sequence != self._sequence_at(position, turn):
            return False
        turns.offered += 1
        self._pending[turn * len(self._entries) + position] = submission
        while self.ready in self._pending:
            self.ready += 1
        return True

    def offer_burst(self, burst: Burst) -> bool:
        """Whether it is what comes next in the plan, all of it."""
        start, end = self._burst_of(self.ready)
        turn, first = divmod(start, len(self._entries))
        if self.ready != start or self.has_gap or self.known_bursts.get(first) is not burst.known:
            return False
        known = self._in_burst[first]
        if len(burst.known.names) < len(burst.parts):
            expected = [number + turn * grows_by for _, number, grows_by in known]
            if expected != [part[2] for part in burst.parts]:
                return False
        for turns, _, _ in known:
            turns.offered += 1
        self._pending.update(dict.fromkeys(range(start, end), burst))
        self.ready = end
        return True

    def place_of(self, known: KnownBurst) -> int:
        """In the period, of its first operation."""
        return known.end - len(known.requests)

    def numbers_in(self, known: KnownBurst) -> list[tuple[int, int]]:
        """Of its operations, sequence in the first period, and how it grows with each."""
        return [(number, grows_by) for _, number, grows_by in self._in_burst[self.place_of(known)]]

    def count_burst_done(self, known: KnownBurst, times: int) -> None:
        """``known`` was done so many times, when it came next and nothing was waited for."""
        for turns, _, _ in self._in_burst[self.place_of(known)]:
            turns.offered += times
        self.done = self.told = self.ready = self.ready + times * len(known.requests)

    def _numbers_of(self, request: Request, sequence: int) -> tuple[int, int]:
        """The sequence in the first period of what has come as ``sequence``, and how it grows with each."""
        if sequence == NAMED:
            return NAMED, 0
        grows_by = self._per_period[request.name]
        return sequence + grows_by, grows_by

    def _sequence_at(self, position: int, turn: int) -> int:
        first, grows_by = self._numbers_of(*self._entries[position])
        return first + turn * grows_by

    def begin_next(self, request: Request, sequence: int) -> bool:
        """Count as ready what comes next, while nothing else is waited for; whether ``request`` is that.

        With nothing in between, `done` follows as far as `ready`, or `leave_next`, or `cancel_next`.
        """
        if not self.has_next(request, sequence):
            return False
        turns = self._turns_of(request)
        assert turns is not None, request
        turns.offered += 1
        self.ready += 1
        return True

    def has_next(self, request: Request, sequence: int) -> bool:
        """Whether ``request`` comes next, is done alone, and nothing is waited for."""
        if self._pending or self.done != self.ready:
            return False
        turn, position = divmod(self.ready, len(self._entries))
        expected = self._entries[position][0]
        if (expected is not request and expected != request) or sequence != self._sequence_at(position, turn):
            return False
        start, end = self._burst_at[position]
        return end - start == 1

    @property
    def begun(self) -> Key | None:
        """What was counted so, and nothing has followed yet. From any thread."""
        done = self.done
        if self._pending or done >= self.ready:
            return None
        turn, position = divmod(done, len(self._entries))
        return self._entries[position][0].name, self._sequence_at(position, turn)

    def cancel_next(self, request: Request) -> None:
        """Nobody was told."""
        turns = self._turns_of(request)
        assert turns is not None, request
        turns.offered -= 1
        self.ready -= 1

    def count_done(self, request: Request, times: int) -> None:
        """``request`` was done so many times, when it came next and nothing was waited for."""
        turns = self._turns_of(request)
        assert turns is not None, request
        turns.offered += times
        self.done = self.told = self.ready = self.ready + times

    @property
    def requests(self) -> Collection[Request]:
        return self._turns.keys()

    def alone(self, request: Request) -> Iterator[tuple[int, int, int]]:
        """Where ``request`` is done alone: place in the period, sequence in the first one, and how it grows."""
        for place in self._turns[request].positions:
            start, end = self._burst_at[place]
            if end - start == 1:
                yield place, *self._numbers_of(*self._entries[place])

    def leave_next(self, submission: Submission) -> None:
        """It waits for other ranks."""
        self._pending[self.ready - 1] = submission

    def _turns_of(self, request: Request) -> _Turns | None:
        turns = self._by_identity.get(id(request))
        if turns is None:
            turns = self._turns.get(request) or self._turns.get(request.settled())  # all ranks may not name one place
            if turns is not None:  # from now on it is known by its address, as long as it is the same object
                self._by_identity.pop(id(turns.found_by), None)
                self._by_identity[id(request)] = turns
                turns.found_by = request
        return turns

    def next_numbers(self, count: int) -> dict[str, int]:
        """Of unnamed operations, by the names of their requests: that of the next, after ``count`` operations."""
        numbers = {}
        for number in range(max(0, count - len(self._entries)), count):
            turn, position = divmod(number, len(self._entries))
            sequence = self._sequence_at(position, turn)
            if sequence != NAMED:
                numbers[self._entries[position][0].name] = sequence + 1
        return numbers

    def contradicts(self, submission: Submission) -> bool:
        """Of something that the plan does not take: whether the plan will not come true therefore."""
        return submission.request.unsettles or submission.request.name in self._per_period

    @property
    def next(self) -> Submission:
        """The first that this rank has submitted and not done."""
        submission = self._pending[self.done]
        assert isinstance(submission, Submission)  # where ranks are told nothing, bursts are of one
        return submission

    def entry(self, number: int) -> Request:
        """What operation ``number`` is, from 0."""
        return self._entries[number % len(self._entries)][0]

    def take(self, count: int) -> list[Response]:
        """What all ranks are ready for, up to operation ``count``; this rank does it now."""
        assert self.done <= count <= self.ready, (self.done, count, self.ready)
        responses = []
        for index in range(self.done, count):
            response = self._named[index % len(self._entries)]
            submission = self._pending.pop(index)
            assert isinstance(submission, Submission)
            sequence = submission.sequence
            responses.append(response if sequence == NAMED else Response(response.request, sequence))
        self.done = count
        return responses

    def take_bursts(self, count: int) -> Iterator[Batch]:
        """`take`, of a plan that runs free: what is done together, one after the other."""
        while (end := self._burst_of(self.done)[1]) <= count:
            burst = self._pending[self.done]
            if isinstance(burst, Burst):
                for number in range(self.done, end):
                    del self._pending[number]
                self.done = end
                yield burst
            else:
                yield self.take(end)

    @property
    def is_stuck(self) -> bool:
        """Whether somebody waits for what cannot be done before this rank submits something else."""
        if not (self.has_gap or self.is_incomplete):
            return False
        tellable = self.tellable
        late = (one for number, one in self._pending.items() if number >= tellable)
        return any(isinstance(one, Submission) and one.is_awaited for one in late)

    @property
    def is_incomplete(self) -> bool:
        """Whether the last burst that was begun is."""
        return self.ready > self.tellable

    @property
    def waits(self) -> bool:
        """Whether this rank has submitted anything that is not done."""
        return bool(self._pending)

    def has_only(self, burst: Burst) -> bool:
        """Whether this rank has submitted ``burst``, and nothing else is waited for."""
        return self._pending.get(self.done) is burst and self._pending.get(self.ready - 1) is burst

    @property
    def has_gap(self) -> bool:
        """Whether it has submitted something, but not what comes before that in the plan."""
        return len(self._pending) > self.ready - self.done

    def leftovers(self) -> list[Submission | Burst]:
        """What was submitted and is not done, in the plan's order."""
        return list(dict.fromkeys(self._pending[index] for index in sorted(self._pending)))
