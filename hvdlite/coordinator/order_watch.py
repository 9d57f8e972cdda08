"""How the root finds out that an order of operations repeats itself, and knows it again.

Pure: no MPI, no clock, no shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field

from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.request import Request

_LONGEST_PATIENCE = 64
_MOST_DIFFERENT = 2  # times as many operations as the longest period has: names that never come again are forgotten
_WORTH_IT = 4  # times as long as it took to find it
_REMEMBERED = 8  # orders

Order = tuple[Request, ...]
"""Of a period, which may begin anywhere."""


@dataclass(slots=True)
class _Known:
    """Of an order that was frozen."""

    in_vain: int = 0  # times since the last good one
    came_alone: bool = False  # its operations one at a time, when it was frozen last
    after_pause: set[int] = field(default_factory=set)  # places in it of what some rank has submitted after a pause
    plan: int = 0  # number of the last plan that it was
    began_at: int = 0  # where in it that began
    waits: set[int] = field(default_factory=set)  # places in it before which somebody has waited while it was frozen


@dataclass(slots=True)
class Found:
    """What becomes a plan.

    Attributes:
        came_alone: one at a time.
        after_pause: places of those that some rank may submit only when it has waited for those before.
    """

    requests: Sequence[Request]
    came_alone: bool
    after_pause: Container[int]


@dataclass(slots=True)
class Reopened:
    """A plan that begins anew.

    Attributes:
        number: of the last that was of this order.
        first: at which place of that one it begins now.
    """

    found: Found
    number: int
    first: int


class OrderWatch:
    """The root's: finds out when the responses of the log repeat themselves.

    Programs that alternate, as those that train and validate, come back to orders that were frozen before: each of
    these is frozen again when it has come once, as long as that is not in vain.

    Args:
        longest: period that is looked for, in operations; 0 for none at all.
        rhythm: takes the shortest period, and how many operations at the end of the log have come so; gives the
            multiple of it that is looked for, 0 while that is not known.
    """

    def __init__(self, longest: int, rhythm: Callable[[int, int], int] | None = None) -> None:
        self._longest = longest
        self._rhythm = rhythm
        self._patience = 2  # periods that must have come again
        self._known: dict[Order, _Known] = {}  # latest last
        self._short: list[Order] = []  # orders of which several periods may be one, as was looked in vain
        self._frozen: Order = ()
        self._rotation = 0  # where in `_frozen` the plan begins
        self._restart()

    def _restart(self) -> None:
        self._numbers: dict[Request, int] = {}  # small integers compare faster than requests
        self._requests: list[Request] = []  # by number
        self._history: list[int] = []
        self._came_alone: list[bool] = []  # of each in the history
        self._last_seen: dict[int, int] = {}
        self._period = 0
        self._matches = 0

    def saw(self, response: Response, *, alone: bool = False) -> None:
        """The next response of the log.

        Args:
            alone: it is all of its batch.
        """
        if response.request.unsettles:
            self._patience = 1  # the order changes on purpose: that this plan ends says nothing about the next one
        too_long = len(self._history) >= self._longest * (_LONGEST_PATIENCE + 2)
        if not response.request.repeats or too_long or len(self._requests) >= _MOST_DIFFERENT * self._longest:
            self._restart()
            return
        number = self._numbers.setdefault(response.request, len(self._numbers))
        if number == len(self._requests):
            self._requests.append(response.request)
        at = len(self._history)
        if self._period and self._history[at - self._period] == number:
            self._matches += 1
        else:
            self._period = at - self._last_seen.get(number, at)
            self._matches = 0
        self._history.append(number)
        self._came_alone.append(alone)
        self._last_seen[number] = at

    def period(self) -> int:
        """How many operations repeat; 0 while they do not, or not for long enough."""
        enough = self._matches >= self._patience * self._period and self._period <= self._longest
        if self._period and enough:
            rhythm, length = self._rhythm, self._matches + self._period
            period = self._period if rhythm is None else rhythm(self._period, length)
            if period:
                return period
        return next((len(order) for order, known in self._known.items() if self._comes_again(order, known)), 0)

    def _comes_again(self, order: Order, known: _Known) -> bool:
        """Whether the history ends with ``order``; one at a time, if it came so: it may deviate on one rank still."""
        has_come = self._rotation_of(order) is not None
        return has_come and (not known.came_alone or all(self._came_alone[-len(order) :]))

    def _rotation_of(self, order: Order) -> int | None:
        """Where in ``order`` the end of the history begins, which is as long; None if it is something else."""
        length = len(order)
        if length > len(self._history) or self._requests[self._history[-1]] not in order:
            return None
        numbers = [self._numbers.get(request, -1) for request in order]
        last, tail = self._history[-1], self._history[-length:]
        starts = ((i + 1) % length for i in range(length) if numbers[i] == last)
        return next((start for start in starts if tail == numbers[start:] + numbers[:start]), None)

    @property
    def length(self) -> int:
        """Of what was seen, in operations."""
        return len(self._history)

    def freeze(self, period: int, after_pause: Collection[int]) -> Found:
        """The last ``period`` operations become a plan; remember them.

        Args:
            after_pause: places of those that some rank has submitted after a pause.
        """
        requests = [self._requests[number] for number in self._history[-period:]]
        if self._period < period <= self._matches + self._period:  # one order several times, which says little the next
            self._short.clear()
            found = Found(requests, all(self._came_alone[-period:]), after_pause)
            self._frozen, self._rotation = (), 0
            self.forget()
            return found
        known_as = ((order, self._rotation_of(order)) for order in self._known if len(order) == period)
        order, rotation = next(((order, start) for order, start in known_as if start is not None), ((), 0))
        self._frozen, self._rotation = order or tuple(requests), rotation
        known = self._known[self._frozen] = self._known.pop(self._frozen, _Known())
        known.came_alone = all(self._came_alone[-period:])
        known.after_pause = {(rotation + place) % period for place in after_pause}
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        self.forget()
        return self._found(known)

    def _found(self, known: _Known) -> Found:
        order, rotation = self._frozen, self._rotation
        pauses = {(place - rotation) % len(order) for place in known.after_pause | known.waits}
        return Found([*order[rotation:], *order[:rotation]], known.came_alone, pauses)

    def opened(self, plan: int) -> None:
        """What was frozen, or begins anew, is plan number ``plan``."""
        known = self._known.get(self._frozen)
        if known is not None:
            known.plan, known.began_at = plan, self._rotation

    def reopen(self, claimed: Sequence[Request], oldest: int) -> Reopened | None:
        """An order that was frozen before, of which ``claimed`` is the beginning; None if there is none such.

        Args:
            oldest: number of a plan that members remember.
        """
        for order, known in self._known.items():
            if order is self._frozen or known.in_vain or known.plan < oldest or order.count(claimed[0]) != 1:
                continue
            if all(request in order for request in claimed):
                self._frozen, self._rotation = order, order.index(claimed[0])
                self._known[order] = self._known.pop(order)
                self._restart()
                return Reopened(self._found(known), known.plan, (self._rotation - known.began_at) % len(order))
        return None

    def resumed(self, plan: int, first: int) -> None:
        """The order of plan number ``plan`` begins anew at its place ``first``: ranks have agreed without the log."""
        self._frozen, self._rotation = (), 0  # should it be forgotten
        for order, known in self._known.items():
            if known.plan == plan:
                self._frozen, self._rotation = order, (known.began_at + first) % len(order)
                self._known[order] = self._known.pop(order)
                break
        self._restart()

    def waited(self, number: int) -> None:
        """Somebody has waited before operation ``number`` of the plan, from 0, which is of the same burst."""
        known = self._known.get(self._frozen)
        if known is not None:
            known.waits.add((self._rotation + number) % len(self._frozen))

    def may_be_longer(self) -> bool:
        """Several periods of the plan come without a wait; whether to end it, and look how many.

        Once for each order, unless something is found.
        """
        order = self._frozen
        if self._rhythm is None or order in self._short:
            return False
        self._short = [*self._short[1 - _REMEMBERED :], order] if order else self._short
        self._known.pop(order, None)
        return True

    def forget(self) -> None:
        """What the log says now is no longer all that is done."""
        if self._history:
            self._restart()

    def broken(self, count: int, period: int) -> None:
        """A plan was ended after ``count`` operations: wait longer before the next, unless it was worth it.

        In that case what has repeated itself beside it counts for the next: it may be all that is left to wait for.
        Where it was ended between two periods, or has lasted as long as it took to find it, the program has gone on to
        something else, which may well repeat itself.
        """
        periods = count // period
        known = self._known.get(self._frozen)
        if known is not None:
            known.in_vain = 0 if periods else known.in_vain + 1
            if known.in_vain > 1:
                del self._known[self._frozen]
        if periods >= _WORTH_IT * self._patience:
            self._patience = 2
        elif not periods or (count % period and periods < self._patience):
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
            self._restart()
