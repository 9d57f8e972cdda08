"""Which ranks of a host have ended before they were through hvd.init(): others may wait for them inside MPI.

mpirun does not say so where it lets ranks go on without others, and MPICH's and Intel's never. Ranks are found in /proc
by their environment, so also before they have imported anything. A rank is the first process that its launcher has
started for it: a shell or another wrapper counts, and lives as long as what it waits for; a program that takes its
place by exec is the same process; what it starts besides has the same environment, and a parent that is part of the
rank.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from hvdlite import _native, environment, launched
from hvdlite.processes import shares_network, state_of
from hvdlite.thread_shortage import thread_shortage_told

_LOOK_S = 0.5
GONE_S = 2.0
"""For ranks that miss another one while they start to go on without it, or to end, by themselves."""
THROUGH = "hvd.init() or init_process_group(), where others wait for it"
_LATEST_S = 3.0  # for a rank to be seen after the first one of its host: a launcher starts them within milliseconds
UNSEEN = 0xFFFFFFFF
"""A rank that has ended before it was seen, where ranks on other hosts have not been seen either."""


@dataclass(frozen=True)
class _Process:
    """A process of a rank.

    Attributes:
        began: by the kernel's clock.
        size: how many ranks there are.
        local_size: how many of them its host has.
    """

    pid: int
    parent: int
    began: int
    rank: int
    size: int
    local_size: int


class StartWatch:
    """Of the ranks of one mpirun on this host, until `close`.

    Args:
        marks: variables that show these ranks; none: there are none.
        start: how many times ranks were started.
        selector: hears of the ends of ranks; each has its rank as data.
    """

    def __init__(self, marks: Mapping[str, str], start: int, selector: selectors.BaseSelector) -> None:
        self.start = start
        self._marks = marks
        self._selector = selector
        self._seen: set[int] = set()
        self._ends: list[int] = []  # pidfds in the selector
        self._size = self._local_size = 1  # as far as is known
        self._first_s = math.inf  # when the first rank was seen
        self._next_look_s = time.monotonic() if marks else math.inf

    @property
    def sleep_s(self) -> float | None:
        """Until it is time to look for ranks; None: all have been found."""
        return None if self._next_look_s == math.inf else max(0.0, self._next_look_s - time.monotonic())

    def missed(self) -> int | None:
        """Look for ranks, if it is time; one that should have come and has not, as it ended before it was seen."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return None
        for process in _ranks(self._marks):
            self._size, self._local_size = process.size, max(self._local_size, process.local_size)
            if process.rank not in self._seen:
                with suppress(ProcessLookupError):  # it has ended just now
                    self._ends.append(os.pidfd_open(process.pid))
                    self._selector.register(self._ends[-1], selectors.EVENT_READ, process.rank)
                    self._seen.add(process.rank)
        if self._seen:
            self._first_s = min(self._first_s, now_s)
        is_late = now_s > self._first_s + _LATEST_S
        has_all = len(self._seen) >= self._local_size
        self._next_look_s = math.inf if has_all or is_late else now_s + _LOOK_S
        if has_all or not is_late:
            return None
        return min({*range(self._size)} - self._seen) if self._size == self._local_size else UNSEEN

    @property
    def found(self) -> dict[int, int]:
        """The rank of each descriptor in the selector."""
        return {key.fd: key.data for key in self._selector.get_map().values() if key.fd in self._ends}

    def rank_ended(self, key: selectors.SelectorKey) -> None:
        """One of the descriptors in the selector has become readable."""
        self._selector.unregister(key.fd)
        self._ends.remove(key.fd)
        os.close(key.fd)

    def close(self) -> None:
        for end in self._ends:
            self._selector.unregister(end)
            os.close(end)
        self._ends.clear()
        self._next_look_s = math.inf


@contextmanager
def ends_with_others(marks: Mapping[str, str]) -> Iterator[None]:
    """Within the block this process, which starts, ends soon after a rank of its host that has ``marks``, and says so.

    For hosts on which nobody else watches them. mpirun notices that a rank has ended that waits inside MPI.
    """
    with selectors.DefaultSelector() as selector, closing(StartWatch(marks, 1, selector)) as watch:
        missed = None
        while missed is None and (sleep_s := watch.sleep_s) is not None:
            time.sleep(sleep_s)
            missed = watch.missed()
        ended = f" of {socket.gethostname()} has ended before it was through {THROUGH}"
        after = [(end, f"\nhvdlite: rank {rank}") for end, rank in watch.found.items()]
        start = f"\nhvdlite: {called(missed)}" if missed is not None else ""
        with thread_shortage_told():
            limit = _native.Deadline(GONE_S, start + ended, 1, after=[] if start else after)
        try:
            yield
        finally:
            limit.cancel()


def called(rank: int) -> str:
    """``rank``, which may be `UNSEEN`, in words."""
    return "a rank" if rank == UNSEEN else f"rank {rank}"


def _ranks(marks: Mapping[str, str]) -> list[_Process]:
    """The first process of each rank on this host that has ``marks`` in its environment, the oldest first."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):  # it has ended, or is another user's
                process = _process(int(entry), marks)
                if process is not None:
                    found[process.pid] = process
    return sorted((one for one in found.values() if one.parent not in found), key=lambda one: one.began)


def _process(pid: int, marks: Mapping[str, str]) -> _Process | None:
    """Raises OSError where there is none."""
    environ = environment.of_process(pid)
    started = launched.find(environ)
    if started is None or not marks.items() <= environ.items() or not shares_network(pid):
        return None
    fields = state_of(pid)
    return _Process(pid, int(fields[1]), int(fields[19]), started.rank, started.size, started.local_size)
