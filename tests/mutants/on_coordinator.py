"""Wrong lines of the coordinator."""

from __future__ import annotations

from mutant import Mutant

_COORDINATOR = "hvdlite/coordinator/"
_PLANS = "unit/test_plans.py unit/test_plan_pauses.py unit/test_frozen_plan.py"
_ENDS = "unit/test_ends.py"

MUTANTS = [
    # The coordinator: whom it wakes, what it holds back, what it compares.
    Mutant(f"{_COORDINATOR}worker.py", "if missed or unfinished:", "if unfinished:", "unit/test_worker.py"),
    Mutant(f"{_COORDINATOR}worker.py", "if missed or unfinished:", "if missed:", "unit/test_worker.py"),
    Mutant(
        f"{_COORDINATOR}worker.py",
        "_unfinished\n        self.at_work.release()\n",
        "_unfinished\n",
        "unit/test_worker.py",
    ),
    Mutant(f"{_COORDINATOR}coordinator.py", "        self._attention.turn()\n", "", "2 mpi/test_runtime.py"),
    Mutant(
        f"{_COORDINATOR}in_flight.py",
        "for key in list(self._futures) if key not in self._executing]",
        "for key in list(self._futures)]",
        "unit/test_coordinator.py",
    ),
    Mutant(
        f"{_COORDINATOR}leader.py",
        "while len(self._spread) > unsent:",
        "while self._spread:",
        "unit/test_coordinator.py",
    ),
    Mutant(
        f"{_COORDINATOR}leader.py",
        "while self._own_words and self._own_words[0][0] <= self._published:",
        "while self._own_words:",
        "unit/test_coordinator.py",
    ),
    # How often a period comes without a wait.
    Mutant(f"{_COORDINATOR}plan_member.py", "waits.endswith(_PERIODS * last)", "waits.endswith(2 * last)", _PLANS),
    Mutant(f"{_COORDINATOR}order_watch.py", "if self._period < period <=", "if 0 < 0 <=", _PLANS),
    # Plans that run free across nodes: what has begun is executed only if it was not dropped.
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "(has_come and (not is_held or self._early.is_met(plan.next.request)))",
        "has_come",
        _PLANS,
    ),
    # Meetings: who is held goes in with those that have; and hears if somebody drops one.
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "(has_come and (not is_held or self._early.is_met(plan.next.request)))",
        "(has_come and not is_held)",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}coordinator.py",
        "        self._readiness.enter(batch)\n",
        "",
        "2 mpi/test_awaited.py",
    ),
    Mutant(
        f"{_COORDINATOR}plan_leader.py",
        "any(node.count > count or node.is_begun for node in nodes)",
        "any(node.is_begun for node in nodes)",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_leader.py",
        "not (self._holding or self.runs_free)",
        "not self.runs_free",
        _ENDS,
    ),
    Mutant(
        f"{_COORDINATOR}leader.py",
        "if message.has_a_place:",
        "if False:",
        _ENDS,
    ),
    Mutant(
        f"{_COORDINATOR}coordinator.py",
        "                self._owner.early.drop(reaction.begun)\n",
        "",
        _PLANS,
    ),
    # Plans that run free: when an operation is due, what ends them, and what becomes of what has begun.
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "return plan if plan is not None and plan.is_free and self._held is None else None",
        "return plan if plan is not None and plan.is_free else None",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "[*plan.take_bursts(count)] if plan.is_free else [plan.take(count)]",
        "[plan.take(count)]",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}frozen_plan.py",
        "        turns.offered -= 1\n        self.ready -= 1\n",
        "        self.ready -= 1\n",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}frozen_plan.py",
        "if self._pending or self.done != self.ready:",
        "if self._pending:",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}leader.py",
        "self._plan.runs_free:\n            self._pass_on(self._plan.make_room())\n            verdicts = []\n",
        "False:\n            verdicts = []\n",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "if found.came_alone and prevail",
        "if prevail",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "2 * sum(map(self._early.takes, requests)) > len(requests)",
        "sum(map(self._early.takes, requests)) > 0",
        _PLANS,
    ),
    # Plans that begin anew.
    Mutant(
        f"{_COORDINATOR}leader.py",
        "                self._negotiation.take_back()\n",
        "                pass\n",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}order_watch.py",
        "(self._rotation - known.began_at) % len(order)",
        "self._rotation",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "        self._numbers.update(plan.next_numbers(count))\n",
        "",
        _PLANS,
    ),
    # Bursts: where they end, and what becomes of what does not come true.
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "        if plan.is_stuck:\n            return 0.0\n",
        "",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "if math.inf in pauses or shortest_s > PAUSE_S:",
        "if shortest_s > PAUSE_S:",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_leader.py",
        "(place - came_since) % period",
        "place",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}frozen_plan.py",
        "if self.ready != start or self.has_gap or",
        "if",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}collector.py",
        "                if expected[number] != request:\n                    return None\n",
        "",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}coordinator.py",
        "            self.collector.interrupt()\n            submission.assist",
        "            submission.assist",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}burst.py",
        "        if self.is_open:  # the rest may come only after this\n            self._take_apart()\n",
        "",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}control_page.py",
        "self._capacity + min(map(_native.load64, self._tails))",
        "self._capacity + max(map(_native.load64, self._tails))",
        "unit/test_control_page.py",
    ),
    Mutant(
        f"{_COORDINATOR}negotiation.py",
        "        gathering.missing -= len(ranks)\n",
        "        gathering.missing -= 1\n",
        "unit/test_negotiation.py",
    ),
    Mutant(
        f"{_COORDINATOR}messages.py",
        "            self._slots.move_to_end(request)\n",
        "",
        "unit/test_messages.py",
    ),
    Mutant(
        f"{_COORDINATOR}order_watch.py",
        "elif not periods or (count % period and periods < self._patience):",
        "else:",
        "unit/test_plans.py",
    ),
    Mutant(
        f"{_COORDINATOR}at_once.py",
        "            self._plan.count_periods(*periods)\n",
        "            pass\n",
        "2 mpi/test_started.py",
    ),
]
