"""How ranks of a process group connect to one another for messages: in a node by unix sockets, across by TCP."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdlite.distributed.reach import Proof, reaches
from hvdlite.interfaces import select
from hvdlite.wire import is_ours, process_of, read_exactly

_HELLO = struct.Struct("<16sI?Q")  # the key to the door, the rank that comes, whether it sends messages, its proof
_TRY_S = 5.0


@dataclass(frozen=True)
class Door:
    """Where a rank can be reached; ``addresses`` by ranks of other nodes."""

    name: str
    port: int
    addresses: tuple[str, ...]
    key: bytes


class Guest(NamedTuple):
    """A rank that has come to send messages over ``link``; its `Proof` is at the address ``proof``."""

    rank: int
    link: socket.socket
    proof: int

    def process_with(self, key: bytes) -> int | None:
        """The process whose memory this one may read, if its proof is ``key``, that of the rank's own door."""
        if self.link.family != socket.AF_UNIX:
            return None
        process = process_of(self.link)
        return process if reaches(process, self.proof, key) else None


class Entrance:
    """Behind this rank's door. Ranks that come wait there until they are let in.

    Attributes:
        proof: of the key to the door.
    """

    def __init__(self, interfaces: str, *, from_other_nodes: bool) -> None:
        name = f"\0hvdlite-{secrets.token_hex(16)}"
        self._key = secrets.token_bytes(16)
        self.proof = Proof(self._key)
        self.sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)]
        self.sockets[0].bind(name)
        self.sockets[0].listen(4096)
        self.door = Door(name, 0, (), self._key)
        if from_other_nodes:
            self.sockets.append(socket.create_server(("0.0.0.0", 0), backlog=4096))
            port = self.sockets[1].getsockname()[1]
            addresses = tuple(interface.address for interface in select(interfaces))
            self.door = Door(name, port, addresses, self._key)
        for listener in self.sockets:
            listener.setblocking(False)

    def admit(self, listener: socket.socket) -> Guest | None:
        """Who comes; None where it is none of ours, or comes only to see when we leave."""
        link, _ = listener.accept()
        try:
            link.settimeout(_TRY_S)
            if link.family == socket.AF_UNIX and not is_ours(link):
                raise ConnectionError("it belongs to another user")
            key, rank, sends, proof = _HELLO.unpack(read_exactly(link, _HELLO.size))
            if not hmac.compare_digest(key, self._key):
                raise ConnectionError("it does not know the key")
        except (OSError, ConnectionError):
            link.close()
            return None
        self.sockets.extend([] if sends else [link])  # closed with the door, which is all that it is for
        return Guest(rank, link, proof) if sends else None

    def close(self) -> None:
        for end in self.sockets:
            end.close()


def connect(door: Door, rank: int, *, is_near: bool, proof: Proof | None = None) -> socket.socket:
    """A link of ``rank`` to the one behind ``door``.

    Args:
        is_near: both are on one node.
        proof: this rank's, if messages go there; otherwise the link only shows when the other rank leaves.

    Raises:
        OSError: it has left.
    """
    link = _first([door.name] if is_near else [(address, door.port) for address in door.addresses])
    link.sendall(_HELLO.pack(door.key, rank, proof is not None, 0 if proof is None else proof.address))
    link.setblocking(False)
    return link


def _first(addresses: Sequence[str | tuple[str, int]]) -> socket.socket:
    """A connection to whichever of ``addresses`` answers first in their order."""
    refusal: OSError = ConnectionError("it has no address")
    for address in addresses:
        is_unix = isinstance(address, str)
        link = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM)
        try:
            link.settimeout(_TRY_S)
            link.connect(address)
            if not is_unix:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link
        except OSError as error:
            link.close()
            refusal = error
    raise refusal
