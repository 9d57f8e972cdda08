"""A commit on its way to hvdliterun: the newest wins, and nothing that is incomplete, unwanted or too large is kept."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hvdlite.memory.memory_file import write_memory_file
from hvdlite.recovery import second_copy
from hvdlite.recovery.second_copy import _HEAD, Courier, SecondCopy


class Way:
    """From a courier to hvdliterun's end; connections may be lost, or refused for a while.

    Attributes:
        is_valid: what hvdliterun thinks of the keeper.
        got: what has been fetched: numbers and contents.
        said: complaints.
    """

    def __init__(self) -> None:
        self.copy = SecondCopy()
        self.is_valid = self.is_open = True
        self.got: list[tuple[int, bytes]] = []
        self.said: list[str] = []
        self.links: list[socket.socket] = []
        self.courier = Courier(self._call, self._take)

    def _call(self) -> socket.socket:
        if not self.is_open:
            raise ConnectionError("refused")
        ours, theirs = socket.socketpair()
        self.links.append(theirs)
        serve = threading.Thread(target=self.copy.serve, args=(theirs, lambda: self.is_valid, self.said.append))
        serve.daemon = True
        serve.start()
        return ours

    def _take(self, number: int, file: int) -> None:
        self.got.append((number, b"" if file < 0 else os.pread(file, 100, 0)))

    def bring(self, number: int, content: bytes) -> None:
        self.courier.bring(number, write_memory_file(lambda target: target.write(content)))

    def fetch(self) -> tuple[int, bytes]:
        before = len(self.got)
        self.courier.fetch()
        wait_for(lambda: len(self.got) > before)
        return self.got[-1]


def wait_for(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    monkeypatch.setattr(second_copy, "_AGAIN_S", 0.02)
    way = Way()
    yield way
    for link in way.links:
        link.close()
    way.copy.drop()


def test_the_newest_wins(way: Way) -> None:
    way.bring(3, b"three")
    wait_for(lambda: way.copy.number == 3)
    assert way.fetch() == (3, b"three")
    way.is_open = False
    way.links[0].shutdown(socket.SHUT_RDWR)  # so that those that follow wait
    for number in (4, 5, 6):
        way.bring(number, b"of %d" % number)
    way.is_open = True
    wait_for(lambda: way.copy.number == 6)
    way.bring(5, b"late")
    assert way.fetch() == (6, b"of 6")
    way.copy.drop()
    assert way.fetch() == (0, b"")


def test_what_is_incomplete_is_not_kept(way: Way) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(_HEAD.pack(7, 1000) + b"x" * 999)
    ours.shutdown(socket.SHUT_WR)
    way.copy.serve(theirs, lambda: True, way.said.append)
    ours.close()
    assert way.copy.number == 0


def test_who_was_given_up_leaves_nothing(way: Way) -> None:
    way.is_valid = False
    way.bring(8, b"of ranks that go on alone")
    assert way.fetch() == (0, b"")


def test_what_has_no_room_is_refused_and_said_once(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    way.bring(1, b"small")
    assert way.fetch() == (1, b"small")
    monkeypatch.setattr(second_copy, "_available_bytes", lambda: 100)
    for number in (2, 3):
        way.bring(number, b"x" * 51)
        assert way.fetch() == (1, b"small")
    assert way.said == ["no room here for a copy of commit 2, 0 MiB, which one host alone has"]


def test_who_cannot_be_asked_has_nothing(way: Way) -> None:
    way.is_open = False
    assert way.fetch() == (0, b"")
