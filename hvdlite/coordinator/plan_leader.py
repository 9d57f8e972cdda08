"""A node leader's part in frozen plans, and how the root finds one: see plan_member.py for what a plan is.

Pure: takes messages and says which to send; no MPI, no clock, no shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field

from hvdlite.coordinator.messages import REMEMBERED_PLANS, PlanMessage, Response, Verb
from hvdlite.coordinator.request import Request

_LONGEST_PATIENCE = 64
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


Sender = tuple[int, ...]
"""The ranks that a sender speaks for."""


class OrderWatch:
    """The root's: finds out when the responses of the log repeat themselves.

    Programs that alternate, as those that train and validate, come back to orders that were frozen before: each of
    these is frozen again when it has come once, as long as that is not in vain.

    Args:
        longest: period that is looked for, in operations; 0 for none at all.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._patience = 2  # periods that must have come again
        self._known: dict[Order, _Known] = {}  # latest last
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
        if not response.request.repeats or len(self._history) >= self._longest * (_LONGEST_PATIENCE + 2):
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
            return self._period
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
        found = ((order, self._rotation_of(order)) for order in self._known if len(order) == period)
        order, rotation = next(((order, start) for order, start in found if start is not None), ((), 0))
        requests = [self._requests[number] for number in self._history[-period:]]
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
        known = self._known[self._frozen]
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

    def waited(self, number: int) -> None:
        """Somebody has waited before operation ``number`` of the plan, from 0, which is of the same burst."""
        known = self._known.get(self._frozen)
        if known is not None:
            known.waits.add((self._rotation + number) % len(self._frozen))

    def forget(self) -> None:
        """What the log says now is no longer all that is done."""
        if self._history:
            self._restart()

    def broken(self, periods: int) -> None:
        """A plan was ended after so many periods: wait longer before the next, unless it was worth it.

        In that case what has repeated itself beside it counts for the next: it may be all that is left to wait for.
        """
        known = self._known.get(self._frozen)
        if known is not None:
            known.in_vain = 0 if periods else known.in_vain + 1
            if known.in_vain > 1:
                del self._known[self._frozen]
        if periods >= _WORTH_IT * self._patience:
            self._patience = 2
        else:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
            self._restart()


class PlanLeader:
    """A node leader's part.

    Args:
        senders: whose answers it collects: its own, those of its local ranks, and of its children.
        children: those of them that lead other nodes.
        watch: the root's; None for other leaders.
        own: those of them that are on this node.
        bursts: in which a plan runs free, see `hvdlite.coordinator.readiness.Readiness.bursts`; None: none does.
    """

    def __init__(
        self,
        senders: Collection[Sender],
        children: Collection[Sender],
        watch: OrderWatch | None,
        *,
        own: Collection[Sender] = (),
        bursts: Callable[[Found], Sequence[int] | None] | None = None,
    ) -> None:
        self._senders = senders
        self._own = own
        self._watch = watch
        self._bursts = bursts
        self._asks = bursts is not None and len(own) == len(senders)  # between nodes there are no bursts
        self.runs_free = False
        """A plan is open of which each rank sees how far to go, so that the log must not say what else to do."""
        self._held: dict[Sender, PlanMessage] = {}
        self._children_ready = dict.fromkeys(children, 0)
        self._passed_on = 0
        self.number = 0  # of the plan; plans are counted from 1
        self.is_open = False  # a plan is
        self._period = 0  # operations of it
        self._holding = False
        self._wanted = 0  # what a plan is held for would have as its period
        self._seen = 0  # how much of the log the watch had seen by then

    def saw(self, response: Response, *, alone: bool = False) -> None:
        """The root has written a response into the log; see `OrderWatch.saw`."""
        assert self._watch is not None
        self._watch.saw(response, alone=alone)

    def hear(
        self,
        message: PlanMessage,
        sender: Sender,
        is_idle: bool,
        claimed: Callable[[], Sequence[Request]] = lambda: (),
    ) -> PlanMessage | None:
        """What to pass on: the root into the log, others to their parent.

        Args:
            is_idle: no claim is known to this leader that is not answered.
            claimed: what is claimed and not answered, if that may be taken back; see `Verb.REOPEN`.
        """
        if message.verb is Verb.READY:
            self._children_ready[sender] = message.count
            return None
        if message.verb is Verb.BREAK:
            if self._watch is None:
                return message
            if message.count and self.is_open:
                self._watch.waited(message.count)
            return self._hold() if self.is_open and not self._holding else None
        assert message.verb is Verb.HELD, message
        self._held[sender] = message
        if len(self._held) < len(self._senders):
            return None
        answer = self._answer(is_idle)
        self._held.clear()
        # Nobody will say more about this plan, and nobody can have said anything about the next.
        self._children_ready = dict.fromkeys(self._children_ready, 0)
        return answer if self._watch is None else self._decide(self._watch, answer, claimed)

    def _answer(self, is_idle: bool) -> PlanMessage:
        """What all senders together are ready for; and what some nodes have begun, whose ranks all are ready for it."""
        if not self.is_open and not is_idle:
            return PlanMessage(Verb.HELD, -1)
        places = {place for answer in self._held.values() for place in answer.places}
        nodes = [answer for sender, answer in self._held.items() if sender not in self._own]
        if self._own:
            nodes.append(PlanMessage(Verb.HELD, min(self._held[sender].count for sender in self._own)))
        count = min(node.count for node in nodes)
        is_begun = any(node.count > count or node.is_begun for node in nodes)
        return PlanMessage(Verb.HELD, count, is_begun, tuple(sorted(places)))

    def propose(self, is_idle: bool) -> PlanMessage | None:
        """For the root: whether it is time to hold, in order to freeze what repeats itself.

        Or to end a plan that is not followed any more, while something else repeats itself beside it.
        """
        assert self._watch is not None
        if self._holding or not self._watch.period() or not (self.is_open or is_idle):
            return None
        return self._hold()

    def make_room(self) -> PlanMessage | None:
        """For the root: something is claimed beside a plan that runs free, which has to end before."""
        return None if self._holding else self._hold()

    def ready(self, local: int) -> PlanMessage | None:
        """What to pass on where ``local`` operations are ready on all local ranks."""
        count = min([local, *self._children_ready.values()])
        if self._holding or not self.is_open or self.runs_free or count <= self._passed_on:
            return None
        self._passed_on = count
        if self._watch is not None:
            self._watch.forget()
        return PlanMessage(Verb.READY if self._watch is None else Verb.GO, count)

    def obey(self, message: PlanMessage) -> None:
        """Do what the log says."""
        self._holding = message.verb is Verb.HOLD
        if message.verb in (Verb.FREEZE, Verb.RELEASE, Verb.REOPEN):
            self.number += 1
            self.is_open, self._passed_on = True, 0
            self.runs_free = message.verb is not Verb.FREEZE
        elif message.verb is Verb.END:
            self.is_open = self.runs_free = False

    def _hold(self) -> PlanMessage:
        assert self._watch is not None
        self._holding = True
        self._wanted = 0 if self.is_open else self._watch.period()
        self._seen = self._watch.length
        return PlanMessage(Verb.HOLD, self._wanted if self._asks else 0)

    def _decide(self, watch: OrderWatch, answer: PlanMessage, claimed: Callable[[], Sequence[Request]]) -> PlanMessage:
        count = answer.count
        if self.is_open:
            watch.broken(count // self._period)
            return self._reopened(watch, count, claimed()) or PlanMessage(
                Verb.END, count, answer.is_begun and self.runs_free
            )
        period = watch.period()
        if not period or period != self._wanted or count < 0:
            return PlanMessage(Verb.RESUME)
        came_since = watch.length - self._seen  # what was claimed before all were held
        found = watch.freeze(period, {(place - came_since) % period for place in answer.places})
        bursts = None if self._bursts is None else self._bursts(found)
        self._period = period
        watch.opened(self.number + 1)
        if bursts is None:
            return PlanMessage(Verb.FREEZE, period)
        return PlanMessage(Verb.RELEASE, period, places=tuple(bursts))

    def _reopened(self, watch: OrderWatch, count: int, claimed: Sequence[Request]) -> PlanMessage | None:
        """In place of END, where what is claimed is an order that was frozen before."""
        if not claimed or not self.runs_free or self._bursts is None:
            return None
        reopened = watch.reopen(claimed, self.number - REMEMBERED_PLANS)
        bursts = None if reopened is None else self._bursts(reopened.found)
        if reopened is None or bursts is None:
            return None
        self._period = len(reopened.found.requests)
        watch.opened(self.number + 1)
        places = tuple(bursts)
        return PlanMessage(Verb.REOPEN, count, places=places, plan=reopened.number, first=reopened.first)
