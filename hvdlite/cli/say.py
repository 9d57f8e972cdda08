"""How hvdliterun speaks, and passes output on: by the descriptor, so that no rest stays in a buffer and fails later."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress


def say(text: str) -> None:
    """A line of which the reader sees that it is hvdliterun's, see `show`."""
    show(f"hvdlite run: {text}")


def show(text: str) -> None:
    """A line. Where nobody can take it, as on a full disk or a terminal that was closed, the job goes on.

    So it does where nobody takes it yet, as of a pipe that is full: a thread waits for that.
    """
    if sys.stderr is not None:
        with suppress(OSError):
            _words.add(sys.stderr.fileno(), f"{text}\n".encode(errors="backslashreplace"))


def lose(error: OSError) -> None:
    """Say, once, that output of ranks is lost. The job goes on; `finish` tells of it at the end."""
    if not _words.output_is_lost:
        _words.output_is_lost = True
        say(f"output of ranks is lost: {error}")


def finish() -> bool:
    """Returns once all that was said has been taken, or Ctrl-C says that nobody waits for it.

    Returns:
        whether no output of ranks was lost.
    """
    # Scripts have it ignored in what they start in the background, where `hvdlite.cli.children.Stops` heeds it, too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        _words.finish()
    signal.signal(signal.SIGINT, before)
    return not _words.output_is_lost


def push(descriptor: int, data: bytes) -> bytes:
    """Write what is taken at once; returns the rest. Raises OSError."""
    look = select.poll()
    look.register(descriptor, select.POLLOUT)
    while data and look.poll(0):  # then a pipe has room for PIPE_BUF bytes
        data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]
    return data


class _Words:
    """What is said.

    Attributes:
        output_is_lost: of ranks, some of it.
    """

    def __init__(self) -> None:
        self.output_is_lost = False
        self._lock = threading.Lock()  # guards what follows
        self._unsaid = b""
        self._thread: threading.Thread | None = None  # only while nobody takes anything, as ranks are forked

    def add(self, descriptor: int, line: bytes) -> None:
        """Raises OSError."""
        with self._lock:
            if self._thread is None:
                line = push(descriptor, line)
            self._unsaid += line
            if self._unsaid and self._thread is None:
                self._thread = threading.Thread(target=self._write, args=(descriptor,), daemon=True)
                self._thread.start()

    def finish(self) -> None:
        if (thread := self._thread) is not None:
            thread.join()

    def _write(self, descriptor: int) -> None:
        while True:
            with self._lock:
                if not self._unsaid:
                    self._thread = None
                    return
                piece = self._unsaid
            taken = len(piece)
            with suppress(OSError):
                taken = os.write(descriptor, piece)
            with self._lock:
                self._unsaid = self._unsaid[taken:]


_words = _Words()
