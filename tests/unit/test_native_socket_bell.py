"""_native.SocketBell: whatever happens at a socket rings the doorbell, and wakes who sleeps on it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from hvdlite import _native

LONG_S = 60.0  # never reached unless a test fails


class Rung:
    """A doorbell that rings for one end of each of ``count`` connections; `far` has the other ends."""

    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.near = [near for near, _ in pairs]
        self.far = [far for _, far in pairs]
        self._memory = np.zeros(8, np.uint32)
        self._address = self._memory.ctypes.data
        self.bell = _native.SocketBell([near.fileno() for near in self.near], self._address, self._memory)
        self.rings = self.after(0)  # there is room for bytes, which is news

    def count(self) -> int:
        return _native.load32(self._address)

    def after(self, seen: int) -> int:
        """Sleep until the count differs from ``seen``."""
        count = _native.doorbell_wait(self._address, seen, LONG_S)
        assert count != seen, "nobody rang"
        return count

    def close(self) -> None:
        self.bell.close()
        for end in (*self.near, *self.far):
            end.close()


@pytest.fixture
def rung() -> Iterator[Rung]:
    made = Rung(3)
    yield made
    made.close()


def test_bytes_that_arrive_ring(rung: Rung) -> None:
    """Also where those before have not been read."""
    rings = rung.rings
    for turn in range(30):
        rung.far[turn % 3].send(b"x")
        rings = rung.after(rings)
    assert [near.recv(64) for near in rung.near] == [b"x" * 10] * 3


def test_the_end_of_a_connection_rings(rung: Rung) -> None:
    rung.far[1].shutdown(socket.SHUT_WR)
    rings = rung.after(rung.rings)
    assert rung.near[1].recv(64) == b""
    rung.far[2].close()
    rung.after(rings)
    assert rung.near[2].recv(64) == b""


def test_room_after_a_refusal_rings(rung: Rung) -> None:
    near, far = rung.near[0], rung.far[0]
    near.setblocking(False)
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            sent += near.send(bytes(1 << 16))
    rings = rung.count()
    while sent:
        sent -= len(far.recv(1 << 16))
    rung.after(rings)
    assert near.send(b"x") == 1


def test_who_sleeps_is_woken(rung: Rung) -> None:
    sleeper = threading.Thread(target=rung.after, args=(rung.rings,))
    sleeper.start()
    rung.far[0].send(b"x")
    sleeper.join(LONG_S)
    assert not sleeper.is_alive()


def test_a_closed_bell_is_silent(rung: Rung) -> None:
    rung.bell.close()
    rung.bell.close()
    rings = rung.count()
    rung.far[0].send(b"x")
    assert rung.near[0].recv(1) == b"x"
    assert rung.count() == rings


def test_it_keeps_the_memory_of_its_doorbell() -> None:
    memory = np.zeros(8, np.uint32)
    before = sys.getrefcount(memory)
    near, far = socket.socketpair()
    with near, far:
        bell = _native.SocketBell([near.fileno()], memory.ctypes.data, memory)
        assert sys.getrefcount(memory) == before + 1
        del bell
    assert sys.getrefcount(memory) == before


def test_no_socket_is_an_error() -> None:
    memory = np.zeros(8, np.uint32)
    with pytest.raises(RuntimeError, match="SocketBell"):
        _native.SocketBell([-1], memory.ctypes.data, memory)


def test_a_forked_child_ends_without_it(rung: Rung) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads and fork
        child = os.fork()
    if child == 0:
        rung.bell.close()
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    rung.far[0].send(b"x")
    rung.after(rung.rings)


def test_a_program_that_closes_its_descriptors() -> None:
    """As daemons do, of all: the doorbell rings now and then, nothing spins, and the end is in order.

    In a process of its own, where the numbers are nobody else's.
    """
    program = f"""
import os, socket, tempfile, time
import numpy as np
from hvdlite import _native
near, far = socket.socketpair()
memory = np.zeros(8, np.uint32)
bell = _native.SocketBell([near.fileno()], memory.ctypes.data, memory)
seen = _native.doorbell_wait(memory.ctypes.data, 0, {LONG_S})
os.closerange(3, 64)
for _ in range(3):
    seen = _native.doorbell_wait(memory.ctypes.data, seen, {LONG_S})
start, began = seen, time.process_time()
time.sleep(0.4)
spent = time.process_time() - began
assert 0 < _native.load32(memory.ctypes.data) - start < 100 and spent < 0.2, spent
files = [tempfile.TemporaryFile() for _ in range(8)]  # which take the numbers of those that were closed
bell.close()
assert not any(os.fstat(file.fileno()).st_size for file in files)
near.detach(); far.detach()
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout == "fine\n", done.stderr
