"""Alltoall between nodes, over MPI point-to-point; inside a node MPI copies through its own shared memory then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from hvdlite import _native
from hvdlite.collectives.base import LARGEST_MESSAGE_BYTES
from hvdlite.collectives.requests import Endpoint
from hvdlite.counters import Traffic
from hvdlite.recorder import Lane, Recorder

if TYPE_CHECKING:
    from mpi4py import MPI


class PairwiseExchange:
    """A `hvdlite.collectives.exchange.Exchange` between the ranks of ``comm``.

    Args:
        comm: private to the thread that calls.
        ranks: what errors call the ranks of ``comm``.
        timeout_s: the longest wait for one message.
        check: raises once the job has failed.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        ranks: Sequence[int],
        *,
        timeout_s: float,
        check: Callable[[], None],
        recorder: Recorder,
    ) -> None:
        self._endpoint = Endpoint(comm, ranks=ranks, timeout_s=timeout_s, check=check)
        self._teller = Endpoint(comm, ranks=ranks, timeout_s=timeout_s, check=check)  # whose traffic is nobody's data
        self._recorder = recorder

    @property
    def traffic(self) -> Traffic:
        """See `hvdlite.collectives.exchange.Exchange`."""
        return self._endpoint.traffic

    def tell(self, numbers: Sequence[int], label: str) -> Sequence[Sequence[int]]:
        """See `hvdlite.collectives.exchange.Exchange`.

        In ceil(log2(n)) steps, each of which doubles what a rank knows of those behind it (Bruck et al. 1997,
        doi:10.1109/71.642949).
        """
        teller, rank, size = self._teller, self._endpoint.rank, self._endpoint.size
        known = np.empty((size, len(numbers)), np.int64)  # row d is of the rank d behind
        known[0] = numbers
        with teller.operation("exchange of sizes", label, known):
            distance = 1
            while known.nbytes and distance < size:
                count = min(distance, size - distance)
                ahead, behind = (rank + distance) % size, (rank - distance) % size
                arriving, leaving = known[distance : distance + count], known[:count]
                incoming = teller.receive(arriving.ctypes.data, arriving.nbytes, behind)
                outgoing = teller.send(leaving.ctypes.data, leaving.nbytes, ahead)
                teller.wait(behind, incoming)
                teller.wait(ahead, outgoing)
                distance *= 2
        return known[[(rank - other) % size for other in range(size)]].tolist()  # type: ignore[no-any-return]

    def exchange(
        self, source: int, target: int, sent: Sequence[int], received: Sequence[int], label: str, owner: object
    ) -> None:
        """See `hvdlite.collectives.exchange.Exchange`.

        n - 1 steps; in step i to the rank i ahead, from the rank i behind, so every rank is in one pair of messages at
        a time (Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521).
        """
        rank, size = self._endpoint.rank, self._endpoint.size
        departures = [*accumulate(sent, initial=source)]
        arrivals = [*accumulate(received, initial=target)]
        with self._recorder.span(Lane.ALLTOALL, label, sum(sent)):
            _native.copy(arrivals[rank], departures[rank], sent[rank])
            with self._endpoint.operation("alltoall", label, owner):
                for distance in range(1, size):
                    ahead, behind = (rank + distance) % size, (rank - distance) % size
                    incoming = [
                        self._endpoint.receive(address, length, behind)
                        for address, length in _messages(arrivals[behind], received[behind])
                    ]
                    outgoing = [
                        self._endpoint.send(address, length, ahead)
                        for address, length in _messages(departures[ahead], sent[ahead])
                    ]
                    self._endpoint.wait(behind, *incoming)
                    self._endpoint.wait(ahead, *outgoing)


def _messages(address: int, nbytes: int) -> list[tuple[int, int]]:
    """(address, bytes) of each message that ``nbytes`` take."""
    return [
        (address + start, min(LARGEST_MESSAGE_BYTES, nbytes - start))
        for start in range(0, nbytes, LARGEST_MESSAGE_BYTES)
    ]
