"""TCP connections between node leaders, for sentinels and coordinators, over whichever network works.

A host may have interfaces that lead nowhere: a management network without a route, a bridge of containers with
the same address everywhere. So a leader publishes all its addresses, its children in the tree try them all at
once, and a connection counts once the other end has proved who it is.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hvdlite.errors import StartupError
from hvdlite.topology import Topology

_HELLO = struct.Struct("<16sII")  # token of the job, node index of the sender, node index of the receiver
_TAKEN = b"\x01"  # the child's last word: this is the connection that it keeps
_TRY_S = 5.0  # how long a round of tries lasts before all addresses are tried anew
_RETRY_S = 0.2
_QUIET_S = 60  # a connection that is silent for longer is probed: what lies between may forget it otherwise

Address = tuple[str, int]


@dataclass(frozen=True)
class Door:
    """Where a leader's `Listener` can be reached."""

    hostname: str
    addresses: list[Address]


def new_token() -> bytes:
    """What the root makes up and every leader must show."""
    return secrets.token_bytes(16)


class Listener:
    """Where the children of ``node_index`` connect. ``port`` is published along with the host's addresses."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("0.0.0.0", 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._links: dict[int, socket.socket] = {}
        self._thread: threading.Thread | None = None

    def accept_children(self, token: bytes, node_index: int, children: Sequence[int], deadline_s: float) -> None:
        """Start taking connections, on a thread of its own: a child may reach us by way of a stranger's address."""
        self._thread = threading.Thread(
            target=self._accept, args=(token, node_index, frozenset(children), deadline_s), daemon=True
        )
        self._thread.start()

    def links(self) -> dict[int, socket.socket]:
        """The connections by node index of the child, once all are there or the time is over."""
        assert self._thread is not None
        self._thread.join()
        return self._links

    def close(self) -> None:
        """Stop listening; the connections stay."""
        self._socket.close()

    def _accept(self, token: bytes, node_index: int, children: frozenset[int], deadline_s: float) -> None:
        """Hear all who connect side by side: one that says nothing holds nobody up.

        A connection counts once its child has said that it keeps it. A child that had to wait may have left and
        connected once more.
        """
        self._socket.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while len(self._links) < len(children) and time.monotonic() < deadline_s:
                for key, _ in selector.select(max(0.0, deadline_s - time.monotonic())):
                    try:
                        if key.data is None:
                            link, _ = self._socket.accept()
                            link.setblocking(False)
                            selector.register(link, selectors.EVENT_READ, bytearray())
                            continue
                        link = key.fileobj  # type: ignore[assignment]
                        if self._hear(link, key.data, token, node_index, children):
                            selector.unregister(link)
                    except OSError:
                        if key.data is not None:
                            _drop(selector, key.fileobj)  # type: ignore[arg-type]
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    _drop(selector, key.fileobj)  # type: ignore[arg-type]

    def _hear(
        self, link: socket.socket, inbox: bytearray, token: bytes, node_index: int, children: frozenset[int]
    ) -> bool:
        """Take what came; whether this is now the link of a child. Never reads beyond the handshake.

        Raises:
            OSError: whoever it is, it is none of ours, or has left.
        """
        wanted = _HELLO.size - len(inbox)
        inbox += _receive(link, wanted if wanted > 0 else len(_TAKEN))
        if len(inbox) < _HELLO.size:
            return False
        shown, child, called = _HELLO.unpack_from(inbox)
        if shown != token or called != node_index or child not in children:
            raise OSError("not one of ours")
        if len(inbox) == _HELLO.size:
            link.send(_HELLO.pack(token, node_index, child))
            return False
        self._links[child] = link
        return True


def connect_tree(
    doors: Sequence[Door], topology: Topology, fanout: int, token: bytes, listener: Listener, deadline_s: float
) -> dict[int, socket.socket]:
    """The connections of this leader to its parent and its children in the tree, by node index.

    Args:
        doors: of all leaders, by node index.
        token: the root's, see `new_token`.
        listener: behind this leader's door.

    Raises:
        StartupError: one of them cannot be reached, or did not come in time.
    """
    own, parent, children = topology.node_index, topology.parent(fanout), topology.children(fanout)
    links: dict[int, socket.socket] = {}
    with ExitStack() as on_failure:
        listener.accept_children(token, own, children, deadline_s)
        on_failure.callback(lambda: close_all((*links.values(), *listener.links().values())))
        if parent is not None:
            links[parent] = connect(doors[parent].addresses, token, own, parent, deadline_s)
        links.update(listener.links())
        for child in children:
            if child not in links:
                raise StartupError(
                    f"node {child} ({doors[child].hostname}) did not connect to node {own} ({doors[own].hostname}) in "
                    "time. Name an interface that connects the hosts in HVDLITE_NETWORK_INTERFACES, or raise "
                    "HVDLITE_START_TIMEOUT."
                )
        on_failure.pop_all()
    for link in links.values():
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET_S)
    return links


def close_all(links: Iterable[socket.socket]) -> None:
    for link in links:
        link.close()


def connect(
    addresses: Sequence[Address], token: bytes, node_index: int, parent: int, deadline_s: float
) -> socket.socket:
    """A connection to leader ``parent`` by whichever of its addresses answers first.

    Raises:
        StartupError: none answered in time; lists what was tried.
    """
    while (now := time.monotonic()) < deadline_s:
        link = _first_that_proves_itself(addresses, token, node_index, parent, min(now + _TRY_S, deadline_s))
        if link is not None:
            return link
        time.sleep(_RETRY_S)
    tried = ", ".join(f"{host}:{port}" for host, port in addresses)
    raise StartupError(
        f"node {node_index} cannot reach node {parent} at any of its addresses ({tried}). Name an interface that "
        "connects the hosts in HVDLITE_NETWORK_INTERFACES, and check firewalls between them."
    )


def _first_that_proves_itself(
    addresses: Sequence[Address], token: bytes, node_index: int, parent: int, until_s: float
) -> socket.socket | None:
    hello, reply = _HELLO.pack(token, node_index, parent), _HELLO.pack(token, parent, node_index)
    with selectors.DefaultSelector() as selector:
        try:
            for address in addresses:
                link = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                if link.connect_ex(address) in (0, errno.EINPROGRESS):
                    selector.register(link, selectors.EVENT_WRITE)
                else:
                    link.close()
            while selector.get_map() and time.monotonic() < until_s:
                for key, _ in selector.select(max(0.0, until_s - time.monotonic())):
                    link = key.fileobj  # type: ignore[assignment]
                    try:
                        if key.data is None:
                            link.send(hello)  # raises if the connection was refused
                            selector.modify(link, selectors.EVENT_READ, bytearray())
                            continue
                        key.data.extend(_receive(link, len(reply) - len(key.data)))
                        if key.data == reply:
                            link.send(_TAKEN)
                            selector.unregister(link)
                            return link
                    except OSError:
                        _drop(selector, link)
            return None
        finally:
            for key in list(selector.get_map().values()):
                _drop(selector, key.fileobj)  # type: ignore[arg-type]


def _receive(link: socket.socket, nbytes: int) -> bytes:
    """What is there, up to ``nbytes``; raises OSError at the end of the stream."""
    data = link.recv(nbytes)
    if not data:
        raise OSError("the other end has closed the connection")
    return data


def _drop(selector: selectors.BaseSelector, link: socket.socket) -> None:
    selector.unregister(link)
    link.close()
