"""Sockets that are looked at together, and what is called when one has something (epoll of Linux)."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import Any, Protocol

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
_LONGEST_S = 1e6  # Linux counts milliseconds in an int


class Watchable(Protocol):
    """A socket, or what has one of its own kind inside."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Watched:
    """A socket, the events it is looked at for, and what is called with it then."""

    __slots__ = ("call", "events", "link", "number")

    def __init__(self, link: Watchable, events: int, call: Callable[[Any], object]) -> None:
        self.link = link
        self.number = link.fileno()
        self.events = events
        self.call = call


class Sockets:
    """Those of a `hvdlite.distributed.pump.Pump`. One thread at a time calls.

    `selectors` of Python's library does the same, and takes 2 us more for a message, of 35 if that is small.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Watched] = {}

    def add(self, link: Watchable, events: int, call: Callable[[Any], object]) -> None:
        """From here on ``link`` is looked at for ``events``, of `READ` and `WRITE`."""
        self._epoll.register(link, events)
        watched = Watched(link, events, call)
        self._watched[watched.number] = watched

    def watch(self, link: Watchable, events: int) -> None:
        """For these from here on; ``link`` is looked at."""
        watched = self._watched[link.fileno()]
        if watched.events != events:
            self._epoll.modify(link, events)
            watched.events = events

    def forget(self, link: Watchable) -> None:
        """It is not looked at any more; it may not have been."""
        if self._watched.pop(link.fileno(), None) is not None:
            self._epoll.unregister(link)

    def ready(self, most_s: float) -> Sequence[Watched]:
        """Those that have something, once there is one, or ``most_s`` have passed, or 11 days."""
        found = self._epoll.poll(min(most_s, _LONGEST_S))
        return [self._watched[number] for number, _ in found]

    def serve(self, ready: Sequence[Watched]) -> None:
        """Call for each of ``ready``, unless an earlier one has ended it."""
        for watched in ready:
            if self._watched.get(watched.number) is watched:
                watched.call(watched.link)

    def close(self) -> None:
        """Close all of them."""
        for watched in self._watched.values():
            watched.link.close()
        self._watched.clear()
        self._epoll.close()
