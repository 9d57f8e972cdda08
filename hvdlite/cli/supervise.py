"""Run one command to its end, and let nothing of it survive an interruption or a failure. Linux only."""

from __future__ import annotations

import math
import os
import select
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, TextIO

from hvdlite.cli.children import GRACE_S, Orphans, Stops, end_with_parent, shell_status, sweep, user_signals_passed_on
from hvdlite.cli.launcher_watch import Expected, LauncherWatch
from hvdlite.cli.say import lose, push

_LOST_GRACE_S = 2.0  # for a launcher that is not waited for any longer
_LOOK_S = 0.1  # between two looks at whether there is time to wait for who reads


@dataclass(frozen=True)
class Ending:
    """How a command ended.

    Attributes:
        status: as a shell reports it: 128 + n after signal n, to the command or to this process.
        found: the first of the texts looked for in stderr that was there.
        lost: why it was not waited for any longer, or has probably failed; its status is that of its ranks then, or 1.
        was_stopped: this process was told to end.
        first_end: the rank that ended before all others of this machine; None where that is not known.
    """

    status: int
    found: str | None
    lost: str | None = None
    was_stopped: bool = False
    first_end: int | None = None


Filter = Callable[[bytes], bytes]


def supervise(
    argv: Sequence[str],
    environ: Mapping[str, str],
    expected: Expected,
    watch_for: Sequence[str],
    stdout_filter: Filter,
    spared: Callable[[], Collection[int]],
) -> Ending:
    """Run ``argv``, a launcher, with this process's stdin, stdout and stderr.

    On Ctrl-C, TERM or HUP the command gets TERM, and everything it started gets KILL after `GRACE_S`; a second signal
    does not wait. The same sweep follows a command that failed, or that does not do its work, see `LauncherWatch`.
    USR1 and USR2 are passed on. Where this process is killed outright, the command gets TERM.

    Args:
        watch_for: texts to look for in the command's stderr, which then passes through here unchanged.
        stdout_filter: gets every piece of the command's stdout and an empty one at its end; returns what passes.
        spared: children of this process that are not the command's, and live on; asked once that has ended.
    """
    search = _Search(watch_for)
    with Stops() as stops:
        child = subprocess.Popen(
            argv,
            env=dict(environ),
            stdout=subprocess.PIPE,  # Open MPI's mpirun does not mind a full disk, and ends with status 0
            stderr=subprocess.PIPE if watch_for else None,
            preexec_fn=end_with_parent,
        )
        streams = [
            *([_Stream(child.stdout, sys.stdout, stdout_filter)] if child.stdout else []),
            *([_Stream(child.stderr, sys.stderr, search.feed)] if child.stderr else []),
        ]
        run = _Run(child, stops, streams)
        with ExitStack() as on_failure:
            on_failure.callback(lambda: sweep(lambda: True, spared()))
            with user_signals_passed_on(lambda: [child]):
                status = run.wait(expected)
            on_failure.pop_all()
        if stops:
            status = stops.status
        if status != 0 or search.found or run.lost:
            sweep(lambda: len(stops) > 1, spared())
        for stream in streams:
            stream.finish(lambda: len(stops) > 1)
        return Ending(status, search.found, run.lost, bool(stops), run.first_end)


class _Search:
    """Looks for texts in a stream of pieces, which pass unchanged."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text.encode() for text in texts]
        self._tail = b""
        self.found: str | None = None

    def feed(self, piece: bytes) -> bytes:
        window = self._tail + piece
        for text in self._texts:
            if self.found is None and text in window:
                self.found = text.decode()
        self._tail = window[-max((len(text) for text in self._texts), default=1) :]
        return piece


class _Stream:
    """An output of the child, on its way to ours, which is None where it is closed.

    Nothing more is read while ours takes nothing: the child waits then, as where it writes there itself.
    """

    def __init__(self, source: IO[bytes], sink: TextIO | None, pass_through: Filter) -> None:
        self.source = source
        self._sink = None if sink is None else sink.fileno()
        self._pass_through = pass_through
        self._unwritten = b""
        self._has_ended = False
        os.set_blocking(source.fileno(), False)

    @property
    def awaits(self) -> tuple[int, int] | None:
        """The descriptor, and what it has to be ready for, before `pass_on` has something to do; None: it never has."""
        if self._unwritten and self._sink is not None:
            return self._sink, selectors.EVENT_WRITE
        return None if self._has_ended else (self.source.fileno(), selectors.EVENT_READ)

    def pass_on(self) -> bool:
        """Pass on what is there, as far as it is taken; False where nothing more is there now."""
        if not self._unwritten:
            try:
                piece = os.read(self.source.fileno(), 1 << 16)
            except BlockingIOError:
                return False
            self._has_ended = not piece
            self._unwritten = self._pass_through(piece) if piece else b""
        self._write()
        return not self._has_ended

    def finish(self, hurry: Callable[[], bool]) -> None:
        """Pass on the rest, once everything has ended: all of it, unless there is no time for what nobody takes."""
        self._clear(hurry)
        while not self._has_ended and self.pass_on():
            self._clear(hurry)
        self._unwritten = self._pass_through(b"")
        self._clear(hurry)
        self.source.close()

    def _clear(self, hurry: Callable[[], bool]) -> None:
        self._write()
        while self._unwritten and self._sink is not None and not hurry():
            select.select([], [self._sink], [], _LOOK_S)
            self._write()
        self._unwritten = b""

    def _write(self) -> None:
        piece, self._unwritten = self._unwritten, b""
        if self._sink is None:
            return
        try:
            self._unwritten = push(self._sink, piece)
        except BrokenPipeError:
            self._has_ended = True
            self.source.close()  # so that the launcher finds a broken pipe, as where it writes to ours itself
        except OSError as error:  # a full disk, or a terminal that was closed
            lose(error)


def _watch(selector: selectors.BaseSelector, stream: _Stream) -> None:
    if (awaited := stream.awaits) is not None:
        selector.register(*awaited, stream)


@dataclass
class _Run:
    """A launcher that runs.

    Attributes:
        lost: see `Ending`; ``first_end`` likewise.
    """

    child: subprocess.Popen[bytes]
    stops: Stops
    streams: Sequence[_Stream]
    lost: str | None = None
    first_end: int | None = None
    _kill_s: float | None = None  # when it is killed
    _stops_seen: int = 0
    _was_given_up: bool = False
    _statuses: list[int] = field(default_factory=list)

    def wait(self, expected: Expected) -> int:
        """The launcher's exit status. Until its end its output is passed on, and a stop signal ends it."""
        ended = os.pidfd_open(self.child.pid)
        orphans = Orphans()
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ, "ended")
            selector.register(self.stops.wake, selectors.EVENT_READ, "signal")
            for stream in self.streams:
                _watch(selector, stream)
            watch = LauncherWatch(self.child.pid, expected, selector)
            self._statuses = watch.statuses
            while self.child.returncode is None:
                next_s = min(watch.next_look_s, self._kill_s or watch.next_look_s, orphans.due_s)
                timeout = max(0.0, next_s - time.monotonic())
                ends = []
                for key, _ in selector.select(timeout):
                    if key.data == "signal":
                        os.read(self.stops.wake, 64)
                    elif key.data == "ended":
                        self.child.wait()
                    elif isinstance(key.data, _Stream):
                        selector.unregister(key.fd)
                        key.data.pass_on()
                        _watch(selector, key.data)
                    else:
                        ends.append(key)
                if ends:
                    watch.ranks_ended(ends)
                self._heed_stops()
                is_due = self.child.returncode is None and time.monotonic() >= watch.next_look_s
                if is_due and (why := watch.look()) is not None:
                    watch.next_look_s = math.inf
                    self._give_up(why)
                self._kill_in_time()
                orphans.reap_if_due()
            watch.close()
            self.first_end = watch.first_end
            may_explain = self.child.returncode > 0 and not self.stops and self.lost is None
            if may_explain and (why := watch.explain_end(self.child.returncode)):
                self.lost, self._was_given_up = why, True
        os.close(ended)
        if self._was_given_up:
            status = max(self._statuses, default=0 if expected.is_over else 1)
            return max(status, 1) if expected.have_failed else status
        return shell_status(self.child.returncode)

    def _heed_stops(self) -> None:
        if len(self.stops) > self._stops_seen:
            self._end_within(GRACE_S if self._stops_seen == 0 else 0.0)
            self._stops_seen = len(self.stops)

    def _give_up(self, why: str) -> None:
        if self._kill_s is None:
            self.lost, self._was_given_up = why, True
            self._statuses = [*self._statuses]  # the others end because of what follows
            self._end_within(_LOST_GRACE_S)

    def _end_within(self, seconds: float) -> None:
        self._kill_s = time.monotonic() + seconds
        self.child.terminate()

    def _kill_in_time(self) -> None:
        if self._kill_s is not None and time.monotonic() >= self._kill_s:
            self.child.kill()
            self.child.wait()
