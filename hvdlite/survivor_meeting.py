"""How ranks that hear of a failure find out who of them lives, and agree on it: by messages, each with a time limit.

Each calls all others as soon as it hears of the failure, and again and again, on a thread that has nothing else to do.
The main threads come later, when they are through with what they do: then they ask the first rank that lives to be in
the next generation. It waits for all that call, leaves out who is silent, and tells the others who is in. If it dies,
they ask the next.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from hvdlite.errors import StartupError
from hvdlite.lifeline import GoneError

_NAP_S = 0.5e-3


class Messages(Protocol):
    """What a meeting asks of `hvdlite.lifeline.Lifeline`."""

    def send(self, to: int, key: str, data: bytes) -> None: ...
    def receive(self, source: int, key: str) -> bytes | None: ...


def call_to(number: int) -> str:
    """The key of the message by which a rank says that it lives, and will come to generation ``number``."""
    return f"call {number}"


class SurvivorMeeting:
    """What one rank does while generation ``number`` comes together.

    Args:
        silence_s: who has not called within it is dead, or out of reach.
        quiet_s: who has called, and does not call again for so long, has died since, or is stopped.
        patience_s: for so long who calls is waited for: it may have to come to the end of what it does.
    """

    def __init__(self, messages: Messages, number: int, silence_s: float, quiet_s: float, patience_s: float) -> None:
        self._messages = messages
        self._number = number
        self._silence_s = silence_s
        self._quiet_s = quiet_s
        self._patience_s = patience_s
        self._since_s = time.monotonic()
        self._calls: dict[int, float] = {}  # when each has called last

    def members(self, own: int, living: Sequence[int], refusal: Callable[[int], str]) -> tuple[int, ...]:
        """Who is in the generation, in the order of ``living``.

        Args:
            living: ranks of the last generation, this one among them, without those that are known to have died.
            refusal: why that many ranks may not go on, empty where they may; called by the rank that decides.

        Raises:
            StartupError: they may not; on all of them.
        """
        for place, first in enumerate(living):
            if first == own:
                return _read(self._decide(own, living[place + 1 :], refusal))
            self._messages.send(first, self._key("join"), b"")
            answer = self._answer_of(first)
            if answer is not None:
                return _read(answer)
        raise AssertionError(f"{own} is not in {living}")

    def _decide(self, own: int, others: Sequence[int], refusal: Callable[[int], str]) -> bytes:
        members = (own, *self._gather(others))
        answer = pickle.dumps(refusal(len(members)) or members)
        for other in members[1:]:
            self._messages.send(other, self._key("answer"), answer)
        return answer

    def _gather(self, others: Sequence[int]) -> list[int]:
        """Those of ``others`` that come."""
        came = set()
        missing = list(others)
        while missing:
            for other in list(missing):
                try:
                    if self._messages.receive(other, self._key("join")) is not None:
                        came.add(other)
                    elif not self._is_given_up(other):
                        continue
                except GoneError:
                    pass
                missing.remove(other)
            if missing:
                time.sleep(_NAP_S)
        return [other for other in others if other in came]

    def _answer_of(self, first: int) -> bytes | None:
        """What ``first`` says; None where it is dead."""
        with suppress(GoneError):
            while not self._is_given_up(first):
                answer = self._messages.receive(first, self._key("answer"))
                if answer is not None:
                    return answer
                time.sleep(_NAP_S)
        return None

    def _is_given_up(self, other: int) -> bool:
        now = time.monotonic()
        waited_s = now - self._since_s
        if self._messages.receive(other, call_to(self._number)) is not None:
            self._calls[other] = now
        if other not in self._calls:
            return waited_s > self._silence_s
        return waited_s > self._patience_s or now - self._calls[other] > self._quiet_s

    def _key(self, what: str) -> str:
        return f"{what} {self._number}"


def _read(answer: bytes) -> tuple[int, ...]:
    told: tuple[int, ...] | str = pickle.loads(answer)
    if isinstance(told, str):
        raise StartupError(told)
    return told
