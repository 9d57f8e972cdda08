"""What a process group has enqueued on a GPU: kept alive until it is done, and done in time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from hvdlite import _native
from hvdlite.collectives.base import Backend
from hvdlite.errors import CollectiveError, StallError, gpu_blamed
from hvdlite.rank_list import rank_list
from hvdlite.world import World

_LOG = logging.getLogger("hvdlite")
_LOOK_S = 0.1
_CLOSING_LOOK_S = 1e-3
_SETTLE_S = 5.0


class Fallible(Protocol):
    """A group, or its world."""

    @property
    def has_failed(self) -> bool:
        """Whether streams may have been let go, by whichever rank has learnt of the failure first."""


class Enqueued:
    """A call on a stream.

    Args:
        moment: its end.
        title: for people.
        kept: keeps its tensors alive.
        limit_s: the longest that it may take.
    """

    def __init__(self, moment: _native.Moment, title: str, kept: object, limit_s: float) -> None:
        self.moment = moment
        self.title = title
        self.kept: object | None = kept
        self.limit_s = limit_s
        self.since_s = time.monotonic()
        self._is_done = False

    def is_done(self, group: Fallible) -> bool:
        """Whether its end was reached before the group failed, which lets streams go that have not done their work."""
        if not self._is_done and self.moment.is_reached and not group.has_failed:
            self._is_done = True
        return self._is_done

    def let_go(self) -> None:
        """Its memory may be used again by whoever handed it over."""
        self.kept = None


class _UnderWay(NamedTuple):
    """A call that is being enqueued, or has been."""

    title: str
    since_s: float
    limit_s: float


class DeviceWatch:
    """Of the calls of one group, in the order of its stream. A thread looks, which sleeps where nothing is under way.

    Args:
        name: of the group, for people.
        ranks: what errors call the ranks of the group.
    """

    def __init__(self, name: str, ranks: Sequence[int], world: World) -> None:
        self._name = name
        self._ranks = tuple(ranks)
        self._world = world
        self._health = world.health
        self._backend: Backend | None = None
        self._lock = threading.Lock()  # guards _enqueued
        self._enqueued: deque[Enqueued] = deque()
        self._enqueuing: _UnderWay | None = None
        self._news = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def watch_over(self, backend: Backend) -> None:
        """By which calls are done from here on."""
        self._backend = backend

    @contextmanager
    def enqueuing(self, title: str, limit_s: float) -> Iterator[None]:
        """In the ``with`` block the caller waits for other ranks, as backends do between nodes.

        Raises:
            CollectiveError: of the block; the group is of no use any more, on all ranks.
        """
        self._enqueuing = _UnderWay(title, time.monotonic(), limit_s)
        self._wake()
        try:
            yield
        except CollectiveError as error:
            self._health.report(StallError(str(error)))  # the first that is reported counts, of the cause as a rule
            raise
        finally:
            self._enqueuing = None

    def add(self, enqueued: Enqueued) -> None:
        """From here on it is watched."""
        self._oldest()
        with self._lock:
            self._enqueued.append(enqueued)
        self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"hvdlite-gpu-{self._name}", daemon=True)
            self._thread.start()
        self._news.set()

    def close(self) -> None:
        """Wait until all is done; what is not in time is left behind, to the thread, which keeps its tensors."""
        self._is_closing = True
        self._news.set()
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(_SETTLE_S)
        if self._thread.is_alive():
            _LOG.error("process group %s: a GPU does not come to an end with what it was given", self._name)

    def _oldest(self) -> Enqueued | None:
        """The first that is not done; those before it are forgotten. Raises CollectiveError: the GPU has failed."""
        with self._lock:
            while self._enqueued and self._has_reached(self._enqueued[0]):
                self._enqueued[0].is_done(self._world)
                self._enqueued.popleft()
            return self._enqueued[0] if self._enqueued else None

    def _has_reached(self, enqueued: Enqueued) -> bool:
        topology = self._world.topology
        rank = self._ranks[topology.ranks.index(topology.rank)]
        with gpu_blamed(rank, f"{enqueued.title} of process group {self._name}"):
            return enqueued.moment.is_reached

    def _run(self) -> None:
        try:
            self._look()
        except CollectiveError as error:
            self._health.report(error)

    def _look(self) -> None:
        while True:
            oldest = self._oldest()
            current = self._enqueuing if oldest is None else _UnderWay(oldest.title, oldest.since_s, oldest.limit_s)
            if current is not None:
                self._look_at(current)
                time.sleep(_CLOSING_LOOK_S if self._is_closing else _LOOK_S)
            elif self._is_closing:
                return
            else:
                self._news.wait()
                self._news.clear()

    def _look_at(self, current: _UnderWay) -> None:
        """End the group if the GPU does not go on."""
        if self._is_closing or self._health.failure is not None:
            return
        behind: Sequence[int] = ()
        if self._backend is not None:
            try:
                self._backend.check_health()
            except CollectiveError as error:
                self._health.report(error)
                return
            behind = self._backend.late()
        if time.monotonic() - current.since_s > current.limit_s:
            late = [self._ranks[place] for place in behind]
            self._health.report(
                StallError(
                    f"{current.title} of process group {self._name}: a GPU has not done it within the timeout of "
                    f"{current.limit_s:g} s" + (f", and those of {rank_list(late)} are behind" if late else "")
                )
            )
