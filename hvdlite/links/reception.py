"""Hears those who connect to the listening sockets of a process, side by side, and keeps those that belong to its job.

A stranger can do no more than to come: it has `PATIENCE_S` to prove that it knows the key, of more than `MOST_UNPROVEN`
the oldest from where most come are hung up on, and where the process is short of descriptors new ones wait outside.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdlite.errors import StartupError
from hvdlite.links.proof import Host, Secret
from hvdlite.links.wire import SHORTAGE_S, SHORTAGES, is_ours
from hvdlite.thread_shortage import thread_shortage_told

PATIENCE_S = 10.0
"""How long a proof may take."""
MOST_UNPROVEN = 128
"""Connections that have not proven themselves yet."""

Admit = Callable[[socket.socket, bytes, bytes], bool]
"""Is given a proven connection, its claim, and the key of its session; whether it keeps the connection."""


def listen_at(addresses: Sequence[str], backlog: int) -> list[socket.socket]:
    """Listening TCP sockets, each with a port of its own, at those of ``addresses`` (IPv4, IPv6) that can be had.

    Raises:
        StartupError: none can.
    """
    sockets: list[socket.socket] = []
    refusals: list[str] = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            sockets.append(socket.create_server((address, 0), family=family, backlog=backlog))
        except OSError as error:  # it has gone since it was listed, perhaps
            refusals.append(f"{address}: {error}")
    if not sockets:
        raise StartupError(
            f"cannot listen at any address of this host ({'; '.join(refusals) or 'no interface is up'}). Name an "
            "interface that connects the hosts in HVDLITE_NETWORK_INTERFACES."
        )
    return sockets


class _Guest(NamedTuple):
    """Who has come, and has not proven itself yet, from ``address``; it is hung up on at ``until_s``."""

    host: Host
    until_s: float
    address: str


class Hearing:
    """Takes connections for whoever calls `serve`: when this, as an open file, can be read, and at `due_s`.

    Args:
        listeners: whose sockets this owns; processes of other users are hung up on where these are unix sockets.
        admit: called in `serve`; it must not wait.
    """

    def __init__(self, listeners: Sequence[socket.socket], secret: Secret, admit: Admit) -> None:
        self._listeners = listeners
        self._secret = secret
        self._admit = admit
        self._guests: dict[socket.socket, _Guest] = {}  # the oldest first
        self._resume_s = math.inf  # when connections are taken again after a shortage
        self._selector = selectors.EpollSelector()
        for listener in listeners:
            listener.setblocking(False)
        self._listen()

    def fileno(self) -> int:
        return self._selector.fileno()

    @property
    def due_s(self) -> float:
        """When there is something to do, even if nobody comes."""
        if not self._guests:
            return self._resume_s
        return min(self._resume_s, next(iter(self._guests.values())).until_s)

    def serve(self) -> None:
        """Do what there is to do."""
        for key, _ in self._selector.select(0.0):
            if key.fileobj in self._guests:
                self._hear(key.fileobj)
            elif key.fileobj in self._listeners:
                self._take(key.fileobj)  # type: ignore[arg-type]
        now_s = time.monotonic()
        self._drop([link for link, guest in self._guests.items() if now_s > guest.until_s])
        if now_s >= self._resume_s:
            self._resume_s = math.inf
            self._listen()

    def close(self) -> None:
        """Hang up on those that are not proven, and listen no more; in a forked child nobody hears of it."""
        for end in (*self._listeners, *self._guests):
            end.close()
        self._selector.close()

    def _listen(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def _take(self, listener: socket.socket) -> None:
        try:
            link, peer = listener.accept()
        except OSError as error:
            if error.errno in SHORTAGES and math.isinf(self._resume_s):
                self._resume_s = time.monotonic() + SHORTAGE_S
                for other in self._listeners:
                    self._selector.unregister(other)
            return  # or whoever it was has left again
        if link.family == socket.AF_UNIX and not is_ours(link):  # any user can list the names of abstract sockets
            link.close()
            return
        link.setblocking(False)
        if len(self._guests) >= MOST_UNPROVEN:
            self._drop([self._one_too_many()])
        address = peer[0] if isinstance(peer, tuple) else ""
        self._guests[link] = _Guest(Host(self._secret, link), time.monotonic() + PATIENCE_S, address)
        self._selector.register(link, selectors.EVENT_READ)

    def _one_too_many(self) -> socket.socket:
        """The oldest one from where most come: strangers on one host shall not drive out those of other hosts."""
        ((most, _),) = Counter(guest.address for guest in self._guests.values()).most_common(1)
        return next(link for link, guest in self._guests.items() if guest.address == most)

    def _hear(self, link: socket.socket) -> None:
        """Take what came; never reads beyond the proof."""
        host = self._guests[link].host
        try:
            data = link.recv(host.wanted_bytes)
            answer = host.feed(data)
            # Who has proven itself, said all, and left, can still be heard: nothing is sent to it.
            if not data or (answer and link.send(answer) < len(answer)):
                raise ConnectionError("the other end has gone, or does not read")
        except BlockingIOError:
            return
        except OSError:
            self._drop([link])
            return
        if host.is_proven:
            del self._guests[link]
            self._selector.unregister(link)
            link.setblocking(True)
            if not self._admit(link, host.claim, host.session):
                link.close()

    def _drop(self, links: Sequence[socket.socket]) -> None:
        for link in links:
            del self._guests[link]
            self._selector.unregister(link)
            link.close()


class Reception:
    """A thread that takes connections until `close`; see `Hearing`."""

    def __init__(self, listeners: Sequence[socket.socket], secret: Secret, admit: Admit) -> None:
        self._hearing = Hearing(listeners, secret, admit)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()  # here, so that a shortage of descriptors is the caller's to hear
        self._selector.register(self._hearing, selectors.EVENT_READ)
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="hvdlite-reception", daemon=True)
        with thread_shortage_told():
            self._thread.start()

    def close(self) -> None:
        """Hang up on those that are not proven, and listen no more; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._hearing.close()
        self._selector.close()
        os.close(self._stop)

    def _serve(self) -> None:
        while not self._is_closed:
            due_s = self._hearing.due_s
            self._selector.select(None if math.isinf(due_s) else max(0.0, due_s - time.monotonic()))
            self._hearing.serve()
