"""What a user thread hands to the coordinator, and waits for: the request that all ranks share, this rank's memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from hvdlite import naps
from hvdlite._native import Flag
from hvdlite.coordinator.messages import Claim
from hvdlite.coordinator.remembered import Remembered
from hvdlite.coordinator.request import NAMED, Key, Request
from hvdlite.memory.base import Home
from hvdlite.memory.views import OnDevice, TensorView

if TYPE_CHECKING:
    from hvdlite._native import Moment

Allocate = Callable[[int, tuple[int, ...]], TensorView]
"""(index of the tensor, shape of its result) -> where the result shall go; called on the coordinator thread."""


def label_of(request: Request, sequence: int) -> str:
    """The name of an operation, for people."""
    return request.name if sequence == NAMED else f"{request.name}.{sequence}"


PAUSE_S = 100e-6
"""What a program does between two calls is a pause if it takes longer, in which others may well want the first."""
_OFTEN = 3  # times in a row


class Pace:
    """How one rank submits: what it waits for between two submissions, and how long it takes.

    Args:
        wake: gives what wakes the coordinator thread, or None where there is none any more, as handles live longer.
    """

    __slots__ = ("_followed_soon", "_last_ns", "_wake", "has_waited", "is_put_off", "last", "last_label")

    def __init__(self, wake: Callable[[], Callable[[], object] | None] = lambda: None) -> None:
        self.last_label = ""
        """Of what was submitted last, for people; empty before that."""
        self.has_waited = Flag(True)
        """Whether anybody has waited for a future, or asked for it, since the last submission."""
        self.last: Request | None = None
        """What was submitted last, until something else is, or somebody asks."""
        self.is_put_off = False
        """Whether nobody was woken for `last`, as `is_followed_soon`."""
        self._wake = wake
        self._last_ns = 0
        self._followed_soon: Remembered[int] = Remembered()  # how often in a row, by requests

    def step(self, now_ns: int, request: Request | None = None) -> float:
        """``request`` is being submitted: seconds since `rest`, infinite if anybody has waited meanwhile."""
        pause_s = math.inf if self.has_waited.is_set else (now_ns - self._last_ns) * 1e-9
        self._follow(now_ns)
        self.has_waited.is_set, self._last_ns, self.last = False, now_ns, request
        return pause_s

    def rest(self) -> None:
        """The program goes on: what submitting takes, while a plan is not known, is no pause of its own."""
        self._last_ns = time.monotonic_ns()

    def ask(self, *, waits: bool) -> None:
        """After `last` somebody asks for a future, and ``waits``, doing the work, or comes again."""
        self._follow(time.monotonic_ns() if waits else None)
        if self.is_put_off:
            self.is_put_off = False
            if not waits and (wake := self._wake()) is not None:
                wake()

    def _follow(self, now_ns: int | None) -> None:
        request, self.last = self.last, None
        if request is not None:
            is_soon = now_ns is not None and (now_ns - self._last_ns) * 1e-9 <= PAUSE_S
            self._followed_soon.remember(request, self._followed_soon.get(request, 0) + 1 if is_soon else 0)

    def is_followed_soon(self, request: Request) -> bool:
        """Whether there was no pause after ``request`` of late, until something else was submitted or somebody waited:
        who submits it does so again, and sees to it then."""
        return self._followed_soon.get(request, 0) >= _OFTEN


class Future:
    """What user threads wait for, and the coordinator completes once.

    Attributes:
        assist: what a thread can do for it while it waits.
        is_done: whether it is complete.
        pace: of who submits.
    """

    __slots__ = ("_error", "_lock", "_was_polled", "assist", "is_done", "pace")

    label: str

    def __init__(self) -> None:
        self.assist: Callable[[Future], None] | None = None
        self.pace: Pace | None = None
        # A lock that is held until completion is the cheapest sleep that Python has: no condition, no polling.
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_done = False
        self._was_polled = False
        self._error: BaseException | None = None

    def ask(self, *, waits: bool = True) -> None:
        """Somebody waits for it, or may not go on without."""
        pace = self.pace
        if pace is not None:
            pace.has_waited.is_set = True
            if pace.last is not None:
                pace.ask(waits=waits and not self.is_done)

    def _sleep(self) -> None:
        """Until it is complete."""
        if not self.is_done and self.assist is not None:
            self.assist(self)
        if not self.is_done:
            with self._lock:  # released by whoever completes; the next waiter takes it in turn
                pass

    def _give_way(self) -> None:
        """Of who polls, and not for the first time: see `WAY_S`."""
        if self._was_polled:
            time.sleep(naps.WAY_S)
        self._was_polled = True

    def _raise(self) -> None:
        """What it has ended in, if that is an error."""
        if self._error is not None:
            raise self._error.with_traceback(None)  # several threads may raise it

    def _complete(self) -> None:
        self.is_done = True
        self._lock.release()

    def fail(self, error: BaseException) -> None:
        """Complete with an error, unless it is complete already."""
        if not self.is_done:
            self._error = error
            self._complete()


class Submission(Future):
    """One operation of this rank, and its future.

    Args:
        inputs: kept alive until the operation is complete, as ``outputs`` are.
        splits: rows for each rank, of an alltoall.
        home: where its tensors live, if they live in one place.
    """

    __slots__ = (
        "_result", "_stream", "allocate", "device", "done_on_device", "home", "inputs", "is_awaited",
        "key", "label", "outputs", "pause_s", "request", "sequence", "splits", "submitted_ns",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        sequence: int,
        inputs: Sequence[TensorView] = (),
        outputs: Sequence[TensorView] = (),
        *,
        splits: Sequence[int] = (),
        home: Home | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        super().__init__()
        self.request = request
        self.sequence = sequence
        self.key: Key = request.name, sequence
        self.label = label_of(request, sequence)
        """The name for people: in errors and in the timeline."""
        self.inputs = inputs
        self.outputs = outputs
        self.splits = splits
        self.home = home
        self.allocate = allocate
        self.submitted_ns = time.monotonic_ns()
        self.device: OnDevice | None = None
        """Of one of its tensors, where some are in the memory of a GPU."""
        self.done_on_device: Moment | None = None
        """Reached when a GPU has done what was enqueued for it."""
        if request.tensors_on_device:
            self.device = next((view.device for view in (*inputs, *outputs) if view.device is not None), None)
        self._stream = self.device.current_stream() if self.device is not None else 0
        self.pause_s = 0.0
        """See `Pace.step`."""
        self.is_awaited = False
        """Whether anybody has asked for it who may not go on without."""
        self._result: Any = None

    @property
    def keys(self) -> Collection[Key]:
        """Under which it is in flight."""
        return (self.key,)

    def claim(self) -> Claim:
        return Claim(self.request, self.sequence)

    def poll(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        self.is_awaited = True
        self.ask(waits=False)
        if not self.is_done:
            self._give_way()
        return self.is_done

    def wait(self) -> Any:
        """Sleep until the operation is complete; return its result or raise its error. May be called again.

        What a GPU does is only enqueued then; it comes before what the caller enqueues on its current stream.
        """
        self.is_awaited = True
        self.ask()
        self._sleep()
        self._raise()
        if self.done_on_device is not None:
            self._precede_current_stream(self.done_on_device)
        return self._result

    def _precede_current_stream(self, moment: Moment) -> None:
        assert self.device is not None
        stream = self.device.current_stream()
        moment.precede(stream)
        if stream == self._stream:  # which is the one that may use the tensors' memory again
            self.inputs = self.outputs = ()

    def succeed(self, result: Any = None) -> None:
        self._result = result
        self._complete()
