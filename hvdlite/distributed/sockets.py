"""Sockets that are looked at together, and what is called when one has something (epoll of Linux)."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Callable, Sequence

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Watched:
    """A socket, the events it is looked at for, and what is called with it then."""

    __slots__ = ("call", "events", "link")

    def __init__(self, link: socket.socket, events: int, call: Callable[[socket.socket], object]) -> None:
        self.link = link
        self.events = events
        self.call = call


class Sockets:
    """Those of a `hvdlite.distributed.pump.Pump`. One thread at a time calls.

    `selectors` of Python's library does the same, and takes 2 us more for a message, of 35 if that is small.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Watched] = {}

    def add(self, link: socket.socket, events: int, call: Callable[[socket.socket], object]) -> None:
        """From here on ``link`` is looked at for ``events``, of `READ` and `WRITE`."""
        self._epoll.register(link, events)
        self._watched[link.fileno()] = Watched(link, events, call)

    def watch(self, link: socket.socket, events: int) -> None:
        """For these from here on; ``link`` is looked at."""
        watched = self._watched[link.fileno()]
        if watched.events != events:
            self._epoll.modify(link, events)
            watched.events = events

    def forget(self, link: socket.socket) -> None:
        """It is not looked at any more; it may not have been."""
        if self._watched.pop(link.fileno(), None) is not None:
            self._epoll.unregister(link)

    def ready(self, most_s: float) -> Sequence[Watched]:
        """Those that have something, once there is one, or ``most_s`` have passed."""
        found = self._epoll.poll(-1 if math.isinf(most_s) else most_s)
        return [self._watched[number] for number, _ in found]

    def serve(self, ready: Sequence[Watched]) -> None:
        """Call for each of ``ready``, unless an earlier one has ended it."""
        for watched in ready:
            if self._watched.get(watched.link.fileno()) is watched:
                watched.call(watched.link)

    def close(self) -> None:
        """Close all of them."""
        for watched in self._watched.values():
            watched.link.close()
        self._watched.clear()
        self._epoll.close()
