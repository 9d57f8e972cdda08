"""Serves sockets: on the thread of whoever waits for what they bring, or else on one of its own."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from hvdlite.distributed.sockets import READ, Sockets

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
    """Serves `sockets`, and calls ``client``, one thread at a time.

    While threads of the program call, which mostly wait next, the pump's own thread stays away: to wake it and to be
    woken by it takes longer than a small message. It looks again after 5 ms.

    Args:
        name: of the thread.
        report: told what has ended the pump.
        spin_us: how long who waits looks before it sleeps.

    Attributes:
        sockets: of the client; for whoever serves alone.
    """

    def __init__(self, name: str, client: Client, report: Callable[[BaseException], None], spin_us: int) -> None:
        self.sockets = Sockets()
        self._name = name
        self._client = client
        self._whole = _Whole(self._end_by)
        self._report = report
        self._spin_s = spin_us * 1e-6
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self.sockets.add(self._wake, READ, lambda wake: wake.recv(4096))
        self._turn = threading.Lock()  # held by whoever serves
        self._server: int | None = None  # the thread that holds it
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()
        self._is_closing = threading.Event()
        self._busy_until_s = 0.0

    def start(self) -> None:
        """Serve from here on, also while nobody waits."""
        if self._thread is not None:
            return
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def nudge(self) -> None:
        """There is something new to do; it is begun now, or by whoever serves."""
        self._stay_away()
        self.start()
        if self._server == threading.get_ident():
            return  # in a callback; what is new is looked after next
        if self._turn.acquire(blocking=False):
            self._serve_with_turn(self._begin_new)
        else:
            self.ring()

    def assist(self, is_over: Callable[[], bool]) -> None:
        """Serve until ``is_over``, unless another thread of the program does."""
        if self._server == threading.get_ident():  # in a callback
            while not is_over() and not self._is_closing.is_set():
                self._serve(math.inf)
            return
        self._stay_away()
        if not self._turn.acquire(blocking=False):
            self.ring()
            if not self._turn.acquire(timeout=_LULL_S):
                return
        self._serve_with_turn(lambda: self._serve_until(is_over))

    def ring(self) -> None:
        """Whoever serves looks again whether it may stop; from any thread."""
        with suppress(OSError):  # it has heard enough, or nobody serves any more
            self._waker.send(b"\0")

    def close(self) -> None:
        """End the thread, and close the sockets that are registered."""
        self._is_closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self.ring()
            self._thread.join()
        if self._server != threading.get_ident():
            self.ring()  # another one may serve for who waits
            self._turn.acquire()
        self.release()

    def release(self) -> None:
        """Close the sockets."""
        self.sockets.close()
        self._waker.close()

    def _stay_away(self) -> None:
        self._busy_until_s = time.monotonic() + _LULL_S

    def _is_busy(self) -> bool:
        return time.monotonic() < self._busy_until_s

    def _run(self) -> None:
        while not self._is_closing.is_set():
            if self._is_busy():
                self._is_closing.wait(_LULL_S)
                continue
            self._turn.acquire()
            # Another thread has just stopped waiting; or it has, and has read what rang for this one to end.
            if self._is_busy() or self._is_closing.is_set():
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
            looks = time.monotonic() < until_s
            if self._serve(0.0 if looks else math.inf):
                until_s = time.monotonic() + self._spin_s
            elif looks:
                os.sched_yield()  # who is waited for may have been woken on this core
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
        with self._whole:
            self._client.begin_new()

    def _serve(self, most_s: float) -> bool:
        """Wait for sockets, ``most_s`` at most, and do what there is to do; whether any had something."""
        with self._whole:
            patience_s = min(most_s, self._client.patience_s())
        ready = self.sockets.ready(patience_s)
        with self._whole:
            self.sockets.serve(ready)
            self._client.begin_new()
            self._client.look_after(was_quiet=not ready)
        return bool(ready)

    def _end_by(self, error: BaseException) -> None:
        self._report(error)
        self._client.fail(error)


class _Whole:
    """What is done in it is done as a whole: an exception, of a signal handler too, may have come in the middle of a
    message, and is the end."""

    def __init__(self, end_by: Callable[[BaseException], None]) -> None:
        self._end_by = end_by

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._end_by(error)
