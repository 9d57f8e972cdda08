"""A short schedule bound to its memory, for messages so small that Python would take longer than the network.

What a `Pipeline` finds out anew each time is written down once: persistent requests, and the arguments of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from hvdlite import _native
from hvdlite.collectives.schedule import WINDOW, ReduceCall, Schedule, additions, first_scale
from hvdlite.memory.views import Buffer

if TYPE_CHECKING:
    from hvdlite.collectives.requests import Endpoint

_MOST = 256  # bound schedules of an endpoint


_Wait = tuple[Callable[[], bool], int]
"""(whether a request is done, the rank at its other end)."""


class _Phase(NamedTuple):
    """Start requests; wait for some; reduce."""

    starts: list[Callable[[], None]]
    waits: list[_Wait]
    reductions: list[ReduceCall]


class BoundSchedule:
    """A schedule that `fits`, on the memory of ``buf``; it may be run again and again.

    Args:
        scratch: address of `WINDOW` slots of ``slot_bytes``, each at least a piece.

    Attributes:
        endpoint: of which its messages are.
    """

    def __init__(self, schedule: Schedule, buf: Buffer, endpoint: Endpoint, scratch: int, slot_bytes: int) -> None:
        itemsize = buf.dtype.itemsize
        self.endpoint = endpoint
        self._sends = [
            endpoint.bind_send(buf.address + start * itemsize, (stop - start) * itemsize, to)
            for to, start, stop, _ in schedule.outgoing
        ]
        self._receives = [
            endpoint.bind_receive(
                buf.address + start * itemsize if fold is None else scratch + index * slot_bytes,
                (stop - start) * itemsize,
                source,
            )
            for index, (source, start, stop, fold, _) in enumerate(schedule.arriving)
        ]
        self._bytes_sent = itemsize * sum(piece.stop - piece.start for piece in schedule.outgoing)
        self._bytes_received = itemsize * sum(piece.stop - piece.start for piece in schedule.arriving)
        # Receives that need not wait for a send, up to the first that must: those of one rank have to keep their order.
        ready = [piece.fold is not None or piece.after == 0 for piece in schedule.arriving]
        self._posted = self._receives[: [*ready, False].index(False)]
        phases = [_Phase([], [], first_scale(schedule, buf)), *self._bind(schedule, buf, scratch, slot_bytes)]
        self._phases = [phase for phase in phases if any(phase)]
        self._steps: Iterator[_Wait] = iter(())
        self._awaited: _Wait | None = None
        self._memory: tuple[object, ...] = ()

    @staticmethod
    def fits(schedule: Schedule) -> bool:
        return max(len(schedule.outgoing), len(schedule.arriving)) <= WINDOW

    def run(self, name: str, label: str, *memory: object) -> None:
        """Execute the schedule as an operation; see `Endpoint.operation`. Raises like `Endpoint.until`."""
        self.start(name, label, *memory)
        try:
            while self._awaited is not None:
                self.endpoint.until(*self._awaited)
                self._go_on()
        except BaseException as error:
            self.endpoint.fail(error, self._receives, self, *memory)

    def start(self, name: str, label: str, *memory: object) -> None:
        """Begin it: send what depends on nothing. `advance` does the rest. Raises like `Endpoint.until`."""
        self.endpoint.begin(name, label)
        self._memory = memory
        self._steps = self._execute()
        try:
            self._go_on()
        except BaseException as error:
            self.endpoint.fail(error, self._receives, self, *memory)

    def advance(self) -> bool:
        """Do what need not wait; whether the schedule is executed. Raises like `Endpoint.until`."""
        try:
            while self._awaited is not None and self._awaited[0]():
                self._go_on()
        except BaseException as error:
            self.endpoint.fail(error, self._receives, self, *self._memory)
        return self._awaited is None

    @property
    def peer(self) -> int:
        """Whom it waits for."""
        assert self._awaited is not None
        return self._awaited[1]

    def _go_on(self) -> None:
        self._awaited = next(self._steps, None)
        if self._awaited is None:
            self._memory = ()
            traffic = self.endpoint.traffic
            traffic.messages_sent += len(self._sends)
            traffic.bytes_sent += self._bytes_sent
            traffic.messages_received += len(self._receives)
            traffic.bytes_received += self._bytes_received

    def _execute(self) -> Iterator[_Wait]:
        """Yields what is not there yet, and goes on once it is."""
        reduce = _native.reduce
        for receive in self._posted:
            receive.Start()
        for starts, waits, reductions in self._phases:
            for start in starts:
                start()
            for wait in waits:
                if not wait[0]():
                    yield wait
            for reduction in reductions:
                reduce(*reduction)

    def close(self) -> None:
        """Give the requests back to MPI."""
        for request in (*self._sends, *self._receives):
            request.Free()

    def _bind(self, schedule: Schedule, buf: Buffer, scratch: int, slot_bytes: int) -> Iterator[_Phase]:
        sent = left = 0
        for index, piece in enumerate(schedule.arriving):
            starts = []
            while sent < len(schedule.outgoing) and schedule.outgoing[sent].after <= index:
                starts.append(self._sends[sent].Start)
                sent += 1
            receive = self._receives[index]
            waits = self._leaving(schedule, left, piece.after)
            left = max(left, piece.after)
            if index >= len(self._posted):
                yield _Phase(starts, waits, [])
                starts, waits = [receive.Start], []
            reductions = additions(piece, buf, scratch + index * slot_bytes)
            yield _Phase(starts, [(receive.Test, piece.source), *waits], reductions)
        rest = [request.Start for request in self._sends[sent:]]
        yield _Phase(rest, self._leaving(schedule, left, len(schedule.outgoing)), [])

    def _leaving(self, schedule: Schedule, first: int, last: int) -> list[_Wait]:
        return [(self._sends[index].Test, schedule.outgoing[index].to) for index in range(first, last)]


class BoundSchedules:
    """Those of one endpoint, by what was called; a schedule is bound when it is called the second time."""

    def __init__(self, endpoint: Endpoint, scratch: int, slot_bytes: int) -> None:
        self._endpoint = endpoint
        self._scratch = scratch
        self._slot_bytes = slot_bytes
        self._schedules: dict[Hashable, BoundSchedule | None] = {}  # None: called once
        self.get = self._schedules.get

    def called(self, call: Hashable, schedule: Schedule, buf: Buffer) -> None:
        """``call``, in which the address of ``buf`` is named, took ``schedule``."""
        if not BoundSchedule.fits(schedule):
            return
        if call in self._schedules:
            self.bind(call, schedule, buf)
            return
        self._make_room()
        self._schedules[call] = None

    def bind(self, call: Hashable, schedule: Schedule, buf: Buffer) -> BoundSchedule:
        """``schedule``, which fits, for ``call``."""
        self._make_room()
        bound = BoundSchedule(schedule, buf, self._endpoint, self._scratch, self._slot_bytes)
        self._schedules[call] = bound
        return bound

    def _make_room(self) -> None:
        if len(self._schedules) >= _MOST:
            self.close()

    def close(self) -> None:
        """Forget all, and give their requests back to MPI."""
        for schedule in self._schedules.values():
            if schedule is not None:
                schedule.close()
        self._schedules.clear()
