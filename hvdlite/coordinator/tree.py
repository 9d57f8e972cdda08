"""The tree of node leaders over MPI: bytes to and from the parent and the children, without blocking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hvdlite.counters import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 1
_NOTHING_MORE = b""  # no other message is empty
_CLOSING_S = 1e-3


class Tree:
    """This node's links in the tree.

    Args:
        comm: private to the coordinator thread; one rank per node, rank = node index. None where there is one
            node, or where this rank does not lead its node.
    """

    def __init__(self, comm: MPI.Comm | None, parent: int | None, children: tuple[int, ...]) -> None:
        self.parent = parent
        self.children = children
        self.traffic = Traffic()
        self._comm = comm
        self._sending: list[tuple[Any, bytes]] = []
        self._silent: set[int] = set()  # neighbours that will send nothing more

    @property
    def has_links(self) -> bool:
        """Whether messages may come that only a look at MPI shows."""
        return self._comm is not None

    def send(self, node_index: int, data: bytes) -> None:
        """Send to a neighbour; messages keep their order."""
        assert self._comm is not None
        self._sending.append((self._comm.Isend(data, dest=node_index, tag=_TAG), data))
        self.traffic.sent(len(data))

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
            self.traffic.received(len(data))
            if data == _NOTHING_MORE:
                self._silent.add(status.Get_source())
            else:
                yield status.Get_source(), bytes(data)

    def close(self, check: Callable[[], None]) -> None:
        """Free the communicator; collective. ``check`` raises if the job fails meanwhile.

        First the neighbours tell one another that nothing more will come: a message that nobody has received would
        turn up in whatever communicator MPI gives the same context to later.
        """
        if self._comm is None:
            return
        neighbours = {*self.children} if self.parent is None else {*self.children, self.parent}
        for node_index in neighbours:
            self.send(node_index, _NOTHING_MORE)
        while self._sending or self._silent != neighbours:
            check()
            for _ in self.receive():
                pass
            time.sleep(_CLOSING_S)
        self._comm.Free()
        self._comm = None
