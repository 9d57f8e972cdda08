"""How ranks of a process group connect to one another for messages: in a node by unix sockets, across by TCP."""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdlite.distributed.reach import Proof, reaches
from hvdlite.links.dial import Address, Dial
from hvdlite.links.interfaces import select
from hvdlite.links.proof import Secret, new_key
from hvdlite.links.reception import Hearing, listen_at
from hvdlite.links.wire import process_of

_CLAIM = struct.Struct("<I?Q")  # the rank that comes, whether it sends messages, where its `Proof` is
_BACKLOG = 4096


@dataclass(frozen=True)
class Door:
    """Where a rank can be reached: ``addresses`` by ranks of other nodes. Who comes must know ``key``."""

    name: str
    addresses: tuple[Address, ...]
    key: bytes

    @property
    def secret(self) -> Secret:
        return Secret(self.key, b"messages", _CLAIM.size)


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
    """Behind this rank's door. Ranks that come wait there until they are heard.

    Attributes:
        proof: of the key to the door.

    Raises:
        StartupError: no address for other nodes can be listened at.
    """

    def __init__(self, interfaces: str, *, from_other_nodes: bool) -> None:
        name, key = f"\0hvdlite-{secrets.token_hex(16)}", new_key()
        self.proof = Proof(key)
        self._listeners = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)]
        self._onlookers: list[socket.socket] = []  # closed with the door, which is all that they are for
        try:
            self._listeners[0].bind(name)
            self._listeners[0].listen(_BACKLOG)
            if from_other_nodes:
                chosen = [address for interface in select(interfaces) for address in interface.addresses]
                self._listeners += listen_at(chosen, _BACKLOG)
        except BaseException:
            self.close()
            raise
        self.door = Door(name, tuple(listener.getsockname()[:2] for listener in self._listeners[1:]), key)

    def hear(self, welcome: Callable[[Guest], None], ranks: int) -> Hearing:
        """What has those who come call ``welcome``, if they come to send messages, and are one of so many ``ranks``."""

        def admit(link: socket.socket, claim: bytes, session: bytes) -> bool:
            rank, sends, proof = _CLAIM.unpack(claim)
            if rank >= ranks:
                return False
            link.setblocking(False)
            if sends:
                welcome(Guest(rank, link, proof))
            else:
                self._onlookers.append(link)
            return True

        return Hearing(self._listeners, self.door.secret, admit)

    def close(self) -> None:
        for end in (*self._listeners, *self._onlookers):
            end.close()


def dial(door: Door, rank: int, *, is_near: bool, proof: Proof | None) -> Dial:
    """A connection of ``rank`` to the one behind ``door``.

    Args:
        is_near: both are on one node.
        proof: this rank's, if messages go there; None: the link only shows when the other rank leaves.

    Raises:
        OSError: this process cannot have sockets now.
    """
    addresses: Sequence[str | Address] = [door.name] if is_near else door.addresses
    return Dial(addresses, door.secret, _CLAIM.pack(rank, proof is not None, 0 if proof is None else proof.address))
