"""Processes that this one starts, and how they end with it: signals, and what is left of them. Linux only."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hvdlite.processes import is_zombie

GRACE_S = 5.0  # between TERM and KILL; mpirun often ignores TERM after it lost a host
_ORPHANS_S = 10.0  # between two looks at them
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class Stops:
    """Within the ``with`` block Ctrl-C, TERM and HUP are noted, and orphans below this process become its children.

    What was noted in a block within another is noted in that one too.

    Attributes:
        wake: a file descriptor that becomes readable when a signal comes.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def __enter__(self) -> Stops:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that they are found
        self.wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        self._previous: dict[int, Any] = {number: signal.signal(number, self._note) for number in numbers}
        outer = getattr(self._previous[signal.SIGINT], "__self__", None)
        self._outer = outer if isinstance(outer, Stops) else None
        self._previous_wakeup = signal.set_wakeup_fd(self._waker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self.wake)
        os.close(self._waker)

    def __len__(self) -> int:
        """How many signals have come."""
        return len(self._numbers)

    @property
    def status(self) -> int:
        """128 and the number of the first signal, as a shell reports it."""
        return 128 + self._numbers[0]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        if self._outer is not None:
            self._outer._note(number, frame)


def sweep(hurry: Callable[[], bool], spared: Collection[int] = ()) -> None:
    """End every descendant of this process: TERM, then KILL after `GRACE_S`.

    Args:
        spared: children that live on, with all that they have started.
    """
    deadline = time.monotonic() + GRACE_S
    number = signal.SIGTERM
    warned: set[int] = set()
    while pids := _descendants(spared):
        if hurry() or time.monotonic() >= deadline:
            number = signal.SIGKILL
        for pid in pids:
            if number == signal.SIGKILL or pid not in warned:
                warned.add(pid)
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        time.sleep(0.02)


def _descendants(spared: Collection[int]) -> list[int]:
    """The living processes below this one, but for ``spared`` and theirs; those that ended are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        children = [pid for pid in children_of(pending.pop()) if pid not in spared]
        found += children
        pending += children
    return found


def children_of(pid: int) -> list[int]:
    """The processes that ``pid`` has started and that have not been waited for; none where it has ended."""
    found: list[int] = []
    with suppress(OSError):  # the process has ended; Path.glob would raise that too
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # the thread has
                found += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


@contextmanager
def suspended_together(living: Callable[[], Iterable[subprocess.Popen[bytes]]]) -> Iterator[None]:
    """Within the block Ctrl-Z stops ``living`` as well, who are in process groups of their own, until this one goes on.

    Else those would find that rank 0, which a terminal stops with this process, is silent.
    """

    def suspend(number: int, frame: FrameType | None) -> None:
        processes = [child.pid for child in living()]
        signal_groups(processes, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        signal_groups(processes, signal.SIGCONT)

    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


@contextmanager
def user_signals_passed_on(living: Callable[[], Iterable[subprocess.Popen[bytes]]]) -> Iterator[None]:
    """Within the block USR1 and USR2 go to ``living``, as mpirun passes them on: batch systems announce an end so."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in living():
            child.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def signal_groups(processes: Iterable[int], number: signal.Signals) -> None:
    """To each process, with its group, unless that is this process's."""
    for pid in processes:
        with suppress(ProcessLookupError):  # it has ended
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


class Orphans:
    """Processes that ranks leave behind become children of this one; once they end, somebody has to take note."""

    def __init__(self) -> None:
        self._ended: set[int] = set()
        self.due_s = time.monotonic() + _ORPHANS_S
        """When `reap_if_due` has something to do, by the monotonic clock."""

    def reap_if_due(self) -> None:
        """Reap those that had ended at the last look already: this process waits for its own within moments."""
        if time.monotonic() < self.due_s:
            return
        ended = {pid for pid in children_of(os.getpid()) if is_zombie(pid)}
        for pid in ended & self._ended:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended
        self.due_s = time.monotonic() + _ORPHANS_S


class Ending:
    """When processes get which signal: TERM in a while, or as this process is told to stop; and KILL after that.

    Args:
        living: those that get it.
    """

    def __init__(self, stops: Stops, living: Callable[[], Iterable[subprocess.Popen[bytes]]]) -> None:
        self._stops = stops
        self._living = living
        self._stops_seen = 0
        self._next = math.inf, signal.SIGTERM

    @property
    def due_s(self) -> float:
        """When `send_if_due` has something to do, by the monotonic clock."""
        return self._next[0]

    def within(self, seconds: float) -> None:
        """They get TERM, unless they are to end earlier anyway."""
        due_s, number = self._next
        if number == signal.SIGTERM:
            self._next = min(due_s, time.monotonic() + seconds), number

    def send_if_due(self) -> None:
        due_s, number = self._next
        if time.monotonic() >= due_s:
            self._send(number)

    def heed_stops(self) -> bool:
        """TERM for the first stop, KILL for another; whether there was one that was not heeded."""
        if len(self._stops) == self._stops_seen:
            return False
        self._send(signal.SIGTERM if self._stops_seen == 0 else signal.SIGKILL)
        self._stops_seen = len(self._stops)
        return True

    def _send(self, number: signal.Signals) -> None:
        for child in self._living():
            child.send_signal(number)
        self._next = time.monotonic() + GRACE_S, signal.SIGKILL


def shell_status(code: int) -> int:
    """What a shell makes of ``code``, as subprocess has it: 128 + n after signal n."""
    return code if code >= 0 else 128 - code


def how_ended(code: int) -> str:
    """``code``, as subprocess has it, in words."""
    return f"ended with exit status {code}" if code >= 0 else f"was killed by {_name(-code)}"


def _name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return f"signal {number}"


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Let this process get signal ``number`` when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(number))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
