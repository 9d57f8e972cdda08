"""What targets are made of."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hvdlite.links.proof import Secret

Target = Callable[[bytes], None]
KEY = bytes(range(32))
SECRET = Secret(KEY, b"fuzz", 8)


class Fuzzed(NamedTuple):
    take: Target
    seeds: list[bytes]


def parts(data: bytes) -> Iterator[bytes]:
    """``data`` in pieces, of lengths that its own bytes say."""
    start = 0
    while start < len(data):
        end = start + 1 + data[start] % 37
        yield data[start:end]
        start = end


@contextmanager
def said_to(data: bytes) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection over which ``data`` has come, and no more will; and its other end."""
    own, other = socket.socketpair()
    with own, other:
        other.sendall(data[: 1 << 14])
        other.shutdown(socket.SHUT_WR)
        yield own, other


def answers_to(other: socket.socket) -> bytes:
    """All that was said to the other end, which has hung up."""
    try:
        return other.recv(1 << 20)
    except ConnectionResetError:  # the first word, where not all that it has sent was read
        return other.recv(1 << 20)
