"""The messages of a schedule that comes again, as MPI's persistent requests on its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlite import _native
from hvdlite.collectives.schedule import WINDOW, Schedule
from hvdlite.memory.views import Buffer
from hvdlite.naps import FIRST_NAP_S, LONGEST_NAP_S

if TYPE_CHECKING:
    from hvdlite.collectives.requests import Endpoint

_TURN_US = 50_000  # in native code, before Python looks at whether the job has failed
_LONGEST_NAP_US = round(1e6 * LONGEST_NAP_S)


class BoundRequests:
    """Those of ``schedule`` on the memory of ``buf``.

    Args:
        scratch: address of `WINDOW` slots of ``slot_bytes``, each at least a piece.

    Attributes:
        sends: one for each piece that goes out.
        receives: one for each that arrives; piece i in place, or, if it is to be folded, in slot i % `WINDOW`.
    """

    def __init__(self, schedule: Schedule, buf: Buffer, endpoint: Endpoint, scratch: int, slot_bytes: int) -> None:
        itemsize = buf.dtype.itemsize
        self.sends = [
            endpoint.bind_send(buf.address + start * itemsize, (stop - start) * itemsize, to)
            for to, start, stop, _ in schedule.outgoing
        ]
        self.receives = [
            endpoint.bind_receive(
                buf.address + start * itemsize if fold is None else slot(scratch, index, slot_bytes),
                (stop - start) * itemsize,
                source,
            )
            for index, (source, start, stop, fold, _) in enumerate(schedule.arriving)
        ]
        self._bytes_sent = itemsize * sum(piece.stop - piece.start for piece in schedule.outgoing)
        self._bytes_received = itemsize * sum(piece.stop - piece.start for piece in schedule.arriving)
        self._endpoint = endpoint

    def count_done(self, times: int) -> None:
        """All have been through, so often."""
        traffic = self._endpoint.traffic
        traffic.messages_sent += times * len(self.sends)
        traffic.bytes_sent += times * self._bytes_sent
        traffic.messages_received += times * len(self.receives)
        traffic.bytes_received += times * self._bytes_received

    def free(self) -> None:
        """Give them back to MPI."""
        for request in (*self.sends, *self.receives):
            request.Free()


def slot(scratch: int, index: int, slot_bytes: int) -> int:
    """The address of what is received as piece ``index`` and added."""
    return scratch + index % WINDOW * slot_bytes


def is_done(progress: int, native: _native.BoundMessages | _native.BoundPipeline) -> bool:
    """Whether ``native`` has come to its end, by what a call of it has returned. Raises MPI.Exception."""
    if progress == _native.BoundMessages.FAILED:
        from mpi4py import MPI  # to import it starts MPI

        raise MPI.Exception(native.error)
    return progress == _native.BoundMessages.DONE


def complete(native: _native.BoundMessages | _native.BoundPipeline, endpoint: Endpoint) -> None:
    """Return once all that ``native`` has started is done. Raises MPI.Exception, and like `Endpoint.until`."""

    def work() -> bool:
        return is_done(native.work(endpoint.polite_look, _TURN_US, _LONGEST_NAP_US), native)

    while not work():
        moved, peer = native.moved, native.peer
        endpoint.until(lambda: work() or native.moved != moved, peer, FIRST_NAP_S)  # noqa: B023 (called here)
