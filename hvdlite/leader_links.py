"""TCP connections between node leaders, for the sentinel, over whichever network works.

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
from collections.abc import Sequence

from hvdlite.errors import StartupError

_HELLO = struct.Struct("<16sII")  # token of the job, node index of the sender, node index of the receiver
_RETRY_S = 0.2

Address = tuple[str, int]


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
        """The connections by node index of the child, once all are there or the time is over; closes the listener."""
        assert self._thread is not None
        self._thread.join()
        self._socket.close()
        return self._links

    def _accept(self, token: bytes, node_index: int, children: frozenset[int], deadline_s: float) -> None:
        self._socket.settimeout(_RETRY_S)
        while len(self._links) < len(children) and time.monotonic() < deadline_s:
            try:
                link, _ = self._socket.accept()
            except TimeoutError:
                continue
            link.settimeout(2.0)
            try:
                hello = _HELLO.unpack(link.recv(_HELLO.size, socket.MSG_WAITALL))
                if hello[0] != token or hello[2] != node_index or hello[1] not in children:
                    raise OSError("not one of ours")
                link.sendall(_HELLO.pack(token, node_index, hello[1]))
            except (OSError, struct.error):
                link.close()
                continue
            self._links[hello[1]] = link


def connect(
    addresses: Sequence[Address], token: bytes, node_index: int, parent: int, deadline_s: float
) -> socket.socket:
    """A connection to leader ``parent`` by whichever of its addresses answers first.

    Raises:
        StartupError: none answered in time; lists what was tried.
    """
    while time.monotonic() < deadline_s:
        link = _first_that_proves_itself(addresses, token, node_index, parent, deadline_s)
        if link is not None:
            return link
        time.sleep(_RETRY_S)
    tried = ", ".join(f"{host}:{port}" for host, port in addresses)
    raise StartupError(
        f"node {node_index} cannot reach node {parent} at any of its addresses ({tried}). Name an interface that "
        "connects the hosts in HVDLITE_NETWORK_INTERFACES, and check firewalls between them."
    )


def _first_that_proves_itself(
    addresses: Sequence[Address], token: bytes, node_index: int, parent: int, deadline_s: float
) -> socket.socket | None:
    with selectors.DefaultSelector() as selector:
        trying: set[socket.socket] = set()
        try:
            for address in addresses:
                link = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                if link.connect_ex(address) in (0, errno.EINPROGRESS):
                    trying.add(link)
                    selector.register(link, selectors.EVENT_WRITE)
                else:
                    link.close()
            while trying:
                ready = selector.select(max(0.0, min(5.0, deadline_s - time.monotonic())))
                if not ready:
                    return None
                for key, _ in ready:
                    link = key.fileobj  # type: ignore[assignment]
                    selector.unregister(link)
                    trying.discard(link)
                    if _proves_itself(link, token, node_index, parent):
                        return link
                    link.close()
            return None
        finally:
            for link in trying:
                link.close()


def _proves_itself(link: socket.socket, token: bytes, node_index: int, parent: int) -> bool:
    if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0:
        return False
    link.settimeout(2.0)
    try:
        link.sendall(_HELLO.pack(token, node_index, parent))
        reply = link.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return False
    return reply == _HELLO.pack(token, parent, node_index)
