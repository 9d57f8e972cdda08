"""A short schedule bound to its memory, for messages so small that Python would take longer than the network.

What a `Pipeline` finds out anew each time is written down once: persistent requests, and the arguments of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hvdlite import _native
from hvdlite.collectives.bound_pipeline import BoundPipeline
from hvdlite.collectives.bound_requests import BoundRequests, complete, is_done, slot
from hvdlite.collectives.schedule import WINDOW, ReduceCall, Schedule, additions, first_scale
from hvdlite.memory.views import Buffer

if TYPE_CHECKING:
    from mpi4py import MPI

    from hvdlite.collectives.requests import Endpoint

_MOST = 256  # that are bound, and as many that may come again
_MOST_MESSAGES = 1 << 15  # of all that are bound; each takes some 1,200 bytes, most of them in MPI


class Wait(NamedTuple):
    """For ``request``; ``peer`` is at its other end."""

    request: MPI.Prequest
    peer: int


class Phase(NamedTuple):
    """Start requests; wait for some; reduce."""

    starts: list[MPI.Prequest]
    waits: list[Wait]
    reductions: list[ReduceCall]


class Execution(Protocol):
    """Of phases, again and again. Raises MPI.Exception."""

    def start(self) -> bool:
        """Begin anew, as far as need not wait; whether that is all."""

    def advance(self) -> bool:
        """Go on, as far as need not wait; whether all is done."""

    def finish(self) -> None:
        """`advance` until all is done. Raises like `Endpoint.until`."""

    @property
    def peer(self) -> int:
        """Whom it waits for."""


class ByPython:
    """The reference, and the way where no function of MPI is found."""

    def __init__(self, phases: list[Phase], endpoint: Endpoint) -> None:
        self._phases = phases
        self._endpoint = endpoint
        self._steps: Iterator[Wait] = iter(())
        self._awaited: Wait | None = None

    def start(self) -> bool:
        self._steps = self._execute()
        self._awaited = next(self._steps, None)
        return self._awaited is None

    def advance(self) -> bool:
        while self._awaited is not None and self._awaited.request.Test():
            self._awaited = next(self._steps, None)
        return self._awaited is None

    def finish(self) -> None:
        while not self.advance():
            peer = self.peer
            self._endpoint.until(lambda: self.advance() or self.peer != peer, peer)  # noqa: B023 (called here)

    @property
    def peer(self) -> int:
        assert self._awaited is not None
        return self._awaited.peer

    def _execute(self) -> Iterator[Wait]:
        """Yields what is not there yet, and goes on once it is."""
        for phase in self._phases:
            for request in phase.starts:
                request.Start()
            for wait in phase.waits:
                if not wait.request.Test():
                    yield wait
            for reduction in phase.reductions:
                _native.reduce(*reduction)


class ByNativeCode:
    """The same without Python.

    Attributes:
        messages: for other native code.
    """

    def __init__(self, phases: list[Phase], endpoint: Endpoint) -> None:
        assert endpoint.functions is not None
        self._endpoint = endpoint
        self.messages = _native.BoundMessages(
            *endpoint.functions,
            [
                (
                    [endpoint.address_of(request) for request in phase.starts],
                    [(endpoint.address_of(wait.request), wait.peer) for wait in phase.waits],
                    phase.reductions,
                )
                for phase in phases
            ],
        )

    def start(self) -> bool:
        return is_done(self.messages.start(), self.messages)

    def advance(self) -> bool:
        return is_done(self.messages.advance(), self.messages)

    def finish(self) -> None:
        complete(self.messages, self._endpoint)

    @property
    def peer(self) -> int:
        return self.messages.peer


class BoundSchedule:
    """A schedule that `fits`, on the memory of ``buf``; it may be run again and again.

    Args:
        scratch: as of `BoundRequests`.

    Attributes:
        endpoint: of which its messages are.
        is_done: whether nothing of it is on its way.
    """

    def __init__(self, schedule: Schedule, buf: Buffer, endpoint: Endpoint, scratch: int, slot_bytes: int) -> None:
        self.endpoint = endpoint
        self.is_done = True
        self._requests = BoundRequests(schedule, buf, endpoint, scratch, slot_bytes)
        phases = [phase for phase in self._phases(schedule, buf, scratch, slot_bytes) if any(phase)]
        self._native = None if endpoint.functions is None else ByNativeCode(phases, endpoint)
        self._execution: Execution = self._native or ByPython(phases, endpoint)
        self._memory: tuple[object, ...] = ()

    @staticmethod
    def fits(schedule: Schedule) -> bool:
        return max(len(schedule.outgoing), len(schedule.arriving)) <= WINDOW

    def run(self, name: str, label: str, *memory: object) -> None:
        """Execute the schedule as an operation; see `Endpoint.operation`. Raises like `Endpoint.until`."""
        self.start(name, label, *memory)
        if not self.is_done:
            self._attempt(self._finish)

    def _finish(self) -> bool:
        self._execution.finish()
        return True

    def start(
        self, name: str, label: str, *memory: object, by: Callable[[_native.BoundMessages], int] | None = None
    ) -> None:
        """Begin it: send what depends on nothing. `advance` does the rest. Raises like `Endpoint.until`.

        Args:
            by: native code that starts the messages, and returns how far they are; only where `Endpoint.functions` are.
        """
        self.endpoint.begin(name, label)
        self._memory = memory
        self.is_done = False
        if by is None:
            self._attempt(self._execution.start)
            return
        messages = self.messages
        self._attempt(lambda: is_done(by(messages), messages))

    def advance(self) -> bool:
        """Do what need not wait; whether the schedule is executed. Raises like `Endpoint.until`."""
        return self.is_done or self._attempt(self._execution.advance)

    @property
    def peer(self) -> int:
        """Whom it waits for."""
        return self._execution.peer

    def _attempt(self, step: Callable[[], bool]) -> bool:
        """``step``, which says whether the schedule is executed then."""
        try:
            if not step():
                return False
        except BaseException as error:
            self.endpoint.fail(error, self._requests.receives, self, *self._memory)
        self.is_done = True
        self._memory = ()
        self.count_done(1)
        return True

    def count_done(self, times: int) -> None:
        """So often it was executed."""
        self._requests.count_done(times)

    @property
    def messages(self) -> _native.BoundMessages:
        """For native code, until this is closed; only where `Endpoint.functions` are."""
        assert self._native is not None
        return self._native.messages

    def close(self) -> None:
        """Give the requests back to MPI."""
        if self._native is not None:
            self._native.messages.close()
        self._requests.free()

    def _phases(self, schedule: Schedule, buf: Buffer, scratch: int, slot_bytes: int) -> Iterator[Phase]:
        # Receives that need not wait for a send, up to the first that must: those of one rank have to keep their order.
        ready = [piece.fold is not None or piece.after == 0 for piece in schedule.arriving]
        posted = [*ready, False].index(False)
        yield Phase(self._requests.receives[:posted], [], first_scale(schedule, buf))
        sent = left = 0
        for index, piece in enumerate(schedule.arriving):
            starts = []
            while sent < len(schedule.outgoing) and schedule.outgoing[sent].after <= index:
                starts.append(self._requests.sends[sent])
                sent += 1
            receive = self._requests.receives[index]
            waits = self._leaving(schedule, left, piece.after)
            left = max(left, piece.after)
            if index >= posted:
                yield Phase(starts, waits, [])
                starts, waits = [receive], []
            reductions = additions(piece, buf, slot(scratch, index, slot_bytes))
            yield Phase(starts, [Wait(receive, piece.source), *waits], reductions)
        yield Phase(self._requests.sends[sent:], self._leaving(schedule, left, len(schedule.outgoing)), [])

    def _leaving(self, schedule: Schedule, first: int, last: int) -> list[Wait]:
        return [Wait(self._requests.sends[index], schedule.outgoing[index].to) for index in range(first, last)]


class BoundSchedules:
    """Those of one endpoint, by what was called; a schedule is bound when it is called the second time."""

    def __init__(self, endpoint: Endpoint, scratch: int, slot_bytes: int) -> None:
        self._endpoint = endpoint
        self._scratch = scratch
        self._slot_bytes = slot_bytes
        self._once: set[Hashable] = set()  # what was called and is not bound
        self._schedules: dict[Hashable, BoundSchedule] = {}
        self._pipelines: dict[Hashable, BoundPipeline] = {}
        self._messages = 0  # of all that is bound
        self.get = self._schedules.get
        self.pipeline = self._pipelines.get

    def called(self, call: Hashable, schedule: Schedule, buf: Buffer) -> None:
        """``call``, in which the address of ``buf`` is named, took ``schedule``."""
        fits = BoundSchedule.fits(schedule)
        if not fits and (self._endpoint.functions is None or _messages_of(schedule) > _MOST_MESSAGES):
            return
        if call not in self._once:
            if len(self._once) >= _MOST:
                self._once.clear()
            self._once.add(call)
            return
        self._once.remove(call)
        if fits:
            self.bind(call, schedule, buf)
        else:
            self._make_room(schedule)
            pipeline = BoundPipeline(schedule, buf, self._endpoint, self._scratch, self._slot_bytes)
            self._pipelines[call] = pipeline

    def bind(self, call: Hashable, schedule: Schedule, buf: Buffer) -> BoundSchedule:
        """``schedule``, which fits, for ``call``."""
        self._make_room(schedule)
        bound = BoundSchedule(schedule, buf, self._endpoint, self._scratch, self._slot_bytes)
        self._schedules[call] = bound
        return bound

    def _make_room(self, schedule: Schedule) -> None:
        bound = len(self._schedules) + len(self._pipelines)
        if bound >= _MOST or self._messages + _messages_of(schedule) > _MOST_MESSAGES:
            self.close()
        self._messages += _messages_of(schedule)

    def close(self) -> None:
        """Forget all, and give their requests back to MPI."""
        for schedule in self._schedules.values():
            schedule.close()
        for pipeline in self._pipelines.values():
            pipeline.close()
        self._schedules.clear()
        self._pipelines.clear()
        self._messages = 0


def _messages_of(schedule: Schedule) -> int:
    return len(schedule.outgoing) + len(schedule.arriving)
