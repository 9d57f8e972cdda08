"""A long schedule bound to its memory: what a `Pipeline` does, without Python.

Between two pieces Python would need the interpreter, which a main thread that is busy in it gives back every 5 ms only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlite import _native
from hvdlite.collectives.bound_requests import BoundRequests, complete, is_done, slot
from hvdlite.collectives.schedule import WINDOW, Schedule, additions, first_scale
from hvdlite.memory.views import Buffer

if TYPE_CHECKING:
    from hvdlite.collectives.requests import Endpoint


class BoundPipeline:
    """The execution of ``schedule`` on the memory of ``buf``, again and again; `Endpoint.functions` are known.

    Args:
        scratch: as of `BoundRequests`, used from `start` until `finish` has returned.

    Attributes:
        receives: requests that are not awaited any more once it has failed.
    """

    def __init__(self, schedule: Schedule, buf: Buffer, endpoint: Endpoint, scratch: int, slot_bytes: int) -> None:
        assert endpoint.functions is not None
        self._endpoint = endpoint
        self._requests = BoundRequests(schedule, buf, endpoint, scratch, slot_bytes)
        self._native = _native.BoundPipeline(
            *endpoint.functions,
            first_scale(schedule, buf),
            [
                (endpoint.address_of(request), piece.to, piece.after)
                for request, piece in zip(self._requests.sends, schedule.outgoing, strict=True)
            ],
            [
                (
                    endpoint.address_of(request),
                    piece.source,
                    piece.after,
                    piece.fold is not None,
                    additions(piece, buf, slot(scratch, index, slot_bytes)),
                )
                for index, (request, piece) in enumerate(zip(self._requests.receives, schedule.arriving, strict=True))
            ],
            WINDOW,
        )
        self.receives = self._requests.receives
        self._is_under_way = False

    def start(self) -> None:
        """Put the first pieces on their way. Raises MPI.Exception."""
        self._is_under_way = True
        is_done(self._native.start(), self._native)

    def finish(self) -> None:
        """Return once all is done. Raises like `Endpoint.until`."""
        complete(self._native, self._endpoint)
        self._requests.count_done(1)
        self._is_under_way = False

    def close(self) -> None:
        """Give the requests back to MPI, but where messages are on their way, as after a failure: it keeps those."""
        if not self._is_under_way:
            self._requests.free()
