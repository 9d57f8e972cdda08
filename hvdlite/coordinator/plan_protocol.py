"""How ranks begin, follow and end a frozen plan together: a part for every rank and one for every node leader.

HOLD and what comes after it (RESUME, FREEZE or END) are in the log, so every rank takes them at the same point. Between
the two no rank claims anything, and the answers, HELD, come up behind all claims that were made before: when the root
has all of them, it knows of every claim there is.

Pure: takes messages and says which to send. See frozen_plan.py for the plan itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvdlite.coordinator.frozen_plan import FrozenPlan, OrderWatch
from hvdlite.coordinator.messages import PlanMessage, Request, Response, Verb
from hvdlite.coordinator.submission import Submission

_GAP_S = 0.01  # what comes first in the plan may take so long when something behind it is there already

Sender = tuple[int, ...]
"""The ranks that a sender speaks for."""


@dataclass(slots=True)
class Step:
    """What a rank does because of a message of the log."""

    responses: Sequence[Response] = ()
    again: Sequence[Submission] = ()  # submit these once more
    answer: PlanMessage | None = None


class PlanMember:
    """One rank's part.

    Args:
        longest: plan, in operations.
        patience_s: after which what waits for other ranks is negotiated, so that the watch for stalls can see it.
    """

    def __init__(self, longest: int, patience_s: float) -> None:
        self._patience_s = patience_s
        self.number = 0  # of the plan; plans are counted from 1
        self.plan: FrozenPlan | None = None
        self._recent: deque[tuple[Request, int]] = deque(maxlen=longest)
        self._held: list[Submission] | None = None  # a list while claims are held back
        self._moved_s = math.inf
        self._contradicted = False
        self._gave_up = False

    def logged(self, response: Response) -> None:
        """A response of the log, which may become a part of a plan."""
        self._recent.append((response.request, response.sequence))

    def admit(self, submission: Submission, now_s: float) -> bool:
        """Whether that is all there is to do; False where the submission must be claimed."""
        if self._held is not None:
            self._held.append(submission)
            return True
        if self.plan is None:
            return False
        if self.plan.offer(submission):
            self._moved_s = now_s
            return True
        self._contradicted |= self.plan.contradicts(submission)
        return False

    def complaint(self, now_s: float) -> PlanMessage | None:
        """A wish to end the plan, once, where it does not come true."""
        if self.plan is None or self._gave_up or self._held is not None or self.patience_s(now_s) > 0:
            return None
        self._gave_up = True
        return PlanMessage(Verb.BREAK)

    def patience_s(self, now_s: float) -> float:
        """When to ask for a `complaint`, in seconds from now."""
        if self.plan is None or self._gave_up:
            return math.inf
        if self._contradicted:
            return 0.0
        if not self.plan.waits:
            return math.inf
        return max(0.0, self._moved_s + (_GAP_S if self.plan.has_gap else self._patience_s) - now_s)

    def obey(self, message: PlanMessage, now_s: float) -> Step:
        """Do what the log says."""
        verb, step = message.verb, Step()
        if verb is Verb.GO:
            assert self.plan is not None
            step.responses = self.plan.take(message.count)
            self._moved_s = now_s
        elif verb is Verb.HOLD:
            self._held = []
            step.answer = PlanMessage(Verb.HELD, 0 if self.plan is None else self.plan.ready)
        else:
            assert self._held is not None, message
            step.again, self._held = self._held, None
            if verb is Verb.FREEZE:
                self.plan = FrozenPlan(list(self._recent)[-message.count :])
                self.number += 1
                self._contradicted = self._gave_up = False
            elif verb is Verb.END:
                assert self.plan is not None
                step.responses = self.plan.take(message.count)
                step.again = [*self.plan.leftovers(), *step.again]
                self.plan = None
        return step


class PlanLeader:
    """A node leader's part.

    Args:
        senders: whose answers it collects: its own, those of its local ranks, and of its children.
        children: those of them that lead other nodes.
        watch: the root's; None for other leaders.
    """

    def __init__(self, senders: Collection[Sender], children: Collection[Sender], watch: OrderWatch | None) -> None:
        self._senders = senders
        self._watch = watch
        self._held: dict[Sender, int] = {}
        self._children_ready = dict.fromkeys(children, 0)
        self._passed_on = 0
        self._is_open = False  # a plan is
        self._period = 0  # operations of it
        self._holding = False

    def saw(self, response: Response) -> None:
        """The root has written a response into the log."""
        assert self._watch is not None
        self._watch.saw(response)

    def hear(self, message: PlanMessage, sender: Sender, is_idle: bool) -> PlanMessage | None:
        """What to pass on: the root into the log, others to their parent.

        Args:
            is_idle: no claim is known to this leader that is not answered.
        """
        if message.verb is Verb.READY:
            self._children_ready[sender] = message.count
            return None
        if message.verb is Verb.BREAK:
            if self._watch is None:
                return message
            return self._hold() if self._is_open and not self._holding else None
        assert message.verb is Verb.HELD, message
        self._held[sender] = message.count
        if len(self._held) < len(self._senders):
            return None
        count = min(self._held.values())
        if not self._is_open and not is_idle:
            count = -1
        self._held.clear()
        # Nobody will say more about this plan, and nobody can have said anything about the next.
        self._children_ready = dict.fromkeys(self._children_ready, 0)
        return PlanMessage(Verb.HELD, count) if self._watch is None else self._decide(self._watch, count)

    def propose(self, is_idle: bool) -> PlanMessage | None:
        """For the root: whether it is time to hold, in order to freeze what repeats itself.

        Or to end a plan that is not followed any more, while something else repeats itself beside it.
        """
        assert self._watch is not None
        if self._holding or not self._watch.period() or not (self._is_open or is_idle):
            return None
        return self._hold()

    def ready(self, local: int) -> PlanMessage | None:
        """What to pass on where ``local`` operations are ready on all local ranks."""
        count = min([local, *self._children_ready.values()])
        if self._holding or not self._is_open or count <= self._passed_on:
            return None
        self._passed_on = count
        if self._watch is not None:
            self._watch.forget()
        return PlanMessage(Verb.READY if self._watch is None else Verb.GO, count)

    def obey(self, message: PlanMessage) -> None:
        """Do what the log says."""
        self._holding = message.verb is Verb.HOLD
        if message.verb is Verb.FREEZE:
            self._is_open, self._passed_on, self._period = True, 0, message.count
        elif message.verb is Verb.END:
            self._is_open = False

    def _hold(self) -> PlanMessage:
        self._holding = True
        return PlanMessage(Verb.HOLD)

    def _decide(self, watch: OrderWatch, count: int) -> PlanMessage:
        if self._is_open:
            watch.broken(count // self._period)
            return PlanMessage(Verb.END, count)
        period = watch.period()
        if not period or count < 0:
            return PlanMessage(Verb.RESUME)
        watch.forget()
        return PlanMessage(Verb.FREEZE, period)
