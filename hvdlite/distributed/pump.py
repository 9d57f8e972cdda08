"""Serves sockets: on the thread of whoever waits for what they bring, or else on one of its own."""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

_LULL_S = 5e-3  # after which nobody is about to wait


class Client(Protocol):
    """Whose sockets they are. One thread at a time calls."""

    def patience_s(self) -> float:
        """How long to wait for sockets at most; 0 to come back at once."""

    def begin_new(self) -> None:
        """Begin what was asked for since."""

    def look_after(self, *, was_quiet: bool) -> None:
        """Called after sockets were looked at, to do what else is due.

        Args:
            was_quiet: none had anything.
        """

    def fail(self, reason: BaseException) -> None:
        """Nothing more is served."""


class Pump:
    """Calls ``data`` of the keys of `selector`, and ``client``, one thread at a time.

    While threads of the program call, which mostly wait next, the pump's own thread stays away: to wake it and to be
    woken by it takes longer than a small message. It looks again after 5 ms.

    Args:
        name: of the thread.
        report: told what has ended the pump.
        spin_us: how long who waits looks before it sleeps.
    """

    def __init__(self, name: str, client: Client, report: Callable[[BaseException], None], spin_us: int) -> None:
        self.selector = selectors.DefaultSelector()
        self._name = name
        self._client = client
        self._report = report
        self._spin_s = spin_us * 1e-6
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self.selector.register(self._wake, selectors.EVENT_READ, lambda wake: wake.recv(4096))
        self._turn = threading.Lock()  # held by whoever serves
        self._server: int | None = None  # the thread that holds it
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()
        self._is_closing = threading.Event()
        self._busy_until_s = 0.0

    def nudge(self) -> None:
        """There is something new to do; it is begun now, or by whoever serves."""
        self._stay_away()
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        if self._server == threading.get_ident():
            return  # in a callback; what is new is looked after next
        if self._turn.acquire(blocking=False):
            self._serve_with_turn(self._begin_new)
        else:
            self._ring()

    def assist(self, is_over: Callable[[], bool]) -> None:
        """Serve until ``is_over``, unless another thread of the program does."""
        if self._server == threading.get_ident():  # in a callback
            while not is_over() and not self._is_closing.is_set():
                self._serve(math.inf)
            return
        self._stay_away()
        if not self._turn.acquire(blocking=False):
            self._ring()
            if not self._turn.acquire(timeout=_LULL_S):
                return
        self._serve_with_turn(lambda: self._serve_until(is_over))

    def close(self) -> None:
        """End the thread, and close the sockets that are registered."""
        self._is_closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._ring()
            self._thread.join()
        if self._server != threading.get_ident():
            self._ring()  # another one may serve for who waits
            self._turn.acquire()
        self.release()

    def release(self) -> None:
        """Close the sockets."""
        for key in list((self.selector.get_map() or {}).values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.selector.close()
        self._wake.close()
        self._waker.close()

    def watch(self, link: socket.socket, events: int) -> None:
        """From here on for ``events``; ``link`` is registered."""
        key = self.selector.get_key(link)
        if key.events != events:
            self.selector.modify(link, events, key.data)

    def forget(self, link: socket.socket) -> None:
        """It is not looked at any more; it may not have been."""
        if link.fileno() in (self.selector.get_map() or {}):
            self.selector.unregister(link)

    def _stay_away(self) -> None:
        self._busy_until_s = time.monotonic() + _LULL_S

    def _is_busy(self) -> bool:
        return time.monotonic() < self._busy_until_s

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it has heard enough
            self._waker.send(b"\0")

    def _run(self) -> None:
        while not self._is_closing.is_set():
            if self._is_busy():
                self._is_closing.wait(_LULL_S)
                continue
            self._turn.acquire()
            if self._is_busy():  # another thread has just stopped waiting
                self._turn.release()
                continue
            try:
                self._serve_with_turn(lambda: self._serve(math.inf))
            except BaseException as error:
                self._end_by(error)
                return

    def _serve_until(self, is_over: Callable[[], bool]) -> None:
        until_s = time.monotonic() + self._spin_s
        while not is_over() and not self._is_closing.is_set():
            if self._serve(0.0 if time.monotonic() < until_s else math.inf):
                until_s = time.monotonic() + self._spin_s
        self._stay_away()

    def _serve_with_turn(self, serve: Callable[[], object]) -> None:
        """Gives the turn back."""
        self._server = threading.get_ident()
        try:
            serve()
        finally:
            self._server = None
            self._turn.release()

    def _begin_new(self) -> None:
        """What arrives is left for who waits: the tensor that it is for may come next."""
        with self._whole():
            self._client.begin_new()

    def _serve(self, most_s: float) -> bool:
        """Wait for sockets, ``most_s`` at most, and do what there is to do; whether any had something."""
        with self._whole():
            patience_s = min(most_s, self._client.patience_s())
        events = self.selector.select(None if math.isinf(patience_s) else patience_s)
        with self._whole():
            self._handle([key for key, _ in events])
        return bool(events)

    def _handle(self, keys: Sequence[selectors.SelectorKey]) -> None:
        registered = self.selector.get_map()
        for key in keys:
            current = registered.get(key.fd)  # an earlier one may have ended it
            if current is not None and current.fileobj is key.fileobj:
                key.data(key.fileobj)
        self._client.begin_new()
        self._client.look_after(was_quiet=not keys)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """An exception in it, of a signal handler too, may have come in the middle of a message: that is the end."""
        try:
            yield
        except BaseException as error:
            self._end_by(error)
            raise

    def _end_by(self, error: BaseException) -> None:
        self._report(error)
        self._client.fail(error)
