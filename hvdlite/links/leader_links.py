"""TCP connections between node leaders, for sentinels and coordinators, over whichever network works.

A host may have interfaces that lead nowhere: a management network without a route, a bridge of containers with
the same address everywhere. So a leader listens at all addresses of the chosen interfaces, its children in the tree
try them all at once, and a connection counts once both ends have proven that they know the job's key.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from hvdlite.agreement import Ranks, exchange
from hvdlite.errors import StartupError
from hvdlite.links.dial import Address, first_that_proves_itself, listed
from hvdlite.links.interfaces import Interface, select
from hvdlite.links.proof import Secret, new_key
from hvdlite.links.reception import Reception, listen_at
from hvdlite.topology import Topology

_CLAIM = struct.Struct("<II")  # node index of the child, node index of the parent
_TRY_S = 5.0  # how long a round of tries lasts before all addresses are tried anew
_RETRY_S = 0.2
_BACKLOG = 128
_QUIET_S = 60  # a connection that is silent for longer is probed: what lies between may forget it otherwise


@dataclass(frozen=True)
class Door:
    """Where the children of a leader find its `Listener`; it has no addresses where the leader has no children."""

    hostname: str
    addresses: list[Address]


class Listener:
    """Where the children of leader ``node_index`` connect.

    Attributes:
        addresses: those of ``interfaces``, each with a port of its own.

    Raises:
        StartupError: none of the addresses can be listened at.
    """

    def __init__(self, interfaces: Sequence[Interface], key: bytes, node_index: int, children: Sequence[int]) -> None:
        sockets = listen_at([address for interface in interfaces for address in interface.addresses], _BACKLOG)
        self.addresses: list[Address] = [one.getsockname()[:2] for one in sockets]
        self._node_index = node_index
        self._children = frozenset(children)
        self._changed = threading.Condition()  # guards the links
        self._links: dict[int, socket.socket] = {}
        self._reception = Reception(sockets, _secret(key), self._admit)

    def links(self, deadline_s: float) -> dict[int, socket.socket]:
        """The connections by node index of the child, once all are there or the time is over; listens no more."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._links) == len(self._children), max(0.0, deadline_s - time.monotonic())
            )
        self._reception.close()
        links, self._links = self._links, {}
        return links

    def close(self) -> None:
        """Stop listening; connections that `links` has returned stay."""
        self._reception.close()
        close_all(self._links.values())

    def _admit(self, link: socket.socket, claim: bytes, session: bytes) -> bool:
        child, called = _CLAIM.unpack(claim)
        if called != self._node_index or child not in self._children:
            return False
        with self._changed:
            if child in self._links:
                self._links[child].close()  # a child that had to wait has left, and come once more
            self._links[child] = link
            self._changed.notify()
        return True


def connect_leaders(
    ranks: Ranks, leaders: Sequence[int], topology: Topology, fanout: int, spec: str, deadline_s: float
) -> dict[int, socket.socket]:
    """The connections of a leader to its parent and its children in the tree, by node index; none on other ranks.

    Collective over ``ranks``.

    Args:
        leaders: the places of the leaders among ``ranks``, by node index.
        spec: interfaces of this host to listen at, as `select` takes them.

    Raises:
        StartupError: one of them cannot be reached, or did not come in time.
    """
    own, parent, children = topology.node_index, topology.parent(fanout), topology.children(fanout)
    key = exchange(ranks, new_key)[leaders[0]]
    listener: Listener | None = None
    links: dict[int, socket.socket] = {}

    def open_door() -> Door:
        nonlocal listener
        if topology.is_leader and children:
            listener = on_failure.enter_context(closing(Listener(select(spec), key, own, children)))
        return Door(socket.gethostname(), [] if listener is None else listener.addresses)

    def connect_neighbours() -> None:
        if not topology.is_leader:
            return
        if parent is not None:
            links[parent] = connect(doors[leaders[parent]].addresses, key, own, parent, deadline_s)
        if listener is not None:
            links.update(listener.links(deadline_s))
        for child in children:
            if child not in links:
                raise StartupError(
                    f"node {child} ({doors[leaders[child]].hostname}) did not connect to node {own} "
                    f"({socket.gethostname()}) in time. Name an interface that connects the hosts in "
                    "HVDLITE_NETWORK_INTERFACES, or raise HVDLITE_START_TIMEOUT."
                )

    with ExitStack() as on_failure:
        on_failure.callback(lambda: close_all(links.values()))
        doors = exchange(ranks, open_door)
        exchange(ranks, connect_neighbours)
        on_failure.pop_all()
    for link in links.values():
        link.setblocking(True)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET_S)
    return links


def close_all(links: Iterable[socket.socket]) -> None:
    for link in links:
        link.close()


def connect(addresses: Sequence[Address], key: bytes, node_index: int, parent: int, deadline_s: float) -> socket.socket:
    """A connection to leader ``parent`` by whichever of its addresses answers first.

    Raises:
        StartupError: none answered in time; lists what was tried.
    """
    claim = _CLAIM.pack(node_index, parent)
    shortage = ""
    while (now := time.monotonic()) < deadline_s:
        try:
            first = first_that_proves_itself(addresses, _secret(key), claim, min(now + _TRY_S, deadline_s))
            shortage = ""
        except OSError as error:
            first, shortage = None, f"; this host says: {error}"
        if first is not None:
            return first.link
        time.sleep(_RETRY_S)
    raise StartupError(
        f"node {node_index} cannot reach node {parent} at any of its addresses ({listed(addresses)}{shortage}). "
        "Name an interface that connects the hosts in HVDLITE_NETWORK_INTERFACES, and check firewalls between them."
    )


def _secret(key: bytes) -> Secret:
    return Secret(key, b"leader", _CLAIM.size)
