"""Notices that a call between nodes takes too long, and who has not come for it."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from hvdlite.distributed.call import Call
from hvdlite.errors import StallError
from hvdlite.rank_list import rank_list
from hvdlite.world import World

_LOG = logging.getLogger("hvdlite")
_DECLARED_S = 1.0  # a rank that waits for longer says so


class _UnderWay(NamedTuple):
    number: int
    call: Call
    since_s: float
    limit_s: float


class LateWatch:
    """Of the calls of one rank of ``world``, one at a time. Collective to build.

    A rank that has waited for a second, or for half of the timeout, leaves the number of the call in the group's store.
    So who has not come is whoever left no such number; ranks that do something else need not answer for that. A
    thread does this, which sleeps where no call is under way, and looks once a second otherwise.

    Args:
        name: of the group, for people.
        ranks: what errors call the ranks of the group.
        store: torch's, of the group.
        report: called on the thread with what ends the group.

    Attributes:
        timeout_s: the longest a call may take.
    """

    def __init__(
        self,
        world: World,
        name: str,
        ranks: Sequence[int],
        timeout_s: float,
        store: Any,
        report: Callable[[StallError], None],
    ) -> None:
        config = world.config
        self.timeout_s = timeout_s
        self._name = name
        self._ranks = tuple(ranks)
        self._rank = world.topology.rank
        self._store = store
        self._key = f"hvdlite/waits/{world.allgather(secrets.token_hex(4))[0]}"  # a store may outlive a group
        self._report = report
        self._stall_s = config.stall_report_s
        self._number = 0
        self._under_way: _UnderWay | None = None
        self._news = threading.Event()
        self._next_look_s = math.inf  # when the thread looks again by itself
        self._is_closing = False
        self._thread: threading.Thread | None = None
        # Of the thread.
        self._declared = 0  # the number of the last call that it has said this rank waits for
        self._warned_s = 0.0  # how long that had taken when it warned last

    def begin(self, call: Call) -> None:
        """``call`` is under way from here on."""
        self._number += 1
        now_s = time.monotonic()
        self._under_way = _UnderWay(self._number, call, now_s, self.timeout_s)
        if now_s + self._patience_s(self.timeout_s) < self._next_look_s:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"hvdlite-late-{self._name}", daemon=True)
                self._thread.start()
            self._news.set()

    def end(self) -> None:
        """It is over."""
        self._under_way = None

    def late(self) -> list[int]:
        """The ranks that have not come for the call under way, as far as is known; from any thread."""
        current = self._under_way
        if current is None or time.monotonic() - current.since_s < self._patience_s(current.limit_s):
            return []
        try:
            return [rank for place, rank in enumerate(self._ranks) if self._number_of(place) < current.number]
        except (RuntimeError, ValueError):  # the store is gone, or another program has written there
            return []

    def close(self) -> None:
        """End the thread."""
        self._is_closing = True
        self._news.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @staticmethod
    def _patience_s(limit_s: float) -> float:
        """After which a rank that waits says so."""
        return min(_DECLARED_S, limit_s / 2)

    def _run(self) -> None:
        seen = 0
        while not self._is_closing:
            current, now_s = self._under_way, time.monotonic()
            if current is None:  # where calls are short one of them in a second wakes this thread
                is_idle, seen = seen == self._number, self._number
                self._sleep(math.inf if is_idle else now_s + _DECLARED_S)
                continue
            waited_s = now_s - current.since_s
            self._speak(current, waited_s)
            if waited_s >= current.limit_s:
                self._give_up(current)
                return
            self._sleep(current.since_s + self._next_look_after(current, waited_s))

    def _speak(self, current: _UnderWay, waited_s: float) -> None:
        """Say that this rank waits, and for whom, if it is time to."""
        if waited_s >= self._patience_s(current.limit_s) and self._declared != current.number:
            self._declare(current.number)
            self._declared, self._warned_s = current.number, 0.0
        if self._declared == current.number and waited_s - self._warned_s >= self._stall_s:
            self._warned_s = waited_s
            _LOG.warning("%s for %.0f s", self._told(current), waited_s)

    def _next_look_after(self, current: _UnderWay, waited_s: float) -> float:
        """Seconds after its beginning when there is something to do for it."""
        patience_s = self._patience_s(current.limit_s)
        if waited_s < patience_s:
            return patience_s
        return min(current.limit_s, self._warned_s + self._stall_s, waited_s + _DECLARED_S)

    def _sleep(self, until_s: float) -> None:
        self._next_look_s = until_s
        if math.isinf(until_s) and self._under_way is not None:
            return  # it has begun meanwhile
        self._news.wait(None if math.isinf(until_s) else max(0.0, until_s - time.monotonic()))
        self._news.clear()

    def _give_up(self, current: _UnderWay) -> None:
        if self._under_way == current:
            self._report(StallError(f"{self._told(current)} within the timeout of {current.limit_s:g} s"))

    def _told(self, current: _UnderWay) -> str:
        late = self.late()
        return f"{current.call} of process group {self._name}: {rank_list(late) if late else 'a rank'} did not come"

    def _declare(self, number: int) -> None:
        with suppress(RuntimeError):  # the store is gone: nobody will hear of it
            self._store.set(f"{self._key}/{self._rank}", str(number))

    def _number_of(self, place: int) -> int:
        """Of the last call for which the rank has said that it waits; 0: none."""
        if place == self._rank:
            return self._number
        key = f"{self._key}/{place}"
        return int(self._store.get(key)) if self._store.check([key]) else 0
