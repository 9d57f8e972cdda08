"""Who is at work, and that every way out of it leaves a coordinator that goes on."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from coordinator_lab import submission
from hvdlite.coordinator.submission import Submission
from hvdlite.coordinator.worker import Worker

PATIENCE_S = 20.0


class Doorbell:
    """A `ControlPage` as far as one rank's rings are concerned; a sleep on it ends when somebody rings."""

    def __init__(self) -> None:
        self._rung = threading.Condition()
        self._count = self._rings_for_owner = 0
        self._seen_by_sleeper: int | None = None
        self.assistants = 0

    def rings(self) -> int:
        return self._count

    def ring_self(self) -> None:
        with self._rung:
            self._count += 1
            self._rings_for_owner += not self.assistants
            self._rung.notify_all()

    def sleep(self, seen: int, timeout_s: float) -> None:
        with self._rung:
            self._seen_by_sleeper = seen
            self._rung.notify_all()
            before = self._rings_for_owner
            if self._count == seen:
                is_rung = self._rung.wait_for(lambda: self._rings_for_owner > before, min(timeout_s, PATIENCE_S))
                assert is_rung, "nobody rang"
            self._seen_by_sleeper = None

    def wait_for_sleep(self) -> None:
        """Until somebody sleeps, and nobody has rung meanwhile."""
        with self._rung:
            assert self._rung.wait_for(lambda: self._seen_by_sleeper == self._count, PATIENCE_S)

    def begin_assistance(self) -> None:
        self.assistants += 1

    def assist(self, seen: int, timeout_s: float, spin_us: int) -> None:
        with self._rung:
            assert self._rung.wait_for(lambda: self._count != seen, min(timeout_s, PATIENCE_S)), "nobody rang"

    def end_assistance(self, heard: int) -> int:
        self.assistants = 0
        return self._count


class Work:
    """Does what `on_cycle` says, and writes down who did it."""

    def __init__(self, on_cycle: Callable[[], object] = lambda: None) -> None:
        self.on_cycle = on_cycle
        self.has_ended = self.has_news = False
        self.workers: list[threading.Thread] = []
        self.cycled = threading.Semaphore(0)
        self.patience = math.inf

    def cycle(self) -> bool:
        self.workers.append(threading.current_thread())
        self.on_cycle()
        self.cycled.release()
        return False

    def look(self, rings: int) -> bool:
        return False

    def patience_s(self) -> float:
        return self.patience


class Stage:
    """A worker whose thread runs and sleeps."""

    def __init__(self) -> None:
        self.work, self.page = Work(), Doorbell()
        self.worker = Worker("worker", self.work, self.page, math.inf, 0)  # type: ignore[arg-type]
        self.worker.start()
        assert self.thread_works()

    def thread_works(self) -> bool:
        """Whether a ring makes the thread work."""
        self.worker.wake()
        return self.work.cycled.acquire(timeout=PATIENCE_S)

    def end(self) -> None:
        self.work.has_ended = True
        self.worker.wake()
        assert self.worker.join(PATIENCE_S)


class Interrupted:
    """A lock after whose acquisition Ctrl-C comes at once."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._is_owned, self.release = lock._is_owned, lock.release

    def acquire(self, *, blocking: bool = True) -> bool:
        while not self._lock.acquire(blocking=False):  # the thread may be about to fall asleep
            pass
        raise KeyboardInterrupt


def test_an_interrupt_leaves_the_work_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    with monkeypatch.context() as patch:
        patch.setattr(stage.worker, "at_work", Interrupted(stage.worker.at_work))
        with pytest.raises(KeyboardInterrupt):
            stage.worker.assist(submission("a"))
    assert stage.thread_works()
    assert not stage.page.assistants
    stage.end()


class InterruptAt:
    """Ctrl-C at one of the places where Python takes it: where worker.py begins a function, or has called one.

    Counted from when an assistant is at work.
    """

    _assist = Worker.assist.__code__

    def __init__(self, place: int) -> None:
        self._left = place
        self._is_at_work = self.has_come = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self._is_at_work |= frame.f_code is self._assist and event == "c_return"
        at = {"call": frame.f_back, "c_return": frame}.get(event)
        is_place = at is not None and at.f_code.co_filename == self._assist.co_filename
        if not is_place or not self._is_at_work or self.has_come:
            return
        self._left -= 1
        if self._left < 0:
            self.has_come = True
            raise KeyboardInterrupt


def test_an_interrupt_anywhere_leaves_the_work_to_the_thread() -> None:
    """Which follows what the assistant may only have been about to."""
    for place in range(100):
        stage, awaited, by_thread = Stage(), submission("a"), threading.Semaphore(0)

        def cycle(awaited: Submission = awaited, by_thread: threading.Semaphore = by_thread) -> None:
            if threading.current_thread() is threading.main_thread():
                awaited.succeed()
            else:
                by_thread.release()

        stage.page.wait_for_sleep()
        stage.work.on_cycle = cycle
        interrupt = InterruptAt(place)
        sys.setprofile(interrupt)
        try:
            stage.worker.assist(awaited)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert not interrupt.has_come or by_thread.acquire(timeout=PATIENCE_S), place
        assert not stage.page.assistants, place
        assert stage.thread_works(), place
        stage.end()
        if not interrupt.has_come:
            assert place > 10
            return
    raise AssertionError("so many places there are not")


def test_an_error_leaves_the_work_to_the_thread() -> None:
    stage = Stage()

    def fail() -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    stage.page.wait_for_sleep()
    stage.work.on_cycle = fail
    with pytest.raises(KeyboardInterrupt):
        stage.worker.assist(submission("a"))
    assert stage.thread_works()
    stage.end()


def assisted(stage: Stage, during: Callable[[], object]) -> None:
    """The main thread assists for one cycle, in which ``during()`` happens."""
    made = submission("a")

    def on_cycle() -> None:
        if threading.current_thread() is threading.main_thread():
            during()
            made.succeed()

    stage.page.wait_for_sleep()
    stage.work.on_cycle = on_cycle
    stage.worker.assist(made)
    assert made.is_done
    stage.work.on_cycle = lambda: None


@pytest.mark.parametrize("what", ["ring", "news"])
def test_who_leaves_passes_on_what_came_meanwhile(what: str) -> None:
    """Rings of the last cycle have woken nobody, as have submissions of other threads that were to be found by it."""
    stage = Stage()

    def during() -> None:
        while stage.work.cycled.acquire(blocking=False):
            pass
        if what == "ring":
            stage.page.ring_self()
        else:
            stage.work.has_news = True

    assisted(stage, during)
    assert stage.work.cycled.acquire(timeout=PATIENCE_S)  # the assistant's own cycle
    assert stage.work.cycled.acquire(timeout=PATIENCE_S), "the thread has slept on"
    assert stage.work.workers[-1] is not threading.main_thread()
    stage.work.has_news = False
    stage.end()


@pytest.mark.parametrize(
    ("sleeps_s", "left_s", "is_woken"), [(1e3, 1e3, False), (math.inf, 1e3, True), (1e3, 5e2, True)]
)
def test_the_thread_is_woken_where_it_would_sleep_too_long(sleeps_s: float, left_s: float, is_woken: bool) -> None:
    """As after what a GPU was given, which somebody has to watch: once, and not after each operation."""
    stage = Stage()
    stage.page.wait_for_sleep()
    stage.work.patience = sleeps_s
    assert stage.thread_works()
    rings = stage.page.rings()
    assisted(stage, lambda: setattr(stage.work, "patience", left_s))
    assert stage.page.rings() == rings + is_woken
    stage.end()


def test_whether_the_thread_looks_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that who has something for later on need not ring each time."""
    stage = Stage()
    stage.page.wait_for_sleep()
    seen = []

    def patience_s() -> float:
        seen.append(stage.worker.looks_within(1e9))
        return 1e3

    monkeypatch.setattr(stage.work, "patience_s", patience_s)
    assert stage.thread_works()
    stage.page.wait_for_sleep()
    assert seen == [False]  # it may have looked at that which comes now
    assert stage.worker.looks_within(2e3)
    assert not stage.worker.looks_within(5e2)
    stage.end()


def test_the_thread_learns_of_an_end_that_an_assistant_has_met() -> None:
    stage = Stage()
    assisted(stage, lambda: setattr(stage.work, "has_ended", True))
    assert stage.worker.join(PATIENCE_S)


def test_the_thread_learns_of_an_end_that_was_met_after_a_native_call() -> None:
    """Its ring went to the caller of that, and the thread sleeps on."""
    stage = Stage()
    stage.page.wait_for_sleep()
    stage.work.on_cycle = lambda: setattr(stage.work, "has_ended", True)
    stage.worker.attempt(stage.worker.follow)
    assert stage.worker.join(PATIENCE_S)


def test_a_signal_handler_cannot_wait_inside_of_work() -> None:
    """It would do the work of the frame below it, which is in the middle of that."""
    stage = Stage()

    def during() -> None:
        with pytest.raises(RuntimeError, match="'b' was waited for by a signal handler"):
            stage.worker.assist(submission("b"))

    assisted(stage, during)
    assert stage.thread_works()
    stage.end()
