"""Ranks on this machine, without MPI: hvdliterun starts them itself, and is where they meet."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

from hvdlite.cli.children import (
    Ending,
    Orphans,
    Stops,
    end_with_parent,
    how_ended,
    shell_status,
    suspended_together,
    sweep,
    user_signals_passed_on,
)
from hvdlite.cli.job import Command, Launch, thread_settings
from hvdlite.cli.say import say
from hvdlite.errors import StartupError
from hvdlite.launched import told, without_launcher
from hvdlite.processes import is_stopped
from hvdlite.start.meeting_point import MeetingPoint

_LAST_WORDS_S = 0.5  # after rank 0 has ended, which by custom speaks for all and saves what is to be saved


def build(launch: Launch, environ: Mapping[str, str]) -> Command:
    """The command of every rank, with what the environment does not decide."""
    environment, notes = thread_settings(launch, environ)
    if launch.interfaces:
        environment["HVDLITE_NETWORK_INTERFACES"] = launch.interfaces
    return Command(list(launch.program), environment, notes)


def run_ranks(argv: Sequence[str], count: int, environ: Mapping[str, str], grace_s: float) -> int:
    """Run ``count`` processes of ``argv`` with this process's stdout and stderr, to their end; returns the exit status.

    That is 0, the one of the rank that failed first, or 128 + n after signal n, to that rank or to this process.

    - stdin is rank 0's. Where it is a terminal rank 0 stays in its foreground, so that Ctrl-C reaches it too.
    - Once a rank has failed, the others have ``grace_s`` to end by themselves, and `_LAST_WORDS_S` once rank 0 has
      ended after it; then they get TERM, and after `GRACE_S` KILL, with all that they have started.
    - On Ctrl-C, TERM or HUP they get TERM at once; a second signal does not wait for `GRACE_S`.
    - Where this process is killed outright, they are killed.

    Raises:
        StartupError: a process cannot be started.
    """
    with Stops() as stops, closing(MeetingPoint()) as point, ExitStack() as on_failure:
        on_failure.callback(sweep, lambda: True)
        inherited = {**without_launcher(environ), **point.environment}
        started = [start(argv, rank, count, inherited) for rank in range(count) if not stops]
        point.open()
        job = _Job(started, point, stops, grace_s)
        on_failure.pop_all()
        status = job.wait()
        if stops:
            status = stops.status
        if status != 0:
            sweep(lambda: len(stops) > 1)
        return status


class Started(NamedTuple):
    """A process, and a pidfd of it, which whoever has it closes."""

    child: subprocess.Popen[bytes]
    end: int


def start(argv: Sequence[str], rank: int, count: int, environ: Mapping[str, str]) -> Started:
    """A process for rank ``rank`` of ``count``, which ends with this one.

    Raises:
        StartupError: it cannot be started.
    """
    parent = os.getpid()
    has_terminal = rank == 0 and os.isatty(0)

    def prepare() -> None:
        end_with_parent(signal.SIGKILL)  # a rank that handles TERM would outlive this process
        if os.getppid() != parent:  # it has ended before that line
            os._exit(1)
        if not has_terminal:
            os.setpgid(0, 0)  # Ctrl-C reaches this process alone, which ends the ranks in order

    variables = {**environ, **told(rank, count)}
    try:
        child = subprocess.Popen(
            argv, env=variables, stdin=None if rank == 0 else subprocess.DEVNULL, preexec_fn=prepare
        )
        try:
            return Started(child, os.pidfd_open(child.pid))
        except OSError:
            child.kill()
            child.wait()
            raise
    except (OSError, subprocess.SubprocessError) as error:
        raise StartupError(f"rank {rank} cannot be started: {argv[0]}: {error}") from error


class _Job:
    """Ranks that run, until all have ended.

    Attributes:
        status: of the rank that failed first; 0 as long as none has.
    """

    def __init__(self, started: Sequence[Started], point: MeetingPoint, stops: Stops, grace_s: float) -> None:
        self.status = 0
        self._living = {rank: child for rank, (child, _) in enumerate(started)}
        self._point = point
        self._stops = stops
        self._grace_s = grace_s
        self._ending = Ending(stops, self._living.values)
        self._selector = selectors.DefaultSelector()
        self._selector.register(stops.wake, selectors.EVENT_READ)
        for rank, (_, end) in enumerate(started):
            self._selector.register(end, selectors.EVENT_READ, rank)

    def wait(self) -> int:
        """Returns `status`."""
        orphans = Orphans()
        living = self._living.values
        with self._selector as selector, suspended_together(living), user_signals_passed_on(living):
            while self._living:
                timeout = max(0.0, min(self._ending.due_s, orphans.due_s) - time.monotonic())
                ended = {}
                for key, _ in selector.select(timeout):
                    if key.data is None:
                        os.read(self._stops.wake, 64)
                    else:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                        ended[key.data] = self._living[key.data].wait()
                # Who was killed has not ended because of others, nor who chose a status; who has raised may have.
                for rank in sorted(ended, key=lambda rank: (ended[rank] >= 0, ended[rank] == 1, rank)):
                    self._note_end(rank, ended[rank])
                self._ending.heed_stops()
                self._ending.send_if_due()
                orphans.reap_if_due()
        return self.status

    def _note_end(self, rank: int, status: int) -> None:
        child = self._living.pop(rank)
        how = how_ended(status)
        self._point.rank_ended(rank, how)
        if status != 0 and self.status == 0:
            self.status = shell_status(status)
            if not self._stops:
                say(f"rank {rank} (pid {child.pid}) {how}")
            self._ending.within(self._grace_s)
        elif self.status != 0 and rank == 0:
            self._ending.within(_LAST_WORDS_S)
        if self.status != 0 and all(is_stopped(other.pid) for other in self._living.values()):
            self._ending.within(0.0)  # nobody is left who could save anything
