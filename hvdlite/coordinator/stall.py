"""Names the ranks that have not submitted what others wait for: which tensor, what they did last, where they are."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.config import Config
from hvdlite.coordinator.messages import Notice
from hvdlite.coordinator.request import Key
from hvdlite.errors import StallError
from hvdlite.rank_list import rank_list
from hvdlite.tracebacks import is_of_a_library

_LOG = logging.getLogger("hvdlite")
_ANSWER_S = 2.0  # how long the root waits for answers before it reports what it has
_LOOK_S = 0.25
_FRAMES = 3
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

Waiting = Callable[[], list[tuple[Key, str, float]]]


class StallWatch:
    """The root's watch. When a tensor waits too long it asks every rank where it stands, and reports the answers."""

    def __init__(self, config: Config, ranks: Sequence[int]) -> None:
        self._check_s = 0.0 if config.stall_check_disable else config.stall_check_time_s
        self._shutdown_s = 0.0 if config.stall_check_disable else config.stall_shutdown_time_s
        self._ranks = ranks
        self._reported: set[Key] = set()
        self._next_look_s = 0.0 if self._check_s or self._shutdown_s else math.inf
        self._asked_s: float | None = None
        self._question = 0
        self._answers: dict[int, dict[str, Any]] = {}

    def look(self, waiting: Waiting, now_s: float) -> Notice | None:
        """Called every cycle; returns a question to send to all ranks when one is due.

        Raises:
            StallError: something waited longer than HVDLITE_STALL_SHUTDOWN_TIME_SECONDS.
        """
        if now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + _LOOK_S
        if self._asked_s is not None:
            if len(self._answers) == len(self._ranks) or now_s - self._asked_s > _ANSWER_S:
                self._report(waiting(), now_s)
            return None
        items = waiting()
        self._reported.intersection_update(key for key, _, _ in items)
        limit_s = min(limit for limit in (self._check_s, self._shutdown_s) if limit)
        if all(now_s - since_s < limit_s or key in self._reported for key, _, since_s in items):
            if self._shutdown_s and any(now_s - since_s >= self._shutdown_s for _, _, since_s in items):
                self._reported.clear()  # ask once more: the error shall say where the ranks are now
                return self._ask(now_s)
            return None
        return self._ask(now_s)

    @property
    def is_asking(self) -> bool:
        """Whether it waits for answers, and must go on looking."""
        return self._asked_s is not None

    def take_answer(self, content: dict[str, Any]) -> bool:
        """Whether the notice was an answer to a question of ours."""
        if content["kind"] != "status":
            return False
        if content["question"] == self._question:
            self._answers[content["rank"]] = content
        return True

    def _ask(self, now_s: float) -> Notice:
        self._asked_s = now_s
        self._question += 1
        self._answers = {}
        return Notice({"kind": "stall_query", "question": self._question})

    def _report(self, waiting: list[tuple[Key, str, float]], now_s: float) -> None:
        self._asked_s = None
        texts = []
        for key, label, since_s in waiting:
            waited_s = now_s - since_s
            fatal = self._shutdown_s and waited_s >= self._shutdown_s
            if fatal or (waited_s >= self._check_s > 0 and key not in self._reported):
                texts.append(self._describe(key, label, waited_s))
                self._reported.add(key)
            if fatal:
                raise StallError(f"{texts[-1]} It waited longer than HVDLITE_STALL_SHUTDOWN_TIME_SECONDS.")
        for text in texts:
            _LOG.warning("StallWarning: %s", text)

    def _describe(self, key: Key, label: str, waited_s: float) -> str:
        ready = [rank for rank, answer in self._answers.items() if list(key) in answer["in_flight"]]
        joined = [rank for rank, answer in self._answers.items() if answer["joined"]]
        missing = [rank for rank in self._ranks if rank not in ready and rank not in joined]
        count = f"{len(ready)} of {len(self._ranks)}"
        lines = [
            f"{label} has waited {waited_s:.0f} s for {rank_list(missing)} ({count} are ready)."
            if missing
            else f"{label} has waited {waited_s:.0f} s; every rank is ready by now."
        ]
        for rank in missing[:8]:
            answer = self._answers.get(rank)
            if answer is None:
                lines.append(f"Rank {rank} does not answer: its process is stopped or very busy.")
            else:
                did = f"last submitted '{answer['last']}'" if answer["last"] else "has submitted nothing yet"
                lines.append(f"Rank {rank} {did} and is at {answer['where']}.")
        lines.append("A branch that only some ranks take is the usual cause.")
        return " ".join(lines)


def status_of(
    question: dict[str, Any], rank: int, last_submitted: str, in_flight: list[Key], has_joined: bool = False
) -> dict[str, Any]:
    """This rank's answer: what it has submitted and where its main thread is."""
    return {
        "kind": "status",
        "question": question["question"],
        "rank": rank,
        "last": last_submitted,
        "in_flight": [list(key) for key in in_flight],
        "joined": has_joined,
        "where": _where_main_thread_is(),
    }


def _where_main_thread_is() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its end"
    # In a DataLoader, or in backward, many frames of libraries are below the line that led there.
    stack = traceback.extract_stack(frame)
    others = [entry for entry in stack if not entry.filename.startswith((_PACKAGE, "<frozen"))]
    shown = [entry for entry in others if not is_of_a_library(entry.filename)][-_FRAMES:] or others[-_FRAMES:]
    if others and others[-1] is stack[-1] is not shown[-1]:
        shown.append(stack[-1])
    return " > ".join(f"{at.filename}:{at.lineno} in {at.name}: {at.line}" for at in shown) or "no Python code"
