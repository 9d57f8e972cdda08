"""What two ends of a connection prove to one another, message by message: all that was said is in it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from hvdlite.links.proof import Caller, Host, Secret, new_key

SECRET = Secret(new_key(), b"test", 4)
CLAIM = b"1to0"
Change = Callable[[bytes], bytes]


@pytest.fixture
def links() -> Iterator[tuple[socket.socket, socket.socket]]:
    own, other = socket.socketpair()
    with own, other:
        yield own, other


class Conversation:
    """Of a caller and a host; whoever is between them may ``change`` one of the three messages."""

    def __init__(self, links: tuple[socket.socket, socket.socket], changed: int = -1, change: Change = bytes) -> None:
        self.host, self.caller = Host(SECRET, links[0]), Caller(SECRET, links[1], CLAIM)
        self.said: list[bytes] = []
        self._changed, self._change = changed, change

    def run(self) -> None:
        """Raises ConnectionError where one end takes the other for a stranger."""
        answer = self.host.feed(self._carry(self.caller.hello))
        self.host.feed(self._carry(self.caller.answer(self._carry(answer))))

    def _carry(self, message: bytes) -> bytes:
        self.said.append(self._change(message) if self._changed == len(self.said) else message)
        return self.said[-1]


def test_both_ends_know_one_another_and_the_session(links: tuple[socket.socket, socket.socket]) -> None:
    first, second = Conversation(links), Conversation(links)
    for one in (first, second):
        one.run()
        assert one.host.is_proven and one.host.claim == CLAIM and one.host.wanted_bytes == 0
        assert one.host.session == one.caller.session != b""
        assert SECRET.key not in b"".join(one.said)
    assert first.host.session != second.host.session


@pytest.mark.parametrize(
    ("message", "at"),
    [(0, 0), (0, 16), (0, 19), (1, 0), (1, 16), (1, 47), (2, 0), (2, 31)],
    ids=["nonce", "claim", "end of it", "host's nonce", "its proof", "end of it", "caller's proof", "end of it"],
)
def test_nothing_of_what_is_said_can_be_changed(
    message: int, at: int, links: tuple[socket.socket, socket.socket]
) -> None:
    one = Conversation(links, message, lambda said: said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :])
    with pytest.raises(ConnectionError, match="does not know the job's key"):
        one.run()
    assert len(one.said) == (3 if message == 2 else 2) and not one.host.is_proven


def test_what_was_recorded_proves_nothing_at_either_end(links: tuple[socket.socket, socket.socket]) -> None:
    before = Conversation(links)
    before.run()
    host, caller = Host(SECRET, links[0]), Caller(SECRET, links[1], CLAIM)
    host.feed(before.said[0])
    with pytest.raises(ConnectionError):
        host.feed(before.said[2])
    with pytest.raises(ConnectionError):
        caller.answer(before.said[1])


def test_an_end_is_not_convinced_by_its_own_words(links: tuple[socket.socket, socket.socket]) -> None:
    """A stranger who calls sends back the proof that the host has shown."""
    host = Host(SECRET, links[0])
    answer = host.feed(bytes(16) + CLAIM)
    with pytest.raises(ConnectionError):
        host.feed(answer[16:])
    assert not host.is_proven


@pytest.mark.parametrize(
    "other", [Secret(SECRET.key, b"else", 4), Secret(new_key(), b"test", 4)], ids=["purpose", "key"]
)
def test_another_purpose_or_key_is_a_stranger(other: Secret, links: tuple[socket.socket, socket.socket]) -> None:
    caller = Caller(other, links[1], CLAIM)
    with pytest.raises(ConnectionError):
        caller.answer(Host(SECRET, links[0]).feed(caller.hello))
