"""Connections to unix sockets: of another user, or whose queues others fill, where who blocks is taken in turn."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from hvdlite import node, remote_call
from hvdlite.errors import StartupError
from hvdlite.links.dial import first_that_proves_itself
from hvdlite.links.proof import Secret
from hvdlite.links.wire import connect_unix
from hvdlite.start import meeting_point

KEY = bytes(32)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0hvdlite-test-{secrets.token_hex(8)}")
        listener.listen(1)
        yield listener


def fill(listener: socket.socket) -> list[socket.socket]:
    """Connections, until there is no room for another one."""
    links = []
    with suppress(BlockingIOError):
        while True:
            links.append(socket.socket(socket.AF_UNIX))
            links[-1].setblocking(False)
            links[-1].connect(listener.getsockname())
    return links


def test_a_full_queue_is_waited_for_among_others_who_come_all_the_time(listener: socket.socket) -> None:
    name, is_over = listener.getsockname(), threading.Event()
    listener.settimeout(1.0)

    def come() -> None:
        while not is_over.is_set():
            with socket.socket(socket.AF_UNIX) as link, suppress(OSError):
                link.connect(name)

    def take() -> None:
        while not is_over.wait(0.01):  # slowly, so that there is never room for who looks now and then
            with suppress(OSError):
                listener.accept()[0].close()

    strangers = [threading.Thread(target=come, daemon=True) for _ in range(4)]
    for thread in (*strangers, threading.Thread(target=take, daemon=True)):
        thread.start()
    time.sleep(0.1)
    link = connect_unix(name[1:].decode(), 20.0)
    assert link.gettimeout() == 20.0
    link.close()
    is_over.set()
    listener.close()


def test_a_queue_that_stays_full_is_an_error_in_time(listener: socket.socket) -> None:
    links = fill(listener)
    began_s = time.monotonic()
    with pytest.raises(TimeoutError, match="others have filled its queue"):
        connect_unix(listener.getsockname()[1:].decode(), 0.2)
    assert 0.1 < time.monotonic() - began_s < 10
    for link in links:
        link.close()


def test_the_limit_is_not_of_what_is_sent_later(listener: socket.socket) -> None:
    """The kernel has one for both; a connection whose owner gives it no limit has none."""
    link = connect_unix(listener.getsockname()[1:].decode(), 0.05)
    link.settimeout(None)
    other, _ = listener.accept()
    reader = threading.Timer(0.3, lambda: other.recv(1 << 22, socket.MSG_WAITALL))
    reader.start()
    link.sendall(bytes(1 << 22))
    reader.join()
    link.close()
    other.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda name: node._connect(node.Door(f"\0{name}", KEY), node._CLAIM.pack(1, 0), time.monotonic() + 20),
        lambda name: first_that_proves_itself([f"\0{name}"], Secret(KEY, b"", 0), b"", time.monotonic() + 20),
        lambda name: remote_call._connect(f"@{name}", KEY, 0),
        lambda name: meeting_point.connect(f"{name}:{KEY.hex()}"),
    ],
    ids=["a rank to its node", "a rank to a process group", "hvdlite.run", "a rank to hvdliterun and keepers"],
)
def test_not_a_word_is_said_to_a_socket_of_another_user(
    call: Callable[[str], object], listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)  # so the listener belongs to another user
    with suppress(OSError, StartupError):
        assert call(listener.getsockname()[1:].decode()) is None
    stranger, _ = listener.accept()
    with stranger:
        stranger.settimeout(20)
        assert stranger.recv(1) == b""
