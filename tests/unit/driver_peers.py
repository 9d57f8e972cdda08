"""Another process at the driver under test: ``python driver_peers.py NAME FD...`` does one of these.

What is written to stdout is for the test.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

from driver_lab import Words, driver_under_test


def writes_a_word(page: int) -> None:
    """After the first word is 1, the second becomes 7."""
    cuda = driver_under_test()
    words, stream = Words(cuda, page), cuda.stream()
    cuda.call("cuStreamWaitValue32_v2", stream, words.at(0), 1, 0)
    cuda.call("cuStreamWriteValue32_v2", stream, words.at(1), 7, 0)
    cuda.synchronize(stream)


def shares_memory(fd: int) -> None:
    """Sends memory of twos, and waits until it is full of threes; then is gone without a word."""
    cuda = driver_under_test()
    stream, nbytes = cuda.stream(), cuda.granularity()
    allocation = cuda.create(nbytes)
    address = cuda.mapped(allocation, nbytes)
    cuda.set(address, 2, nbytes, stream)
    cuda.synchronize(stream)
    connection = socket.socket(fileno=fd)
    socket.send_fds(connection, [b"memory"], [cuda.export(allocation)])
    cuda.call("cuMemRelease", allocation)
    connection.recv(1)
    assert cuda.read(address, nbytes, stream) == bytes([3]) * nbytes
    connection.send(b"seen")
    os._exit(0)


def shares_a_handle(fd: int) -> None:
    """Sends a handle of memory of twos, and waits until it is full of threes and closed."""
    cuda = driver_under_test()
    stream, nbytes = cuda.stream(), 2 << 20
    address = cuda.allocate(nbytes)
    cuda.set(address, 2, nbytes, stream)
    cuda.synchronize(stream)
    connection = socket.socket(fileno=fd)
    connection.send(cuda.shared(address))
    connection.recv(1)
    assert cuda.read(address, nbytes, stream) == bytes([3]) * nbytes
    cuda.call("cuMemFree_v2", ctypes.c_ulonglong(address))


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(int, sys.argv[2:]))
