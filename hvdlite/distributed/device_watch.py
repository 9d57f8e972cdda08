"""What a process group has enqueued on a GPU: kept alive until it is done, and done in time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hvdlite import _native
from hvdlite.coordinator.request import rank_list
from hvdlite.errors import CollectiveError, StallError
from hvdlite.health import Health

_LOG = logging.getLogger("hvdlite")
_LOOK_S = 0.1
_SETTLE_S = 5.0


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

    def is_done(self, health: Health) -> bool:
        """Whether its end was reached before the group failed, which lets streams go that have not done their work."""
        if not self._is_done and self.moment.is_reached and health.failure is None:
            self._is_done = True
        return self._is_done

    def let_go(self) -> None:
        """Its memory may be used again by whoever handed it over."""
        self.kept = None


class DeviceWatch:
    """Of the calls of one group, in the order of its stream. A thread looks, which sleeps where nothing is under way.

    Args:
        name: of the group, for people.
        ranks: what errors call the ranks of the group.
        behind: the places in it whose GPUs have not come as far as this rank's.
        check_gpu: raises CollectiveError if the GPU, or what it works with, has failed.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        health: Health,
        behind: Callable[[], Sequence[int]],
        check_gpu: Callable[[], None],
    ) -> None:
        self._name = name
        self._ranks = tuple(ranks)
        self._health = health
        self._behind = behind
        self._check_gpu = check_gpu
        self._lock = threading.Lock()  # guards _enqueued
        self._enqueued: deque[Enqueued] = deque()
        self._news = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(self, enqueued: Enqueued) -> None:
        """From here on it is watched."""
        self._oldest()
        with self._lock:
            self._enqueued.append(enqueued)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"hvdlite-gpu-{self._name}", daemon=True)
            self._thread.start()
        self._news.set()

    def close(self) -> None:
        """Wait until all is done, but not for ever, and end the thread."""
        deadline_s = time.monotonic() + _SETTLE_S
        while self._oldest() is not None:
            if time.monotonic() > deadline_s:
                _LOG.error("process group %s: a GPU does not come to an end with what it was given", self._name)
                break
            time.sleep(_LOOK_S / 10)
        self._is_closing = True
        self._news.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _oldest(self) -> Enqueued | None:
        """The first that is not done; those before it are forgotten."""
        with self._lock:
            while self._enqueued and self._enqueued[0].moment.is_reached:
                self._enqueued[0].is_done(self._health)
                self._enqueued.popleft()
            return self._enqueued[0] if self._enqueued else None

    def _run(self) -> None:
        while not self._is_closing:
            oldest = self._oldest()
            if oldest is None:
                self._news.wait()
                self._news.clear()
                continue
            if self._health.failure is None:
                try:
                    self._look_at(oldest)
                except CollectiveError as error:
                    self._health.report(error)
            time.sleep(_LOOK_S)

    def _look_at(self, oldest: Enqueued) -> None:
        self._check_gpu()
        if time.monotonic() - oldest.since_s > oldest.limit_s:
            late = [self._ranks[place] for place in self._behind()]
            raise StallError(
                f"{oldest.title} of process group {self._name}: a GPU has not done it within the timeout of "
                f"{oldest.limit_s:g} s" + (f", and those of {rank_list(late)} are behind" if late else "")
            )
