"""Frozen plans, as one rank follows them.

Training does the same operations in the same order in every step. When the log has repeated itself for long enough, the
root freezes the period: from then on every rank counts how many operations of the plan it is ready for, in the plan's
order; leaders pass on the smallest count of those below them; the root writes into the log how far all may go. A count
says what otherwise takes a claim and a response per operation. Operations that are not of the plan are negotiated as
ever, in between.

On one node a plan runs free: nobody is told how far to go, since every rank sees all counts. Its operations are done in
*bursts*, in the order of the plan, each once all counts have reached its end. Operations are of one burst if they may
travel together, and no rank has paused before it submitted the later one: ranks say where they have when they are held.
So a rank counts only to ends of bursts; if it waits in the middle of one, that plan was a mistake, and the next has an
end there. Nothing else is done meanwhile, so the first claim of something else ends such a plan, and so does the end of
the world, which the log says only behind the plan's: some ranks may be in an operation that the others have to begin.

A rank for which the plan does not come true (an operation of it is missing, or is different now, or other ranks do not
come) asks the root to end it. Before a plan begins or ends, every rank holds new claims back for a moment, so that no
operation is claimed on one rank and counted on another:

HOLD and what comes after it (RESUME, FREEZE, RELEASE, REOPEN or END) are in the log, so every rank takes them at one
point. Between the two no rank claims anything, and the answers, HELD, come up behind all claims that were made before:
when the root has all of them, it knows of every claim there is.

Between two plans that run free, both of which were frozen before, nobody is held: where a program comes to the
beginning of another one, and nothing else is under way, each rank says which it wants, and once all want the same they
change (`ReadyCounts::agree` of csrc/node/ready_counts.h).

Pure: takes messages and says which to send; no MPI, no clock, no shared memory. plan_leader.py has the leaders' part.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hvdlite.coordinator.burst import BURST_S, Burst
from hvdlite.coordinator.frozen_plan import Batch, FrozenPlan
from hvdlite.coordinator.messages import REMEMBERED_PLANS, TOO_SHORT, PlanMessage, Response, Verb
from hvdlite.coordinator.request import NAMED, Key, Request
from hvdlite.coordinator.submission import PAUSE_S, Submission

_GAP_S = 0.01  # what is missing may take so long when what is behind it in the plan is there
_MANY = 64  # periods without a wait, after which it is worth to look for a longer plan
_PERIODS = 3  # of which are remembered where this rank has paused


@dataclass(slots=True)
class Reaction:
    """What a rank does because of a message of the log."""

    batches: Sequence[Batch] = ()
    again: Sequence[Submission | Burst] = ()  # submit these once more
    answer: PlanMessage | None = None
    begins: bool = False  # a plan does
    withdraws: bool = False  # what has been begun of a plan that ran free, and is in no batch
    begun: Request | None = None  # some ranks have begun this, and nobody will do it


class Wish(NamedTuple):
    """For an earlier plan, by its number, from operation ``first`` of its period on."""

    plan: int
    first: int


class _Earlier:
    """A plan as it began.

    Attributes:
        order: the same object for plans of which one is another, begun elsewhere.
        has_lasted: it was done more than once the last time; so it is worth to begin it again.
    """

    def __init__(
        self, entries: Sequence[tuple[Request, int]], is_free: bool, places: Sequence[int], order: object
    ) -> None:
        self.entries = entries
        self.places = tuple(places)
        self.order = order
        self.has_lasted = False
        self.plan = FrozenPlan(entries, is_free, places)

    @cached_property
    def starts(self) -> dict[Request, int]:
        """Where operations are that come once in a period, and alone."""
        times = Counter(request for request, _ in self.entries)
        ends = {*self.places, len(self.entries)} if self.places else range(len(self.entries) + 1)
        return {
            request: place
            for place, (request, _) in enumerate(self.entries)
            if times[request] == 1 and place in ends and place + 1 in ends
        }


class PlanMember:
    """One rank's part.

    Args:
        longest: plan, in operations.
        patience_s: after which what waits for other ranks is negotiated, so that the watch for stalls can see it.
    """

    def __init__(self, longest: int, patience_s: float) -> None:
        self._longest = longest
        self._patience_s = patience_s
        self.number = 0  # of the plan; plans are counted from 1
        self.plan: FrozenPlan | None = None
        self._recent: deque[tuple[Request, int, float]] = deque(maxlen=_PERIODS * longest)
        self._held: list[Submission] | None = None  # a list while claims are held back
        self._claimed: dict[Key, Submission] = {}  # and not answered
        self._earlier: dict[int, _Earlier] = {}  # the last plans, by their numbers
        self._numbers: dict[str, int] = {}  # of unnamed operations: of the next, by the name of the request
        self._moved_s = math.inf
        self._contradicted = False
        self._gave_up = False
        self._said_too_short = False
        self._periods = [0, 0]  # of the plan, submitted without and with a wait before them

    def logged(self, response: Response, pause_s: float) -> None:
        """A response of the log, which may become a part of a plan.

        Args:
            pause_s: before this rank submitted it, see `hvdlite.coordinator.submission.Pace.step`.
        """
        self.answered(response.key)
        self._recent.append((response.request, response.sequence, pause_s))
        if response.sequence != NAMED:
            self._numbers[response.request.name] = response.sequence + 1

    def admit(self, submission: Submission, now_s: float) -> bool:
        """Whether that is all there is to do; False where the submission must be claimed."""
        if self._held is not None:
            self._held.append(submission)
            return True
        if self.plan is not None:
            if self.plan.offer(submission):
                self._moved_s = now_s
                self._count_period(self.plan, submission.request, submission.pause_s)
                return True
            self._contradicted |= self.plan.contradicts(submission)
        self._claimed[submission.key] = submission
        return False

    def admit_burst(self, burst: Burst, now_s: float) -> bool:
        """Whether that is all there is to do; False where it must be taken apart."""
        plan = self.free
        if plan is None or not plan.offer_burst(burst):
            return False
        self._moved_s = now_s
        self._count_period(plan, burst.known.requests[0], burst.pause_s)
        return True

    def _count_period(self, plan: FrozenPlan, request: Request, pause_s: float) -> None:
        """``request`` was submitted, perhaps as the first of a period."""
        if request == plan.entry(0):
            has_waited = pause_s == math.inf
            self.count_periods(not has_waited, has_waited)

    def count_periods(self, together: int, waited: int) -> None:
        """So many periods of the plan were begun, without a wait before them and with one."""
        self._periods = [self._periods[0] + together, self._periods[1] + waited]
        while max(self._periods) >= 2 * _MANY:  # programs change, so what was long ago says less
            self._periods = [times // 2 for times in self._periods]

    @property
    def free(self) -> FrozenPlan | None:
        """A plan that runs free, while it takes operations."""
        plan = self.plan
        return plan if plan is not None and plan.is_free and self._held is None else None

    def due(self, ready: int, now_s: float) -> Iterator[Batch]:
        """Of a plan that runs free, what all ranks are ready for, which is ``ready`` operations; also while it is held:
        ranks that have seen that are at it already."""
        plan = self.plan
        if plan is None or not plan.is_free or ready <= plan.done:
            return iter(())
        self._moved_s = now_s
        return plan.take_bursts(ready)

    def moved(self, now_s: float) -> None:
        """An operation of the plan was submitted."""
        self._moved_s = now_s

    def complaint(self, now_s: float) -> PlanMessage | None:
        """A wish to end the plan, once, where it does not come true, or could be longer."""
        if self.could_be_longer:
            self._said_too_short = True
            return PlanMessage(Verb.BREAK, TOO_SHORT)
        if self.plan is None or self._gave_up or self._held is not None or self.patience_s(now_s) > 0:
            return None
        self._gave_up = True
        return PlanMessage(Verb.BREAK, self.plan.ready if self.plan.is_incomplete else 0)

    @property
    def could_be_longer(self) -> bool:
        """Whether the plan is begun again without a wait about as often as with one, or more often, and this rank has
        yet to say so."""
        together, waited = self._periods
        is_too_short = self.free is not None and together >= max(_MANY, 3 * waited / 4)
        return is_too_short and not self._said_too_short

    def patience_s(self, now_s: float) -> float:
        """When to ask for a `complaint`, in seconds from now."""
        if self.plan is None or self._gave_up:
            return math.inf
        if self._contradicted:
            return 0.0
        plan = self.plan
        if not plan.waits:
            return math.inf
        if plan.is_stuck:
            return 0.0
        patience_s = _GAP_S if plan.has_gap else BURST_S if plan.is_incomplete else self._patience_s
        return max(0.0, self._moved_s + patience_s - now_s)

    def rhythm(self, period: int, length: int) -> int:
        """How often this rank submits the last ``period`` operations from one wait to the next, times ``period``.

        Equal operations that are submitted together are one period each; a plan of them all does them together.

        Args:
            length: how many operations of the log have come so.

        Returns:
            A multiple of ``period``; 0 while that is not known.
        """
        waits = bytes(pause_s == math.inf for _, _, pause_s in self._recent)[-length:]
        if waits.count(1) >= _PERIODS:
            for times in range(period, min(len(waits) // _PERIODS, self._longest) + 1, period):
                last = waits[-times:]
                if 1 in last and waits.endswith(_PERIODS * last):
                    return times
        return period if len(waits) >= _PERIODS * self._longest else 0

    def _places_after_pauses(self, period: int) -> tuple[int, ...]:
        """Where in the last ``period`` operations this rank has waited, now or before, or has always been slow."""
        recent, places = list(self._recent), []
        for place, shortest_s in enumerate(_shortest_pauses(recent, period)):
            at = len(recent) - period + place
            request = recent[at][0]
            pauses = [pause_s for other, _, pause_s in recent[at::-period][:_PERIODS] if other == request]
            if math.inf in pauses or shortest_s > PAUSE_S:
                places.append(place)
        return tuple(places)

    def answered(self, key: Key) -> None:
        """What was claimed is; by a fault, since `logged` does so by itself."""
        self._claimed.pop(key, None)

    def obey(self, message: PlanMessage, now_s: float) -> Reaction:
        """Do what the log says."""
        verb, reaction = message.verb, Reaction()
        if verb is Verb.GO:
            assert self.plan is not None
            reaction.batches = [self.plan.take(message.count)]
            self._moved_s = now_s
        elif verb is Verb.HOLD:
            self._held = []
            count, places = 0 if self.plan is None else self.plan.told, self._places_after_pauses(message.count)
            reaction.answer = PlanMessage(Verb.HELD, count, places=places)
        else:
            assert self._held is not None, message
            reaction.again, self._held = self._held, None
            if verb in (Verb.FREEZE, Verb.RELEASE):
                entries = [(request, sequence) for request, sequence, _ in self._recent][-message.count :]
                self._begin(_Earlier(entries, verb is Verb.RELEASE, message.places, object()))
                reaction.begins = True
            elif verb in (Verb.END, Verb.REOPEN):
                self._end(message, reaction)
                if verb is Verb.REOPEN:
                    reaction.again = [*self._claimed.values(), *reaction.again]
                    self._claimed.clear()
                    self._begin_again(Wish(message.plan, message.first), message.places)
                    reaction.begins = True
        return reaction

    def wish(self, request: Request) -> Wish | None:
        """What this rank wants instead of a plan of which ``request`` does not come next, while nothing is waited for.

        The same on all ranks, if they are as far in the same plan.
        """
        plan = self.free
        if plan is None or plan.waits or self._gave_up:
            return None
        now = self._earlier[self.number].order
        for number in range(self.number - 1, self.number - REMEMBERED_PLANS, -1):
            earlier = self._earlier.get(number)
            if earlier is None or earlier.order is now:
                continue
            first = earlier.starts.get(request, earlier.starts.get(request.settled()))
            if first is not None:
                return Wish(number, first) if earlier.has_lasted else None
        return None

    def change(self, wish: Wish, now_s: float) -> None:
        """All ranks want the same."""
        assert self.plan is not None
        self._finish(self.plan, self.plan.done)
        earlier = self._earlier[wish.plan]
        places = sorted((place - wish.first) % len(earlier.entries) for place in earlier.places)
        self._begin_again(wish, places)
        self._moved_s = now_s

    def _begin_again(self, wish: Wish, places: Sequence[int]) -> None:
        earlier = self._earlier[wish.plan]
        if wish.first == 0 and not earlier.plan.counts and tuple(places) == earlier.places:
            earlier.plan.restart()  # the same, so that nothing has to be made for it
            self._begin(earlier)
            return
        entries = self._renumbered(earlier.entries, wish.first)
        self._begin(_Earlier(entries, True, places, earlier.order))

    def _begin(self, begun: _Earlier) -> None:
        self.plan = begun.plan
        self.number += 1
        self._earlier[self.number] = begun
        self._earlier.pop(self.number - REMEMBERED_PLANS - 1, None)
        self._contradicted = self._gave_up = self._said_too_short = False
        self._periods = [0, 0]

    def _finish(self, plan: FrozenPlan, count: int) -> None:
        """The plan has ended after so many operations."""
        self._earlier[self.number].has_lasted = plan.is_free and count > len(plan)
        self._numbers.update(plan.next_numbers(count))

    def _end(self, message: PlanMessage, reaction: Reaction) -> None:
        plan, count = self.plan, message.count
        assert plan is not None
        reaction.withdraws = plan.is_free
        reaction.batches = [*plan.take_bursts(count)] if plan.is_free else [plan.take(count)]
        reaction.begun = plan.entry(count) if message.is_begun else None
        reaction.again = [*plan.leftovers(), *reaction.again]
        self._finish(plan, count)
        self.plan = None

    def _renumbered(self, entries: Sequence[tuple[Request, int]], first: int) -> list[tuple[Request, int]]:
        """An earlier plan from place ``first`` on, as if it had just come: unnamed operations go on counting."""
        rotated = [*entries[first:], *entries[:first]]
        unnamed = Counter(request.name for request, sequence in rotated if sequence != NAMED)
        numbers = {name: itertools.count(self._numbers.get(name, 0) - number) for name, number in unnamed.items()}
        return [(request, NAMED if sequence == NAMED else next(numbers[request.name])) for request, sequence in rotated]


def _shortest_pauses(recent: Sequence[tuple[Request, int, float]], period: int) -> list[float]:
    """Before each of the last ``period`` of ``recent``, of the last times that they came in that order.

    Whatever else came in between: an order that was frozen before is frozen again when it has come once, and anybody
    may be slow once.
    """
    last = recent[len(recent) - period :]
    shortest_s = [math.inf] * period
    found = 0
    for request, _, pause_s in reversed(recent):
        if found == _PERIODS * period:
            break
        place = period - 1 - found % period
        if request == last[place][0]:
            shortest_s[place] = min(shortest_s[place], pause_s)
            found += 1
    return shortest_s
