"""Run one command to its end, and let nothing of it survive an interruption or a failure. Linux only."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

GRACE_S = 5.0  # between TERM and KILL; mpirun often ignores TERM after it lost a host
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


@dataclass(frozen=True)
class Ending:
    """How a command ended.

    Attributes:
        status: as a shell reports it: 128 + n after signal n, to the command or to this process.
        found: the first of the texts looked for in stderr that was there.
    """

    status: int
    found: str | None


def supervise(argv: Sequence[str], environ: Mapping[str, str], watch_for: Sequence[str] = ()) -> Ending:
    """Run ``argv`` with this process's stdin, stdout and stderr.

    On Ctrl-C, TERM or HUP the command gets TERM, and everything it started gets KILL after `GRACE_S`; a second signal
    does not wait. The same sweep follows a command that failed. Where this process is killed outright, the command gets
    TERM.

    Args:
        watch_for: texts to look for in the command's stderr, which then passes through here unchanged.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process, where they are found
    stops: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stops.append(number)

    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    stop_signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        stop_signals.append(signal.SIGHUP)
    previous: dict[int, Any] = {number: signal.signal(number, note) for number in stop_signals}
    previous_wakeup = signal.set_wakeup_fd(wake_write)
    try:
        child = subprocess.Popen(
            argv, env=dict(environ), stderr=subprocess.PIPE if watch_for else None, preexec_fn=end_with_parent
        )
        search = _Search(watch_for)
        status = _wait(child, stops, wake_read, search)
        if stops:
            status = 128 + stops[0]
        if status != 0 or search.found:
            _sweep(lambda: len(stops) > 1)
        return Ending(status, search.found)
    finally:
        signal.set_wakeup_fd(previous_wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(wake_read)
        os.close(wake_write)


class _Search:
    """Looks for texts in a stream of pieces."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text.encode() for text in texts]
        self._tail = b""
        self.found: str | None = None

    def feed(self, piece: bytes) -> None:
        window = self._tail + piece
        for text in self._texts:
            if self.found is None and text in window:
                self.found = text.decode()
        self._tail = window[-max((len(text) for text in self._texts), default=1) :]


def _wait(child: subprocess.Popen[bytes], stops: list[int], wake_read: int, search: _Search) -> int:
    """The child's exit status. Until its end its stderr is passed on, and a stop signal ends it."""
    ended = os.pidfd_open(child.pid)
    deadline: float | None = None
    handled = 0
    with selectors.DefaultSelector() as selector:
        selector.register(ended, selectors.EVENT_READ, "ended")
        selector.register(wake_read, selectors.EVENT_READ, "signal")
        if child.stderr is not None:
            os.set_blocking(child.stderr.fileno(), False)
            selector.register(child.stderr, selectors.EVENT_READ, "stderr")
        while child.returncode is None:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in selector.select(timeout):
                if key.data == "signal":
                    os.read(wake_read, 64)
                elif key.data == "stderr" and not _pass_on(child, search):
                    selector.unregister(key.fileobj)
                elif key.data == "ended":
                    child.wait()
            if len(stops) > handled:
                deadline = time.monotonic() + (GRACE_S if handled == 0 else 0.0)
                handled = len(stops)
                child.terminate()
            if deadline is not None and time.monotonic() >= deadline:
                child.kill()
                deadline = None
    os.close(ended)
    while child.stderr is not None and _pass_on(child, search):
        pass
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _pass_on(child: subprocess.Popen[bytes], search: _Search) -> bool:
    """Copy what is there from the child's stderr to this process's; False where nothing more is there now."""
    assert child.stderr is not None
    try:
        piece = os.read(child.stderr.fileno(), 1 << 16)
    except BlockingIOError:
        return False
    search.feed(piece)
    sys.stderr.buffer.write(piece)
    sys.stderr.buffer.flush()
    return bool(piece)


def _sweep(hurry: Callable[[], bool]) -> None:
    """End every descendant of this process: TERM, then KILL after `GRACE_S`."""
    deadline = time.monotonic() + GRACE_S
    number = signal.SIGTERM
    warned: set[int] = set()
    while pids := _descendants():
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


def _descendants() -> list[int]:
    """The living processes below this one; those that ended are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        for task in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            try:
                children = [int(word) for word in task.read_text().split()]
            except OSError:  # the process has ended
                continue
            found += children
            pending += children
    return found


def end_with_parent() -> None:
    """Let this process get TERM when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
