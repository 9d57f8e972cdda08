"""Alltoall between the ranks of one node: through windows of shared memory, which the receivers read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hvdlite import _native
from hvdlite.collectives.shm import ShmBackend
from hvdlite.counters import Traffic
from hvdlite.memory.views import Buffer
from hvdlite.recorder import Lane, Recorder

_WINDOW_BYTES = 256 << 10  # stays in cache between who writes and who reads


class ShmExchange:
    """A `hvdlite.collectives.exchange.Exchange`.

    What a rank sends to others is a stream, which passes its window piece by piece. There are two windows in turns: a
    rank fills one while others may still read the other, so there is one barrier for each piece. Every rank knows how
    much all others send, and so when which of it is where.

    Args:
        backend: of the node.
        staging: of which it uses the beginning of every rank's copy.
    """

    def __init__(self, backend: ShmBackend, staging: Buffer, recorder: Recorder) -> None:
        self.traffic = Traffic()
        self._backend = backend
        self._rank = backend.rank
        self._copies = staging.copies
        self._window = min(_WINDOW_BYTES, staging.nbytes // 2)
        self._recorder = recorder

    def exchange(self, source: int, target: int, nbytes: Sequence[Sequence[int]], label: str, owner: object) -> None:
        """See `hvdlite.collectives.exchange.Exchange`."""
        rank, size = self._rank, len(nbytes)
        departures = [source + start for start in accumulate(nbytes[rank], initial=0)]
        arrivals = [target + start for start in accumulate((row[rank] for row in nbytes), initial=0)]
        with self._recorder.span(Lane.ALLTOALL, label, sum(nbytes[rank])):
            _native.copy(arrivals[rank], departures[rank], nbytes[rank][rank])
            streams = [_stream(sender, row) for sender, row in enumerate(nbytes)]
            longest = max(stream[-1] for stream in streams)
            others = [(rank + distance) % size for distance in range(1, size)]
            for begin in range(0, longest, self._window):
                end = begin + self._window
                window = (begin // self._window) % 2 * self._window
                own = self._copies[rank] + window
                for receiver in others:
                    start, nbytes_here = _part(streams[rank], receiver, begin, end)
                    if nbytes_here:
                        offset = start - streams[rank][receiver]
                        _native.copy(own + start - begin, departures[receiver] + offset, nbytes_here)
                        self.traffic.sent(nbytes_here)
                self._backend.meet("alltoall", label)
                for sender in others:
                    start, nbytes_here = _part(streams[sender], rank, begin, end)
                    if nbytes_here:
                        offset = start - streams[sender][rank]
                        place = self._copies[sender] + window + start - begin
                        _native.copy(arrivals[sender] + offset, place, nbytes_here)
                        self.traffic.received(nbytes_here)
            if longest:
                self._backend.meet("alltoall", label)  # before which nobody may use the windows for anything else


def _stream(sender: int, nbytes: Sequence[int]) -> list[int]:
    """Where the bytes for each rank begin in what ``sender`` sends to others, and where the last ones end."""
    return list(accumulate((0 if rank == sender else n for rank, n in enumerate(nbytes)), initial=0))


def _part(stream: Sequence[int], receiver: int, begin: int, end: int) -> tuple[int, int]:
    """The bytes for ``receiver`` in [begin, end) of a stream: where they begin there, and how many there are."""
    start, stop = max(begin, stream[receiver]), min(end, stream[receiver + 1])
    return start, max(0, stop - start)
