"""Whole messages over a stream socket."""

from __future__ import annotations

import socket


def read_exactly(link: socket.socket, length: int) -> bytes:
    """The next ``length`` bytes.

    Raises:
        ConnectionError: the other end is gone.
        TimeoutError: that of the socket is over.
    """
    body = bytearray(length)
    with memoryview(body) as view:
        done = 0
        while done < length:
            received = link.recv_into(view[done:])
            if received == 0:
                raise ConnectionError("the other end is gone")
            done += received
    return bytes(body)
