"""What happened when, kept in memory until it is written: one bounded ring buffer per rank."""

from __future__ import annotations

import itertools
import time
from collections import deque
from contextlib import AbstractContextManager
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, cast

INSTANT = -1
"""In place of an end: the event has no duration."""


class Lane(Enum):
    """A row of the timeline. The order here is the order on the screen."""

    BACKWARD = "backward"
    WAIT = "wait"
    MEETING = "meeting"
    WINDOW = "window"
    ON_GPU = "on gpu"
    OPTIMIZER = "optimizer"
    NEGOTIATION = "negotiation"
    FROM_DEVICE = "from device"
    PACK = "pack"
    NODE_REDUCE_SCATTER = "node reduce-scatter"
    NODE_ALLREDUCE = "node allreduce"
    RING = "ring"
    NODE_ALLGATHER = "node allgather"
    UNPACK = "unpack"
    TO_DEVICE = "to device"
    BROADCAST = "broadcast"
    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"
    CYCLE = "cycle"
    PARAMETER = "parameter"


COMMUNICATION_LANES = frozenset(
    {
        Lane.FROM_DEVICE,
        Lane.TO_DEVICE,
        Lane.PACK,
        Lane.NODE_REDUCE_SCATTER,
        Lane.NODE_ALLREDUCE,
        Lane.RING,
        Lane.NODE_ALLGATHER,
        Lane.UNPACK,
        Lane.BROADCAST,
        Lane.ALLGATHER,
        Lane.ALLTOALL,
        Lane.WINDOW,
    }
)
"""Where bytes move, on a coordinator thread or, between the ranks of split layers, on the user's; negotiation and
meeting are waiting for other ranks, not work."""

EXPOSED_LANES = frozenset({Lane.WAIT, Lane.MEETING, Lane.WINDOW})
"""Where the main thread cannot compute."""

Event = tuple[int, Lane, str, int, int, int, str]
"""Number, lane, name, start_ns, end_ns or `INSTANT`, bytes, dtype; in place of the dtype a parameter has its bucket,
and an optimizer's step its process set.

A plain tuple: a named one takes twice as long."""


class Profiler(Protocol):
    """What shows spans as ranges of its own, while it runs; `torch.autograd.profiler` is one."""

    _is_profiler_enabled: bool

    def record_function(self, name: str) -> AbstractContextManager[Any, Any]:
        """A range."""


class _NoProfiler:
    _is_profiler_enabled = False

    def record_function(self, name: str) -> AbstractContextManager[Any, Any]:
        raise AssertionError("no profiler runs")


class Recorder:
    """Records spans and marks of this rank; any thread may call at any time.

    Nothing is recorded, or allocated, until `start`, or while a profiler runs. Times are `time.monotonic_ns`.

    Args:
        max_events: most events kept until they are drained; then the oldest go, and are counted.

    Attributes:
        is_recording: since `start`, until `stop`.
        recordings: how often `start` was called.
        profiler: gets a range for every span of the threads that it watches.
        stepping_thread: which is in a step of an optimizer that waits for other ranks; 0: none, or nothing is recorded.
    """

    __slots__ = (
        "_append", "_max_events", "_ring", "_seen", "_sequence", "_taken", "is_recording", "mark_cycles", "profiler",
        "recordings", "stepping_thread",
    )  # fmt: skip

    def __init__(self, max_events: int = 1 << 16) -> None:
        self._max_events = max_events
        self.is_recording = False
        self.recordings = 0
        self.stepping_thread = 0
        self.profiler: Profiler = _NoProfiler()
        self.mark_cycles = False
        """Whether whoever runs cycles should `mark` each of them."""
        self._reset()

    def _reset(self) -> None:
        # The numbers tell what a full ring has pushed out. A deque and a count are each safe to share between threads,
        # without a lock that every event would pay for.
        self._ring: deque[Event] = deque(maxlen=self._max_events)
        self._append = self._ring.append
        self._sequence = itertools.count()
        self._seen = 0
        self._taken = 0

    def start(self, mark_cycles: bool = False) -> None:
        """Record from now on, into an empty ring."""
        self._reset()
        self.mark_cycles = mark_cycles
        self.recordings += 1
        self.is_recording = True

    def stop(self) -> None:
        """Record no more; what is in the ring can still be drained."""
        self.is_recording = False
        self.mark_cycles = False

    @property
    def enabled(self) -> bool:
        """Whether spans are of use; who runs often asks before it makes one."""
        return self.is_recording or self.profiler._is_profiler_enabled

    def span(self, lane: Lane, name: str, nbytes: int = 0, dtype: str = "") -> AbstractContextManager[None]:
        """Record how long a ``with`` block takes."""
        if not self.enabled:
            return NO_SPAN
        if self.profiler._is_profiler_enabled:
            return _SpanAndRange(self, lane, name, nbytes, dtype)
        return _Span(self, lane, name, nbytes, dtype)

    def add(self, lane: Lane, name: str, start_ns: int, end_ns: int, nbytes: int = 0, dtype: str = "") -> None:
        """Record what lasted from ``start_ns`` to ``end_ns``."""
        if self.is_recording:
            self._append((next(self._sequence), lane, name, start_ns, end_ns, nbytes, dtype))

    def mark(self, lane: Lane, name: str) -> None:
        """Record that something happened now."""
        if self.is_recording:
            self._append((next(self._sequence), lane, name, time.monotonic_ns(), INSTANT, 0, ""))

    @property
    def held(self) -> int:
        """Events in the ring."""
        return len(self._ring)

    def drain(self) -> tuple[list[Event], int]:
        """Take all events out of the ring, for one thread at a time; also how many were dropped since the last call."""
        was_full = len(self._ring) == self._max_events
        events: list[Event] = []
        for _ in range(len(self._ring)):  # bounded, so that busy threads cannot keep us here
            events.append(self._ring.popleft())
        if events:
            self._seen = max(self._seen, 1 + max(event[0] for event in events))
            self._taken += len(events)
        # In a ring with room a missing number belongs to a thread that is just about to append it.
        dropped = max(self._seen - self._taken, 0) if was_full else 0
        self._taken += dropped
        return events, dropped


class _Span:
    __slots__ = ("_dtype", "_lane", "_name", "_nbytes", "_recorder", "_start_ns")

    def __init__(self, recorder: Recorder, lane: Lane, name: str, nbytes: int, dtype: str) -> None:
        self._recorder = recorder
        self._lane = lane
        self._name = name
        self._nbytes = nbytes
        self._dtype = dtype

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.add(self._lane, self._name, self._start_ns, time.monotonic_ns(), self._nbytes, self._dtype)


class _SpanAndRange(_Span):
    __slots__ = ("_range",)

    def __enter__(self) -> None:
        self._range = self._recorder.profiler.record_function(f"hvdlite {self._lane.value}: {self._name}")
        self._range.__enter__()
        super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._range.__exit__(kind, error, trace)


class _Disabled:
    # Compiled functions that do nothing: written in Python, entering and leaving would be most of what a span costs
    # where nothing is recorded. (A memoryview's __exit__ releases it, which may be done again and again.)
    __slots__ = ()
    __enter__ = "".strip
    __exit__ = memoryview(b"").__exit__


NO_SPAN = cast("AbstractContextManager[None, Any]", _Disabled())
"""For a ``with`` block where nothing is recorded; who runs often takes it without calling `Recorder.span`."""
