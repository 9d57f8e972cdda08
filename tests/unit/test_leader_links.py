"""TCP between node leaders: who proves itself gets a link, whoever else turns up on the way does not."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from hvdlite.errors import StartupError
from hvdlite.leader_links import Listener, connect, new_token

HERE = "127.0.0.1"
TOKEN = b"t" * 16
HELLO = struct.Struct("<16sII")


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def parent(children: tuple[int, ...] = (1,), deadline_s: float | None = None) -> Iterator[Listener]:
    with closing(Listener()) as listener:
        listener.accept_children(TOKEN, 0, children, deadline_s or soon())
        yield listener
        for link in listener.links().values():
            link.close()


def check_link(one: socket.socket, other: socket.socket) -> None:
    """Both ends are of one connection, and nothing of the handshake is left in it."""
    one.settimeout(5.0)
    other.settimeout(5.0)
    one.sendall(b"down")
    other.sendall(b"up")
    assert other.recv(64) == b"down"
    assert one.recv(64) == b"up"


@contextmanager
def stranger() -> Iterator[int]:
    """A server that takes connections and never says anything, as another program on that port would."""
    with socket.create_server((HERE, 0)) as server:
        yield server.getsockname()[1]


def refused_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        return int(server.getsockname()[1])


def test_every_child_gets_its_own_link() -> None:
    with parent((1, 2, 3)) as listener:
        ends = {child: connect([(HERE, listener.port)], TOKEN, child, 0, soon()) for child in (3, 1, 2)}
        links = listener.links()
        assert sorted(links) == [1, 2, 3]
        for child, end in ends.items():
            check_link(links[child], end)
            end.close()


def test_tokens_differ() -> None:
    assert new_token() != new_token()
    assert len(new_token()) == 16


def test_addresses_that_lead_nowhere_are_passed_over() -> None:
    """192.0.2.0/24 is for documentation (RFC 5737): packets to it are dropped or refused, wherever this runs."""
    with stranger() as strange_port, parent() as listener:
        addresses = [("192.0.2.1", 9), (HERE, refused_port()), (HERE, strange_port), (HERE, listener.port)]
        started = time.monotonic()
        end = connect(addresses, TOKEN, 1, 0, soon())
        assert time.monotonic() - started < 5
        check_link(listener.links()[1], end)
        end.close()


@pytest.mark.parametrize(
    "hello",
    [
        HELLO.pack(b"x" * 16, 1, 0),
        HELLO.pack(TOKEN, 1, 7),
        HELLO.pack(TOKEN, 9, 0),
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["another job", "another parent", "not a child", "another protocol"],
)
def test_who_cannot_prove_itself_is_sent_away(hello: bytes) -> None:
    with parent() as listener:
        with socket.create_connection((HERE, listener.port), timeout=5) as wrong:
            wrong.sendall(hello)
            with suppress(ConnectionResetError):
                assert wrong.recv(64) == b""
        end = connect([(HERE, listener.port)], TOKEN, 1, 0, soon())
        check_link(listener.links()[1], end)
        end.close()


def test_a_child_that_gave_up_waiting_gets_a_link_at_its_next_try() -> None:
    """A parent that is busy for seconds finds a connection that its child has left; the one after it counts."""
    with parent() as listener:
        with socket.create_connection((HERE, listener.port), timeout=5) as given_up:
            given_up.sendall(HELLO.pack(TOKEN, 1, 0))
        end = connect([(HERE, listener.port)], TOKEN, 1, 0, soon())
        check_link(listener.links()[1], end)
        end.close()


def test_a_parent_that_starts_to_listen_late_is_waited_for() -> None:
    with closing(Listener()) as listener:
        threading.Timer(0.5, listener.accept_children, (TOKEN, 0, (1,), soon())).start()
        end = connect([(HERE, listener.port)], TOKEN, 1, 0, soon())
        with end, listener.links()[1] as link:
            check_link(link, end)


def test_a_child_that_does_not_come_is_missing_in_time() -> None:
    started = time.monotonic()
    with parent((1, 2), deadline_s=soon(0.8)) as listener:
        end = connect([(HERE, listener.port)], TOKEN, 2, 0, soon())
        assert list(listener.links()) == [2]
        end.close()
    assert time.monotonic() - started < 4


def test_an_unreachable_parent_is_explained() -> None:
    port = refused_port()
    with pytest.raises(StartupError) as caught:
        connect([(HERE, port), ("192.0.2.1", 9)], TOKEN, 3, 1, soon(0.7))
    for words in ["node 3", "node 1", f"{HERE}:{port}", "192.0.2.1:9", "HVDLITE_NETWORK_INTERFACES"]:
        assert words in str(caught.value)
