"""The tree of node leaders over MPI: bytes to and from the parent and the children, without blocking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 1


class Tree:
    """This node's links in the tree.

    Args:
        comm: private to the coordinator thread; one rank per node, rank = node index. None where there is one
            node, or where this rank does not lead its node.
    """

    def __init__(self, comm: MPI.Comm | None, parent: int | None, children: tuple[int, ...]) -> None:
        self.parent = parent
        self.children = children
        self._comm = comm
        self._sending: list[tuple[Any, bytes]] = []

    @property
    def has_links(self) -> bool:
        """Whether messages may come that only a look at MPI shows."""
        return self._comm is not None

    def send(self, node_index: int, data: bytes) -> None:
        """Send to a neighbour; messages keep their order."""
        assert self._comm is not None
        self._sending.append((self._comm.Isend(data, dest=node_index, tag=_TAG), data))

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """(node index, bytes) of whatever has arrived."""
        if self._comm is None:
            return
        from mpi4py import MPI

        self._sending = [(request, data) for request, data in self._sending if not request.Test()]
        status = MPI.Status()
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, _TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv(data)
            yield status.Get_source(), bytes(data)

    def close(self) -> None:
        if self._comm is not None:
            self._comm.Free()
            self._comm = None
