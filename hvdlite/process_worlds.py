"""The worlds in which this process is at the same time: hvd.init()'s, and those of torch.distributed's process groups.

Each begins and ends for itself. What they share is what belongs to the process: who of its peers has died, its
timeline, and what it has done.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hvdlite.errors import HorovodInternalError
from hvdlite.liveness.health import Health
from hvdlite.recorder import Recorder

_LOG = logging.getLogger("hvdlite")
_NO_STATISTICS: Mapping[str, int] = {}


class _Place:
    """A world's, here; hears of its failure as a `hvdlite.liveness.health.Mortal`."""

    def __init__(
        self,
        health: Health,
        ranks: Mapping[str, int],
        statistics: Callable[[], Mapping[str, int]],
        pass_on: Callable[[_Place, int, str], None],
    ) -> None:
        self.health = health
        self.ranks = ranks  # by process
        self.statistics = statistics
        self._pass_on = pass_on

    def fail(self, reason: HorovodInternalError) -> None:
        if self.health.failed_rank is not None:  # a stall concerns one world: all its ranks live
            self._pass_on(self, self.health.failed_rank, str(reason))


class ProcessWorlds:
    """One object for the life of a process; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards all that follows; taken again where news come back
        self._places: list[_Place] = []
        self._pauses = 0
        self._ended: Counter[str] = Counter()  # what groups that are no more have counted
        self._saying = threading.Lock()  # guards _said; held by nobody who waits
        self._said: dict[str, Health] = {}  # what the log has about failures, and by whom
        self._recorder: Recorder | None = None
        self._end_recording: Callable[[], None] | None = None

    def recorder(self, max_events: int) -> Recorder:
        """Of all worlds of this process; the first one says how much it keeps."""
        with self._lock:
            if self._recorder is None:
                self._recorder = Recorder(max_events)
            return self._recorder

    @property
    def is_recorded(self) -> bool:
        """Whether somebody writes a timeline of what the recorder holds."""
        return self._end_recording is not None

    def record(self, end: Callable[[], None]) -> None:
        """The caller writes it from here on; ``end`` is called if another one takes over."""
        self.take_over()
        with self._lock:
            self._end_recording = end

    def take_over(self) -> None:
        """Whoever writes it writes no more."""
        with self._lock:
            before, self._end_recording = self._end_recording, None
        if before is not None:
            before()

    def stop_recording(self, end: Callable[[], None]) -> None:
        """It does no more, if it is still the one."""
        with self._lock:
            if self._end_recording == end:
                self._end_recording = None

    def add(
        self,
        health: Health,
        processes: Sequence[str],
        names: Sequence[int],
        statistics: Callable[[], Mapping[str, int]] = lambda: _NO_STATISTICS,
    ) -> None:
        """From here on a rank that fails in another world fails in that of ``health`` too, and the other way round.

        Args:
            processes: of its ranks, as `hvdlite.bootstrap.Start` has them; ``names`` is what ``health`` calls them.
            statistics: what this process has done there, if the job's statistics are to have it.
        """
        place = _Place(health, dict(zip(processes, names, strict=True)), statistics, self._pass_on)
        health.is_said = partial(self._is_said, health)
        with self._lock:
            if any(other.ranks.keys() == place.ranks.keys() and other.ranks != place.ranks for other in self._places):
                _LOG.warning("hvdlite and torch.distributed number the same processes differently")
            others = list(self._places)
            self._places.append(place)
        health.add(place)
        for other in others:
            failure = other.health.failure
            if failure is not None:
                other.fail(failure)

    def remove(self, health: Health) -> None:
        """That world ends on this rank. Does nothing where it is not there."""
        with self._lock:
            for place in [place for place in self._places if place.health is health]:
                self._places.remove(place)
                self._ended.update(place.statistics())
                health.remove(place)
                self._pauses += not self._places
        with self._saying:
            self._said = {line: speaker for line, speaker in self._said.items() if speaker is not health}

    @property
    def pauses(self) -> int:
        """How often this process has left the last world in which it was."""
        return self._pauses

    @property
    def has_failed(self) -> bool:
        """Whether one of the worlds has."""
        with self._lock:
            return any(place.health.failure is not None for place in self._places)

    def statistics(self) -> dict[str, int]:
        """What this process has done in worlds that tell it, in those that have ended too."""
        with self._lock:
            total = Counter(self._ended)
            for place in self._places:
                total.update(place.statistics())
            return dict(total)

    def _is_said(self, health: Health, line: str) -> bool:
        with self._saying:
            return self._said.setdefault(line, health) is not health

    def _pass_on(self, source: _Place, failed: int, text: str) -> None:
        process = next((process for process, rank in source.ranks.items() if rank == failed), None)
        with self._lock:  # whoever leaves meanwhile waits, as what it leaves must not be closed yet
            for other in list(self._places):
                if process is not None and other is not source and process in other.ranks:
                    other.health.rank_failed(other.ranks[process], text)
