"""Memory of a GPU that processes share by handles is freed when nobody has it open any more, however that comes about.

The simulated driver ends the process of who frees memory that another one has open.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver_lab import Driver
from gpusim.build import built
from hvdlite import _native

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0
HOLD_S = 0.4  # longer than the simulated driver's patience

PEER = """
import os, signal, socket, sys
from hvdlite import _native
_native.use_cuda_library(sys.argv[1])
link = socket.socket(fileno=int(sys.argv[2]))
segment = _native.HandleSegment(0, 1)
shared, file = segment.share()
socket.send_fds(link, [shared], [file])
os.close(file)
theirs, (file,), _, _ = socket.recv_fds(link, 64, 1)
segment.map([theirs, b""], [file, -1], 1)
os.close(file)
link.send(b"mapped")
word = link.recv(6)
if word in (b"forks", b"drops") and os.fork() == 0:
    if word == b"drops":
        del segment
    signal.pause()
if word == b"drops":
    signal.pause()
del segment
signal.pause()
"""


@pytest.fixture(scope="module")
def cuda() -> Iterator[Driver]:
    _native.use_cuda_library(str(built()))
    driver = Driver(str(built()))
    yield driver
    driver.close()


class Peer:
    """Another process, in a session of its own, which has mapped a segment and whose memory that segment maps."""

    def __init__(self, segment: _native.DeviceSegment) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", PEER, str(built()), str(theirs.fileno())]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ, start_new_session=True)
        theirs.close()
        ours.settimeout(PATIENCE_S)
        self.link = ours
        shared, file = segment.share()
        socket.send_fds(ours, [shared], [file])
        os.close(file)
        theirs_shared, (file,), _, _ = socket.recv_fds(ours, 64, 1)
        segment.map([b"", theirs_shared], [-1, file], 0)
        os.close(file)
        assert ours.recv(6) == b"mapped"

    def end(self, word: bytes) -> None:
        """Has it drop the segment, or be gone."""
        if word == b"killed":
            self._process.kill()
            self._process.wait()
        else:
            self.link.send(word)

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.link.close()


def blocks() -> int:
    """How many allocations this process has exported and not freed."""
    links = Path("/proc/self/fd").iterdir()
    return sum(os.readlink(link).startswith("/memfd:gpusim-ipc-") for link in links if link.is_symlink())


def goes(cuda: Driver, address: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while cuda.has(address) and time.monotonic() < deadline:
        time.sleep(1e-3)
    return not cuda.has(address)


@pytest.mark.parametrize("word", [b"closes", b"forks", b"killed"])
def test_it_is_freed_when_the_others_have_closed_it(cuda: Driver, word: bytes, request: pytest.FixtureRequest) -> None:
    """A process that the other one has forked has nothing of it open."""
    segment = _native.HandleSegment(0, 1)
    peer = Peer(segment)
    request.addfinalizer(peer.close)
    own, other = segment.copies
    del segment
    assert goes(cuda, other)
    time.sleep(HOLD_S)
    assert cuda.has(own)
    peer.end(word)
    assert goes(cuda, own)


def test_a_forked_child_that_drops_it_has_closed_nothing(cuda: Driver, request: pytest.FixtureRequest) -> None:
    segment = _native.HandleSegment(0, 1)
    peer = Peer(segment)
    request.addfinalizer(peer.close)
    own, other = segment.copies
    del segment
    assert goes(cuda, other)
    peer.end(b"drops")
    time.sleep(HOLD_S)
    assert cuda.has(own)
    peer.close()
    assert goes(cuda, own)


def test_what_nobody_has_mapped_yet(cuda: Driver) -> None:
    """Stays until those to whom it was given have let go of it."""
    segment = _native.HandleSegment(0, 1)
    shared, file = segment.share()
    before = blocks()
    del segment
    time.sleep(HOLD_S)
    assert blocks() == before
    os.close(file)
    assert len(shared) == 64
    deadline = time.monotonic() + PATIENCE_S
    while blocks() == before and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert blocks() == before - 1
