"""`hvdliterun --elastic` on this machine: ranks that end are left out or replaced, and the others go on.

Each rank is a worker, a process with a number of its own. The roster says when those that wait become the next
generation of ranks (`hvdlite.recovery.roster`); the job here starts, tells and ends the processes.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue

from hvdlite import plain
from hvdlite.cli import ranks
from hvdlite.cli.children import (
    Ending,
    Orphans,
    Stops,
    how_ended,
    shell_status,
    signal_groups,
    suspended_together,
    sweep,
    user_signals_passed_on,
)
from hvdlite.cli.discovery import Discovery, IsOver
from hvdlite.cli.say import say
from hvdlite.config import MEETING_POINT, WORKER, Config
from hvdlite.errors import ConfigError, StartupError
from hvdlite.launched import without_launcher
from hvdlite.links.wire import process_of
from hvdlite.naps import growing_pause_s
from hvdlite.processes import is_stopped
from hvdlite.recovery.membership import ADDED, REMOVED
from hvdlite.recovery.roster import Generation, Join, Roster
from hvdlite.start.meeting_point import MeetingPoint, send

_TWICE = (
    "a program that a rank has started calls hvd.init() as well, which makes it a rank of its own. Start that without "
    f"{WORKER} and {MEETING_POINT} in its environment"
)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before a seat gets another process, if the last one was never a rank
_LOOK_S = 1.0  # between two looks at who is waited for


@dataclass(frozen=True)
class Elasticity:
    """How many ranks a job may have while it runs.

    Attributes:
        least: with fewer it waits for others, and ends if none are to come.
        restarts: how many processes may be started in place of those that have failed.
        most: so many ranks at most, where they may become more.
        look: how many this machine may have now, see `Discovery`; None: as many as in the beginning.
    """

    least: int
    restarts: int
    most: int | None = None
    look: Callable[[IsOver], int] | None = None

    def wanted(self, slots: int) -> int:
        """How many ranks there are to be on so many slots."""
        return max(self.least, slots if self.most is None else min(slots, self.most))


def run_elastic(
    argv: Sequence[str], count: int, environ: Mapping[str, str], elasticity: Elasticity, config: Config
) -> int:
    """Run ``count`` processes of ``argv`` until all have ended, and replace those that fail; returns the exit status.

    That is 0 if the ranks of the last generation have ended so, else that of the failure from which the job has not
    recovered, or 128 + n after signal n, to that rank or to this process. Streams and signals are as those of
    `hvdlite.cli.ranks.run_ranks`.

    Raises:
        StartupError: a process cannot be started.
    """
    with Stops() as stops, closing(_Arrivals()) as arrivals, closing(MeetingPoint(arrivals.put_worker)) as point:
        inherited = {**without_launcher(environ), **point.environment}

        def start(worker: int, seat: int) -> ranks.Started:
            return ranks.start(argv, seat, count, {**inherited, WORKER: str(worker)})

        with ExitStack() as on_failure:
            on_failure.callback(sweep, lambda: True)
            job = _ElasticJob(start, count, elasticity, config, point, arrivals, stops)
            point.open()
            on_failure.pop_all()
        with ExitStack() as on_end:
            if elasticity.look is not None:
                discovery = on_end.enter_context(closing(Discovery(elasticity.look, arrivals.put)))
                discovery.start()
            status = job.run()
        if stops:
            status = stops.status
        if status != 0:
            sweep(lambda: len(stops) > 1)
        return status


_Arrival = tuple[Join, socket.socket] | int | ConfigError
"""A worker with the connection to answer on; or what the look at the slots of this machine has come to."""


class _Arrivals:
    """From threads to the job's: that of the meeting point, to which workers come, and that which looks at slots."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Arrival] = SimpleQueue()
        self.wake, self._waker = os.pipe()

    def put(self, arrival: _Arrival) -> None:
        self._queue.put(arrival)
        with suppress(OSError):  # the job is over
            os.write(self._waker, b".")

    def put_worker(self, join: Join, link: socket.socket) -> None:
        self.put((join, link))

    def take(self) -> _Arrival:
        os.read(self.wake, 1)
        return self._queue.get()

    def close(self) -> None:
        os.close(self.wake)
        os.close(self._waker)


@dataclass(frozen=True)
class _Worker:
    """A process that lives."""

    seat: int
    child: subprocess.Popen[bytes]


class _ElasticJob:
    """Workers from their start to their end. One thread, which sleeps until something happens or is due."""

    def __init__(
        self,
        start: Callable[[int, int], ranks.Started],
        count: int,
        elasticity: Elasticity,
        config: Config,
        point: MeetingPoint,
        arrivals: _Arrivals,
        stops: Stops,
    ) -> None:
        self._start = start
        self._elasticity = elasticity
        self._config = config
        self._point = point
        self._arrivals = arrivals
        self._stops = stops
        self._roster = Roster(elasticity.least)
        self._generation: Generation | None = None
        self._workers: dict[int, _Worker] = {}
        self._links: dict[int, socket.socket] = {}
        self._started = 0
        self._restarts_left = elasticity.restarts
        self._status = 0  # of the failure from which the job has not recovered yet
        self._end_reason = ""  # set: nobody is started or let in any more
        self._were_never_ranks: Counter[int] = Counter()  # processes in a row, by seat
        self._due: dict[int, float] = {}  # when seats get another process
        self._limits: dict[int, float] = {}  # when workers for whom others wait are ended
        self._stopped: dict[int, float] = {}  # of those that are stopped, and since when
        self._looked_s = -math.inf
        self._patience_ends = math.inf  # of those that wait for enough others
        self._told = 0  # news of which members know
        self._seats = count
        self._processes: dict[int, int] = {}  # by worker, which may be below the one that was started
        self._leaving: set[int] = set()  # workers that end, or are to end at the next commit
        self._ending = Ending(stops, self._living)
        self._orphans = Orphans()
        self._selector = selectors.DefaultSelector()
        for seat in range(count):
            if not stops:
                self._launch(seat)

    def run(self) -> int:
        """Returns the exit status, once all have ended."""
        living = self._living
        with self._selector as selector, suspended_together(living), user_signals_passed_on(living):
            selector.register(self._stops.wake, selectors.EVENT_READ, self._heed_stops)
            selector.register(self._arrivals.wake, selectors.EVENT_READ, self._take_arrival)
            while self._workers or self._due:
                for key, _ in selector.select(self._sleep_s()):
                    key.data()
                self._look()
        for link in self._links.values():
            link.close()
        return self._status

    def _living(self) -> list[subprocess.Popen[bytes]]:
        return [worker.child for worker in self._workers.values()]

    # What happens.

    def _launch(self, seat: int) -> None:
        worker = self._started
        self._started += 1
        child, ended = self._start(worker, seat)
        self._workers[worker] = _Worker(seat, child)
        self._roster.add(worker, seat)
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._note_end(worker, ended))

    def _take_arrival(self) -> None:
        arrival = self._arrivals.take()
        if isinstance(arrival, ConfigError):
            self._report(f"{arrival}; the job goes on with the ranks that it has")
        elif isinstance(arrival, int):
            self._note_slots(arrival)
        else:
            self._let_in(*arrival)

    def _let_in(self, join: Join, link: socket.socket) -> None:
        if join.worker in self._leaving:
            link.close()
            self._dismiss(join.worker)
            return
        if join.worker not in self._workers:  # it has ended meanwhile
            link.close()
            return
        if self._processes.setdefault(join.worker, process_of(link)) != process_of(link):
            with link, suppress(OSError):
                send(link, plain.dumps(_TWICE))
            return
        if join.worker in self._links:
            self._links.pop(join.worker).close()
        self._links[join.worker] = link
        self._roster.come(join)
        if self._end_reason:
            self._refuse([join.worker], self._end_reason)
        elif join.failed is not None and self._generation is not None:
            # Stopped, or stuck; or it ends just now.
            workers = self._generation.workers
            if join.failed < len(workers):  # else it makes no sense
                self._limits[workers[join.failed]] = time.monotonic() + self._config.failure_grace_s

    def _note_slots(self, slots: int) -> None:
        """There may be more ranks, or are to be fewer: those on the last seats leave, members at the next commit."""
        if self._end_reason:
            return
        wanted = self._elasticity.wanted(slots)
        taken = {worker.seat for number, worker in self._workers.items() if number not in self._leaving} | {*self._due}
        self._due = {seat: due_s for seat, due_s in self._due.items() if seat < wanted}
        for seat in range(wanted):
            if seat not in taken and seat >= self._seats:
                self._due[seat] = time.monotonic()
        self._seats = wanted
        too_many = [n for n, worker in self._workers.items() if worker.seat >= wanted and n not in self._leaving]
        self._leaving.update(too_many)
        self._keep_one_member()
        for number in (self._roster.newcomers | self._roster.waiting.keys()) & set(too_many) & self._leaving:
            self._dismiss(number)

    def _keep_one_member(self) -> None:
        """One of those that have the state stays: where all would leave, on the first seat, which others give up."""
        members = self._roster.members
        if not members or members - self._leaving:
            return
        kept = min(members, key=lambda number: self._workers[number].seat)
        for number, worker in self._workers.items():
            if worker.seat == 0 and number not in self._leaving:
                self._dismiss(number)
        self._due.pop(0, None)
        self._leaving.remove(kept)
        self._workers[kept] = replace(self._workers[kept], seat=0)
        self._roster.add(kept, 0)

    def _dismiss(self, number: int) -> None:
        """It is no rank any more, and has nothing that others lack; nobody takes its place."""
        self._leaving.add(number)
        self._roster.remove(number)
        self._kill(number)

    def _kill(self, number: int) -> None:
        """With all of its process group: a rank may be below the process that was started, and be stopped."""
        signal_groups([self._workers[number].child.pid], signal.SIGKILL)

    def _note_end(self, number: int, ended: int) -> None:
        self._selector.unregister(ended)
        os.close(ended)
        worker = self._workers.pop(number)
        status = worker.child.wait()
        name, was_rank = self._name(number), number in self._roster.members
        self._roster.remove(number)
        self._limits.pop(number, None)
        if number in self._links:
            self._links.pop(number).close()
        self._point.rank_ended(number, how_ended(status))
        if number in self._leaving:
            self._leaving.remove(number)
        elif status != 0:
            self._note_failure(name, worker, status, was_rank=was_rank)
        elif was_rank:
            self._end(f"{name} has ended by itself, with exit status 0")
        elif self._were_never_ranks.pop(worker.seat, 0) and self._generation is None:
            self._status = 0  # it has succeeded in the place of one that has failed
        self._keep_one_member()

    def _note_failure(self, name: str, worker: _Worker, status: int, *, was_rank: bool) -> None:
        if self._stops or (self._end_reason and not was_rank):
            return
        if was_rank or self._generation is None:  # else the ranks that there are go on, and may come to their end
            self._status = self._status or shell_status(status)
        self._report(f"{name} (pid {worker.child.pid}) {how_ended(status)}")
        if self._end_reason:
            self._ending.within(self._config.failure_grace_s)
            return
        if self._restarts_left > 0:
            self._restarts_left -= 1
            self._due[worker.seat] = time.monotonic() + self._pause_s(worker.seat, was_rank=was_rank)
        if self._generation is not None and not self._roster.members:
            self._end("no rank is left that has the state")
        elif len(self._workers) + len(self._due) < self._elasticity.least:
            left, least, restarts = len(self._workers), self._elasticity.least, self._elasticity.restarts
            self._end(f"{left} ranks are left of --min-np {least}, and no more may be started (--restarts {restarts})")

    def _pause_s(self, seat: int, *, was_rank: bool) -> float:
        """Before this seat gets another process: none, unless they fail one after the other."""
        self._were_never_ranks[seat] = 0 if was_rank else self._were_never_ranks[seat] + 1
        if was_rank:
            return 0.0
        return growing_pause_s(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, self._were_never_ranks[seat] - 1)

    # What follows from it.

    def _look(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for seat in [seat for seat, due_s in self._due.items() if due_s <= now]:
            del self._due[seat]
            try:
                self._launch(seat)
            except StartupError as error:  # the machine is short of processes or memory
                self._report(str(error))
                self._due[seat] = now + self._pause_s(seat, was_rank=False)
        self._ending.send_if_due()
        self._orphans.reap_if_due()
        generation = None if self._end_reason else self._roster.next_generation()
        if generation is not None:
            self._begin(generation)
        news = ADDED * self._roster.knocks | REMOVED * bool(self._leaving & self._roster.members)
        if news & ~self._told:
            self._tell(self._roster.members - self._roster.waiting.keys(), bytes([news & ~self._told]))
            self._told |= news
        self._set_limits(now)

    def _begin(self, generation: Generation) -> None:
        self._generation = generation
        self._told = 0
        self._status = 0
        answer = plain.dumps(generation)
        for number in generation.workers:
            with suppress(OSError):  # it has ended just now
                send(self._links[number], answer)
        if generation.number > 1:
            count = len(generation.workers)
            self._report(f"goes on with {count} rank{'s' * (count != 1)}")

    def _set_limits(self, now: float) -> None:
        """How long some wait for others."""
        timeout_s = self._config.elastic_timeout_s
        self._limits = {number: self._limits.get(number, now + timeout_s) for number in self._roster.late}
        self._note_stopped(now)
        for number in [number for number, limit_s in self._limits.items() if limit_s <= now]:
            why = "is stopped, and does not" if number in self._stopped else "did not"
            self._report(f"{self._name(number)} {why} come to the others after a failure, and is ended")
            self._limits[number] = math.inf
            self._kill(number)
        if not self._roster.is_short:
            self._patience_ends = math.inf
        elif self._patience_ends == math.inf:
            self._patience_ends = now + timeout_s
        elif now >= self._patience_ends:
            self._end(f"too few ranks have come within {timeout_s:g} s (HVDLITE_ELASTIC_TIMEOUT)")

    def _note_stopped(self, now: float) -> None:
        """Who is stopped while others wait for it does not come: their heartbeats, which find it else, have ended."""
        if now - self._looked_s > 2 * _LOOK_S:  # this process did not run, as perhaps nobody did
            self._stopped.clear()
        self._looked_s = now
        late = [number for number in self._roster.late if is_stopped(self._processes[number])]
        self._stopped = {number: self._stopped.get(number, now) for number in late}
        for number, since_s in self._stopped.items():
            if self._limits[number] < math.inf:  # it was not killed already
                self._limits[number] = min(self._limits[number], since_s + self._config.heartbeat_timeout_s)

    def _sleep_s(self) -> float:
        """Until something is due."""
        now = time.monotonic()
        look_s = now + _LOOK_S if self._roster.late else math.inf
        others = (self._patience_ends, self._ending.due_s, self._orphans.due_s, look_s)
        return max(0.0, min([*self._due.values(), *self._limits.values(), *others]) - now)

    # The end.

    def _end(self, reason: str) -> None:
        """There are no more generations: who waits for one hears why, and who never was a rank is ended."""
        if self._end_reason:
            return
        self._end_reason = reason
        self._due.clear()
        if self._status != 0:
            self._report(f"the job ends: {reason}")
            self._ending.within(self._config.failure_grace_s)
        self._refuse(list(self._roster.waiting), reason)
        for number in self._roster.newcomers:
            self._dismiss(number)

    def _refuse(self, workers: Iterable[int], reason: str) -> None:
        for number in workers:
            with suppress(OSError):
                send(self._links[number], plain.dumps(reason))

    def _heed_stops(self) -> None:
        os.read(self._stops.wake, 64)
        if self._ending.heed_stops():
            self._end_reason = "hvdliterun was told to end"
            self._due.clear()

    # Words.

    def _tell(self, workers: Iterable[int], news: bytes) -> None:
        for number in workers:
            with suppress(OSError):
                self._links[number].send(news, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _name(self, number: int) -> str:
        """What a worker is called: by its rank, if it is one."""
        if self._generation is not None and number in self._generation.workers:
            return f"rank {self._generation.workers.index(number)}"
        return f"worker {number}, which is no rank yet,"

    def _report(self, text: str) -> None:
        if not self._stops:
            say(text)
