"""How ranks that hear of a failure find out who of them lives, and agree on it: by messages, each with a time limit.

Each calls all others as soon as it hears of the failure, and again and again, on a thread that has nothing else to do.
The main threads come later, when they are through with what they do: then they ask the first rank that lives to be in
the next generation. It waits for all that call, leaves out who is silent, and tells the others who is in. If it dies,
they ask the next.

Ranks that live may have given one another up, where a link was down for a while: then each side has a first rank of its
own, and some wait for who waits for a rank that they have given up. So a call says whom its sender has passed over, and
whom it has asked, and nobody waits for one that asks elsewhere. The larger side has the first word.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from hvdlite import plain
from hvdlite.errors import StartupError
from hvdlite.recovery.lifeline import GoneError

_NAP_S = 0.5e-3
_PROOF_S = 1.5  # who calls so long after it was passed over lives: calls come every second


class Messages(Protocol):
    """What a meeting asks of `hvdlite.recovery.lifeline.Lifeline`."""

    def send(self, to: int, key: str, data: bytes) -> None: ...
    def receive(self, source: int, key: str) -> bytes | None: ...


def call_to(number: int) -> str:
    """The key of the message by which a rank says that it lives, and will come to generation ``number``."""
    return _key("call", number)


class _Call(NamedTuple):
    """What a rank has said last, and when it was heard."""

    when_s: float
    passed_over: Collection[int] = ()
    asked: int = -1  # nobody: it has not come yet


class SurvivorMeeting:
    """What one rank, ``own``, does while generation ``number`` comes together.

    Args:
        workers: ranks of the last generation, in their order.
        silence_s: who has not called within it is dead, or out of reach.
        quiet_s: who has called, and does not call again for so long, has died since, is stopped, or has met others.
        patience_s: for so long who calls is waited for: it may have to come to the end of what it does.
        call: calls all others with these bytes, from now on.
    """

    def __init__(
        self,
        messages: Messages,
        number: int,
        own: int,
        workers: Sequence[int],
        *,
        silence_s: float,
        quiet_s: float,
        patience_s: float,
        call: Callable[[bytes], None],
    ) -> None:
        self._messages = messages
        self._number = number
        self._own = own
        self._workers = workers
        self._silence_s = silence_s
        self._quiet_s = quiet_s
        self._patience_s = patience_s
        self._call = call
        self._since_s = time.monotonic()
        self._calls: dict[int, _Call] = {}
        self._gone: set[int] = set()  # who has died, as MPI says
        self._passed_over: dict[int, float] = {}  # who is not waited for any more, and since when

    def members(self, dead: Collection[int], refusal: Callable[[int], str]) -> tuple[int, ...]:
        """Who is in the generation, in the order of the workers.

        Args:
            dead: those that are known to have died.
            refusal: why that many ranks may not go on, empty where they may; called by the rank that decides.

        Raises:
            StartupError: they may not; on all of them. Or another one says what makes no sense.
        """
        for worker in dead:
            self._passed_over[worker] = time.monotonic()
        living = [worker for worker in self._workers if worker not in dead]
        for place, first in enumerate(living):
            self._call(plain.dumps(([*self._passed_over], first)))
            if first == self._own:
                return self._read(self._decide(living[place + 1 :], refusal), first)
            self._messages.send(first, _key("join", self._number), b"")
            answer = self._answer_of(first)
            if answer is not None:
                return self._read(answer, first)
            self._passed_over[first] = time.monotonic()
        raise AssertionError(f"{self._own} is not in {living}")

    def _decide(self, others: Sequence[int], refusal: Callable[[int], str]) -> bytes:
        members = (self._own, *self._gather(others))
        answer = plain.dumps(refusal(len(members)) or members)
        for other in members[1:]:
            self._messages.send(other, _key("answer", self._number), answer)
        return answer

    def _gather(self, others: Sequence[int]) -> list[int]:
        """Those of ``others`` that come."""
        came: set[int] = set()
        complete_s = math.inf  # since when nobody else is waited for
        while True:
            self._listen()
            came.update(other for other in others if other not in came and self._received(other, "join") is not None)
            if any(not (other in came or self._is_given_up(other) or self._is_elsewhere(other)) for other in others):
                complete_s = math.inf
            else:
                complete_s = min(complete_s, time.monotonic())
                elsewhere = sum(worker not in came and self._is_elsewhere(worker) for worker in self._workers)
                if elsewhere <= 1 + len(came) or time.monotonic() > complete_s + self._quiet_s:
                    return [other for other in others if other in came]
            time.sleep(_NAP_S)

    def _answer_of(self, first: int) -> bytes | None:
        """What ``first`` says; None where it is dead, or asks one that was passed over, and lives."""
        while True:
            answer = self._received(first, "answer")
            if answer is not None:
                return answer
            self._listen()
            if self._is_given_up(first) or self._asks_elsewhere(first):
                return None
            time.sleep(_NAP_S)

    def _received(self, source: int, what: str) -> bytes | None:
        try:
            return self._messages.receive(source, _key(what, self._number))
        except GoneError:
            self._gone.add(source)
            return None

    def _listen(self) -> None:
        """Hear who has called; also those that were passed over."""
        for worker in self._workers:
            if (
                worker != self._own
                and worker not in self._gone
                and (call := self._received(worker, "call")) is not None
            ):
                self._calls[worker] = self._call_of(worker, call)

    def _call_of(self, worker: int, call: bytes) -> _Call:
        if not call:
            return _Call(time.monotonic())
        with suppress(ValueError):
            match plain.loads(call):
                case (list() as passed_over, int() as asked) if all(isinstance(other, int) for other in passed_over):
                    return _Call(time.monotonic(), passed_over, asked)
        raise _nonsense(worker, call)

    def _read(self, answer: bytes, first: int) -> tuple[int, ...]:
        with suppress(ValueError):
            match plain.loads(answer):
                case str() as reason:
                    raise StartupError(reason)
                case tuple() as members if self._own in members and all(member in self._workers for member in members):
                    return members
        raise _nonsense(first, answer)

    def _is_given_up(self, other: int) -> bool:
        now = time.monotonic()
        waited_s = now - self._since_s
        if other in self._gone:
            return True
        if other not in self._calls:
            return waited_s > self._silence_s
        return waited_s > self._patience_s or now - self._calls[other].when_s > self._quiet_s

    def _is_elsewhere(self, other: int) -> bool:
        """Whether a rank calls that will not come to this one."""
        call = self._calls.get(other)
        if call is None or other in self._gone or time.monotonic() - call.when_s > self._quiet_s:
            return False
        return self._own in call.passed_over or self._asks_elsewhere(other)

    def _asks_elsewhere(self, other: int) -> bool:
        """Whether a rank has asked one that was passed over here, though that one lives."""
        call = self._calls.get(other)
        passed_s = math.inf if call is None else self._passed_over.get(call.asked, math.inf)
        return call is not None and call.asked in self._calls and self._calls[call.asked].when_s > passed_s + _PROOF_S


def _key(what: str, number: int) -> str:
    return f"{what} {number}"


def _nonsense(worker: int, said: bytes) -> StartupError:
    return StartupError(
        f"rank {worker} of the job has sent what makes no sense where those that live meet: {said[:100]!r}"
    )
