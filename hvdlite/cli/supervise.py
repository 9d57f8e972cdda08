"""Run one command to its end, and let nothing of it survive an interruption or a failure. Linux only."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdlite.cli.children import GRACE_S, Stops, end_with_parent, sweep


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
    with Stops() as stops:
        child = subprocess.Popen(
            argv, env=dict(environ), stderr=subprocess.PIPE if watch_for else None, preexec_fn=end_with_parent
        )
        search = _Search(watch_for)
        status = _wait(child, stops, search)
        if stops:
            status = stops.status
        if status != 0 or search.found:
            sweep(lambda: len(stops) > 1)
        return Ending(status, search.found)


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


def _wait(child: subprocess.Popen[bytes], stops: Stops, search: _Search) -> int:
    """The child's exit status. Until its end its stderr is passed on, and a stop signal ends it."""
    ended = os.pidfd_open(child.pid)
    deadline: float | None = None
    handled = 0
    with selectors.DefaultSelector() as selector:
        selector.register(ended, selectors.EVENT_READ, "ended")
        selector.register(stops.wake, selectors.EVENT_READ, "signal")
        if child.stderr is not None:
            os.set_blocking(child.stderr.fileno(), False)
            selector.register(child.stderr, selectors.EVENT_READ, "stderr")
        while child.returncode is None:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in selector.select(timeout):
                if key.data == "signal":
                    os.read(stops.wake, 64)
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
