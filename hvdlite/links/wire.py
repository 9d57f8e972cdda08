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
_LIMIT = struct.Struct("@ll")  # struct timeval: seconds, microseconds


def connect_unix(name: str, patience_s: float) -> socket.socket:
    """A connection to the abstract unix socket ``name``, whoever listens there; its time limit is ``patience_s``.

    Any user of the machine can fill the queue of that socket. Who connects with a time limit of Python's gets EAGAIN
    then, and so does who tries again, if others come all the time; the kernel has those that block wait in turn.

    Raises:
        TimeoutError: the queue was full for so long.
        OSError: nobody listens there, or this process cannot have sockets.
    """
    limit_s = max(patience_s, 0.01)
    link = socket.socket(socket.AF_UNIX)
    try:
        limit = _LIMIT.pack(int(limit_s), int(limit_s % 1 * 1e6))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            link.connect("\0" + name)
        except BlockingIOError:
            raise TimeoutError(f"others have filled its queue for {limit_s:.3g} s") from None
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _LIMIT.pack(0, 0))
        link.settimeout(limit_s)
    except BaseException:
        link.close()
        raise
    return link


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
