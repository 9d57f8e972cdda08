"""Stream sockets: who is at the other end, and whole messages."""

from __future__ import annotations

import errno
import os
import socket
import struct

SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What says that a socket cannot be had now, and nothing about who is at its other end."""
_PIECE_BYTES = 1 << 20
SHORTAGE_S = 0.05
"""Between two tries then: a connection that waits to be taken calls again at once, and would take a core."""

CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


def is_ours(link: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket is of this user: abstract names are no secret."""
    return _peer(link)[1] == os.geteuid()


def process_of(link: socket.socket) -> int:
    """The process at the other end of a unix socket."""
    return _peer(link)[0]


def _peer(link: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    process, user, group = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return process, user, group


def read_exactly(link: socket.socket, length: int) -> bytes:
    """The next ``length`` bytes.

    Raises:
        ConnectionError: the other end is gone.
        TimeoutError: that of the socket is over.
    """
    body = bytearray()
    while len(body) < length:  # memory is taken for what comes, not for what a length says
        piece = link.recv(min(length - len(body), _PIECE_BYTES))
        if not piece:
            raise ConnectionError("the other end is gone")
        body += piece
    return bytes(body)
