"""The coordinator thread, and user threads that do its work while they wait for an operation.

One of them is at work at a time. Where nobody is, the thread sleeps on the doorbell of its rank.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from hvdlite._native import Instant
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.submission import Future
from hvdlite.thread_shortage import thread_shortage_told

P = ParamSpec("P")
R = TypeVar("R")


class Work(Protocol):
    """What is to be done."""

    has_ended: bool

    def cycle(self) -> bool:
        """Do what there is; whether anything was heard, which may be followed by more to do. Raises only Ctrl-C."""

    def look(self, rings: int) -> bool:
        """See `hvdlite.coordinator.readiness.Readiness`."""

    def patience_s(self) -> float:
        """How long to sleep if nobody rings."""

    @property
    def has_news(self) -> bool:
        """Whether there is something that `cycle` has not seen."""


class _Ended:
    """What is left of work when it is over."""

    has_ended = True
    has_news = False

    def cycle(self) -> bool:
        return False

    def look(self, rings: int) -> bool:
        return False

    def patience_s(self) -> float:
        return math.inf


class Worker:
    """Runs ``work`` on a thread of its own.

    Args:
        idle_s: the longest sleep. Nothing can come but through the doorbell; a wake-up that finds nothing costs
            microseconds.
        spin_us: how long a thread that waits for one operation looks for it before it sleeps.
    """

    def __init__(self, name: str, work: Work, page: ControlPage, idle_s: float, spin_us: int) -> None:
        self._work: Work = work
        self._page = page
        self._idle_s = idle_s
        self._spin_us = spin_us
        self.at_work = threading.RLock()
        """Held by whoever is."""
        self.heard = 0
        """The count of rings that the last cycle began with: a ring that came since has yet to be followed."""
        self.next_look = Instant(math.inf)
        """When the thread will have slept enough, if it sleeps."""
        self._name = name
        self._thread: threading.Thread | None = None  # one that never starts would keep this, and what it refers to

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        with thread_shortage_told():
            self._thread.start()

    def wake(self) -> None:
        """From any thread."""
        self._page.ring_self()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end, if it was started; whether it has."""
        thread = self._thread
        if thread is None or thread.ident is None:
            return True
        if thread is not threading.current_thread():
            thread.join(timeout_s)
        return not thread.is_alive()

    def retire(self) -> None:
        """Once the thread has ended: whoever still refers to this does not keep the work alive."""
        self._work = _Ended()

    def assist(self, submission: Future) -> None:
        """Do the thread's work until ``submission`` is complete, on the caller's, which has nothing else to do.

        It saves two changes of threads, each of which costs as much as a small operation. If the thread is at work, it
        goes on, and the caller waits.
        """
        at_work, page, work = self.at_work, self._page, self._work
        if _owns(at_work):
            raise RuntimeError(
                f"'{submission.label}' was waited for by a signal handler that interrupted hvdlite at work"
            )
        rings = self.heard
        try:
            if not at_work.acquire(blocking=False):
                page.ring_self()  # it may have looked at the queue before
                return
            page.begin_assistance()
            while not submission.is_done and not work.has_ended:
                rings = self.heard = page.rings()
                if not work.cycle() and not submission.is_done and not work.has_ended and not work.look(rings):
                    page.assist(rings, min(work.patience_s(), self._idle_s), self._spin_us)
            self._leave(rings)
        except BaseException:  # an interrupt, which may come between any two instructions, of `_leave` too
            self._leave(rings)
            page.ring_self()  # what rang last may not have been followed
            raise

    def _leave(self, rings: int) -> None:
        """Of a thread that does the work, if it does: leave it to others, with so many rings followed."""
        if not _owns(self.at_work):
            return
        missed = self._page.end_assistance(rings) != rings
        unfinished = self._is_unfinished
        self.at_work.release()
        if missed or unfinished:
            self._page.ring_self()

    def refuse_handler(self, is_kept: Callable[[], bool]) -> None:
        """Raises RuntimeError where the caller's thread is at work, as in a signal handler that interrupts that.

        Args:
            is_kept: whether that has interrupted something else that ends no sooner.
        """
        if self.is_own_thread_at_work or is_kept():
            raise RuntimeError(
                "hvd.shutdown() was called by a signal handler that interrupted hvdlite at work, which cannot end "
                "before the handler does. Raise an exception there, by sys.exit() for example: hvdlite is shut down as "
                "the process ends"
            )

    @property
    def is_own_thread_at_work(self) -> bool:
        """Whether it is the caller's thread that is."""
        return _owns(self.at_work)

    def attempt(self, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Have the caller's thread ``do`` something, at work, where it is not; None where somebody else is."""
        try:  # an interrupt may come between any two instructions
            return do(*args, **kwargs) if self.at_work.acquire(blocking=False) else None
        finally:
            try:  # noqa: SIM105 (which is Python, and may be interrupted)
                self.at_work.release()
            except RuntimeError:  # somebody else was at work
                pass

    def follow(self) -> None:
        """Of who is at work: look for what has rung meanwhile, which the thread may have slept through."""
        self._catch_up()
        self.see_to_the_rest()

    def catch_up(self) -> bool:
        """Of who is at work, and looks to `see_to_the_rest` later: the same, if anything has rung; whether it has."""
        has_rung = self._page.rings() != self.heard
        if has_rung:
            self._catch_up()
        return has_rung

    def _catch_up(self) -> None:
        busy = True
        while busy and not self._work.has_ended:
            self.heard = self._page.rings()
            busy = self._work.cycle()

    def see_to_the_rest(self) -> None:
        """Of who is at work, and leaves something under way: the thread looks for it soon enough."""
        if self._is_unfinished:
            self._page.ring_self()

    def looks_within(self, seconds: float) -> bool:
        """Whether the thread is sure to look at all there is by then. From any thread."""
        return time.monotonic() + seconds >= self.next_look.at_s

    @property
    def _is_unfinished(self) -> bool:
        """Whether the thread has to look, or to sleep less than it may be about to; or to end."""
        work = self._work
        if work.has_ended or work.has_news:
            return True
        patience_s = work.patience_s()
        return patience_s < self._idle_s and time.monotonic() + patience_s < self.next_look.at_s

    def _run(self) -> None:
        page, work = self._page, self._work
        while True:
            with self.at_work:
                if work.has_ended:
                    return
                rings = self.heard = page.rings()
                busy = work.cycle() or work.look(rings)
                self.next_look.at_s = math.inf  # what comes after the next line is not looked at
                patience_s = min(work.patience_s(), self._idle_s)
                self.next_look.at_s = time.monotonic() + patience_s
            if not busy and not work.has_ended:
                page.sleep(rings, patience_s)


def _owns(lock: threading.RLock) -> bool:
    """Whether this thread holds ``lock``; what `threading.Condition` asks."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]
