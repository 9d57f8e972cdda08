"""Executes a schedule: each piece of a buffer is sent on as soon as it is there, and added where it has to be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlite.collectives.adder import Adder
from hvdlite.collectives.base import LATE_GPU
from hvdlite.collectives.schedule import WINDOW, Schedule, additions, first_scale
from hvdlite.memory.views import Buffer

if TYPE_CHECKING:
    from mpi4py import MPI

    from hvdlite._native import Moment
    from hvdlite.collectives.requests import Endpoint

_SHORTEST_NAP_S, _LONGEST_NAP_S = 60e-6, 1e-3  # a shorter one takes as long, by the slack of the kernel's timers


class Pipeline:
    """The execution of a schedule on this rank's copy of ``buf``: how far sends and receives have come.

    Where additions take their time, the host sleeps for those that a message has to wait for, and for no other ones.

    Args:
        scratch: address of `WINDOW` slots of ``slot_bytes``, each at least a piece, in memory of ``adder``; used until
            `finish` returns, or by what ``adder`` has begun until then.

    Attributes:
        receives: none that ``endpoint`` does not know.
    """

    receives: Sequence[MPI.Request] = ()

    def __init__(
        self, schedule: Schedule, buf: Buffer, endpoint: Endpoint, adder: Adder, scratch: int, slot_bytes: int
    ) -> None:
        self._schedule = schedule
        self._outgoing = schedule.outgoing
        self._arriving = schedule.arriving
        self._sent = 0
        self._posted = 0
        self._arrived = 0
        self._added = 0
        self._additions: deque[Moment | None] = deque()  # of what has arrived and may not have been added
        self._sends: deque[MPI.Request] = deque()
        self._receives: deque[MPI.Request] = deque()
        self._buf = buf
        self._address = buf.address
        self._itemsize = buf.dtype.itemsize
        self._endpoint = endpoint
        self._adder = adder
        self._ready: Moment | None = None
        self._scratch = scratch
        self._slot_bytes = slot_bytes
        self._first_arrival_s = 0.0

    def start(self) -> None:
        """Put the first pieces on their way, if nothing still works on the buffer."""
        self._ready = self._adder.begin(first_scale(self._schedule, self._buf))
        if self._ready is None or self._ready.is_reached:
            self._send_ready()
            self._post_receives()

    def finish(self) -> None:
        """Return once the network has done its part, and all additions have begun. Raises like `Endpoint.until`."""
        ready = self._ready
        if ready is not None:
            self._endpoint.doze(lambda: ready.is_reached, LATE_GPU)
        for piece in self._arriving:
            if not self._next_is_here():
                self._settle()
                self._endpoint.until(self._next_is_here, piece.source, self._nap_s())
            self._receives.popleft()
            if self._arrived == 0:
                self._first_arrival_s = time.monotonic()
            self._additions.append(self._adder.add(additions(piece, self._buf, self._slot(self._arrived))))
            self._arrived += 1
        if self._sent < len(self._outgoing):
            self._settle()
        if self._outgoing:
            self._endpoint.until(self._all_is_sent, self._outgoing[-1].to)
        self._adder.end()

    def _settle(self) -> None:
        """Sleep until all is added that has arrived; what may be sent meanwhile is."""
        while self._additions:
            added = self._additions[0]
            if added is not None:
                added.wait()
            self._count_added()
            self._send_ready()

    def _count_added(self) -> None:
        while self._additions and ((added := self._additions[0]) is None or added.is_reached):
            self._additions.popleft()
            self._added += 1

    def _nap_s(self) -> float:
        """How long what has been posted keeps the network busy, with a margin; 0 where nobody knows, or it is short.

        Kernels take in what comes meanwhile. Whoever looks more often takes time from backward and gains none.
        """
        left = len(self._arriving) - self._arrived
        if self._arrived < 2:
            return 0.0
        per_piece_s = (time.monotonic() - self._first_arrival_s) / (self._arrived - 1)
        nap_s = min(per_piece_s * min(left, WINDOW) / 4, _LONGEST_NAP_S)
        return nap_s if nap_s > _SHORTEST_NAP_S else 0.0

    def _next_is_here(self) -> bool:
        self._count_added()
        self._send_ready()
        self._post_receives()
        return (
            bool(self._receives) and self._receives[0].Test() and self._have_left(self._arriving[self._arrived].after)
        )

    def _all_is_sent(self) -> bool:
        self._send_ready()
        return self._have_left(len(self._outgoing))

    def _send_ready(self) -> None:
        while self._sent < len(self._outgoing):
            to, start, stop, after = self._outgoing[self._sent]
            # Not all at once: what the receiver has not asked for yet would be buffered, and so copied, there.
            if after > self._added or not self._have_left(self._sent - WINDOW + 1):
                return
            address, nbytes = self._address + start * self._itemsize, (stop - start) * self._itemsize
            self._sends.append(self._endpoint.send(address, nbytes, to))
            self._sent += 1

    def _have_left(self, count: int) -> bool:
        """Whether the first ``count`` sends are done."""
        while self._sent - len(self._sends) < count:
            if not self._sends or not self._sends[0].Test():
                return False
            self._sends.popleft()
        return True

    def _post_receives(self) -> None:
        while self._posted < min(self._added + WINDOW, len(self._arriving)):
            source, start, stop, fold, after = self._arriving[self._posted]
            if fold is not None:
                address = self._slot(self._posted)
            elif self._have_left(after):
                address = self._address + start * self._itemsize
            else:
                return
            self._receives.append(self._endpoint.receive(address, (stop - start) * self._itemsize, source))
            self._posted += 1

    def _slot(self, index: int) -> int:
        return self._scratch + index % WINDOW * self._slot_bytes
