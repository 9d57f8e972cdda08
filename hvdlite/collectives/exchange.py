"""What an alltoall runs on: every rank has bytes for each. And what ranks must know of one another before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdlite.counters import Traffic


class Exchange(Protocol):
    """Between the ranks of a world."""

    @property
    def traffic(self) -> Traffic:
        """What this rank has exchanged with others, of its own node too."""

    def tell(self, numbers: Sequence[int], label: str) -> Sequence[Sequence[int]]:
        """The ``numbers`` of all ranks, by rank; each has as many."""

    def exchange(
        self, source: int, target: int, sent: Sequence[int], received: Sequence[int], label: str, owner: object
    ) -> None:
        """Send sent[r] bytes to each rank r, and receive received[s] from each rank s.

        Args:
            source: where the bytes to send lie, in the order of ranks.
            target: where the received ones go, likewise; does not overlap ``source``.
            owner: kept alive with the memory if the exchange fails.
        """
