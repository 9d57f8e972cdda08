"""What the ranks of a node tell one another, and give with it if that is little: in one step, where all see both."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite import _native
from hvdlite.collectives.node_waits import NodeWaits
from hvdlite.memory.packets import Piece


class NodeGather:
    """By way of ``places``, one of each rank, which other operations use as well.

    Args:
        exchange: by which the ranks give each other what is more.

    Attributes:
        native: for what does the same without Python.
    """

    def __init__(self, places: _native.PlacesInTurn, exchange: _native.OrderedExchange, waits: NodeWaits) -> None:
        self.native = _native.SmallGather(places)
        self._places = places
        self._exchange = exchange
        self._waits = waits

    def takes(self, width: int) -> bool:
        """Whether there is room for ``width`` numbers of a rank."""
        return width <= self.native.most_numbers

    def room(self, width: int) -> int:
        """Bytes for which there is room beside them."""
        return self.native.room(width)

    def late(self) -> list[int]:
        """Ranks of the node for which this one has waited in vain, here or in what followed."""
        return self._places.late() or self._exchange.late()

    def tell(self, numbers: Sequence[int], pieces: Sequence[Piece], label: str) -> list[list[int]]:
        """The ``numbers`` of all ranks, by rank; each has as many.

        Args:
            pieces: what this rank gives, if there is room for all of it.

        Raises:
            CollectiveError: some rank did not come.
        """
        status, told = self.native.run(numbers, pieces, self._waits.timeout_s)
        self._waits.expect_ok(status, "exchange of sizes", label, self._places)
        return told

    def read(self, target: int, pieces: Sequence[Piece]) -> None:
        """Put one piece of each rank's bytes after the other at ``target``; a piece begins somewhere in these."""
        self.native.read(target, pieces)
