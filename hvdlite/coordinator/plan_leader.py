"""A node leader's part in frozen plans: see plan_member.py for what a plan is.

Pure: takes messages and says which to send; no MPI, no clock, no shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hvdlite.coordinator.messages import REMEMBERED_PLANS, TOO_SHORT, PlanMessage, Response, Verb
from hvdlite.coordinator.order_watch import Found, OrderWatch
from hvdlite.coordinator.plan_member import Wish
from hvdlite.coordinator.request import Request

Sender = tuple[int, ...]
"""The ranks that a sender speaks for."""


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
            if message.count == TOO_SHORT and not (self.is_open and self._watch.may_be_longer()):
                return None
            if message.count > 0 and self.is_open:
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
        """For the root: something else is to come than a plan that runs free, which has to end before."""
        return None if self._holding else self._hold()

    @property
    def is_in_log(self) -> bool:
        """Whether the log says all that ranks do, and no word that is under way can change that."""
        return not (self._holding or self.runs_free)

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

    def changed(self, wish: Wish, done: int, period: int) -> None:
        """All ranks have changed their plan, after ``done`` operations, for one of ``period`` operations."""
        assert self._watch is not None and self.runs_free, wish
        self._watch.broken(done, self._period)
        self._watch.resumed(wish.plan, wish.first)
        self.number += 1
        self._period = period
        self._watch.opened(self.number)

    def _hold(self) -> PlanMessage:
        assert self._watch is not None
        self._holding = True
        self._wanted = 0 if self.is_open else self._watch.period()
        self._seen = self._watch.length
        return PlanMessage(Verb.HOLD, self._wanted if self._asks else 0)

    def _decide(self, watch: OrderWatch, answer: PlanMessage, claimed: Callable[[], Sequence[Request]]) -> PlanMessage:
        count = answer.count
        if self.is_open:
            watch.broken(count, self._period)
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
