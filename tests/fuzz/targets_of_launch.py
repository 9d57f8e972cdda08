"""What processes of a job tell hvdliterun, its keepers and its doctor, and what those tell them; see targets.py."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import socket
import struct
import threading
from contextlib import closing, suppress
from dataclasses import asdict
from unittest import mock

from fuzzed import KEY, Fuzzed, answers_to, parts, said_to
from hvdlite import plain, remote_call
from hvdlite.cli.keepers import Keepers, _Keeper as KeeperOfHost
from hvdlite.cli.rank_notices import RankNotices
from hvdlite.cli.rank_words import RankWords
from hvdlite.config import NOTICES
from hvdlite.doctor import network, station as doctor
from hvdlite.doctor.links import Address
from hvdlite.doctor.station import Station
from hvdlite.errors import StartupError
from hvdlite.liveness.notice import NAME, RANK, Notice
from hvdlite.recovery.keeper import MESSAGE, OF_RANKS, Keeper, Word
from hvdlite.recovery.membership import Membership
from hvdlite.recovery.roster import Generation, Join
from hvdlite.recovery.safekeeping import _exchange
from hvdlite.recovery.second_copy import SecondCopy
from hvdlite.remote_call import CallServer
from hvdlite.start import meeting_point
from hvdlite.start.meeting_point import MeetingPoint, Visit

ASKED = (Word.FETCH, Word.NEWS, Word.ANEW, Word.AT_WORK, Word.CLAIM, Word.STARTING, Word.STARTED, Word.FETCH)
MOST_ANSWERS = 64  # for more a unix socket may have no room
MOST_DATAGRAMS = 8  # likewise
ENDS = bytes([Notice.ENDS])
LOOPBACK = Address("lo", "127.0.0.1", 65536)


def call_messages(data: bytes) -> None:
    """Of `hvdlite.run`: what has no HMAC of the session is an error, before memory is taken for it."""
    with said_to(data) as (own, _), suppress(OSError):
        remote_call._Messages(own, KEY, b"host").receive()
        raise AssertionError(data)


@functools.cache
def _keeper() -> tuple[Keeper, socket.socket]:
    """One for all inputs, as it has threads; and what it says to hvdliterun."""
    head, said = socket.socketpair()
    said.setblocking(False)
    return Keeper(f"hvdlite-fuzz-{os.getpid()}", KEY, head, mock.Mock(side_effect=OSError), is_elsewhere=False), said


def keeper(data: bytes) -> None:
    """Each request of a rank has one answer, up to the first that is none; without a file there is nothing to keep."""
    kept, told_head = _keeper()
    asked = data[: MOST_ANSWERS * MESSAGE.size]
    with said_to(asked) as (own, other), mock.patch.object(kept, "_granted", mock.Mock(get=lambda: 1)):
        kept._serve(own)
        said = answers_to(other)
    answers = [word for word, _ in MESSAGE.iter_unpack(said)]
    words = [word for word, _ in MESSAGE.iter_unpack(asked[: len(asked) // MESSAGE.size * MESSAGE.size])]
    assert answers == [Word.HOLDS if word == Word.FETCH else word for word in words[: len(answers)]]
    assert kept._file < 0
    with suppress(BlockingIOError):
        while told_head.recv(1 << 16):
            pass


def second_copy(data: bytes) -> None:
    """Of the commits that come in hvdliterun has the newest that was whole, and for which it had room."""
    room_bytes, head = 100, struct.Struct("<QQ")
    sent = rest = data[: 100 * head.size]
    newest, commit = 0, b""
    while len(rest) >= head.size:
        (number, nbytes), rest = head.unpack_from(rest), rest[head.size :]
        if number and nbytes <= room_bytes:
            if len(rest) < nbytes:
                break
            if number > newest:
                newest, commit = number, rest[:nbytes]
            rest = rest[nbytes:]
    copy = SecondCopy()
    with (
        said_to(sent) as (own, _),
        mock.patch("hvdlite.recovery.second_copy._available_bytes", return_value=2 * room_bytes),
    ):
        copy.serve(own, lambda: True, lambda complaint: None)
    assert copy.number == newest
    assert not newest or os.pread(copy._file, len(sent), 0) == commit
    copy.drop()


def outcome(data: bytes) -> None:
    """Of `hvdlite.run`: what a rank leaves is kept as it is, and its first byte says whether the function returned."""
    server = mock.Mock(_call=b"", _lock=threading.Lock(), _outcomes=[])
    messages = mock.Mock(receive=lambda: data)
    CallServer._converse(server, mock.MagicMock(), 3, messages)
    assert [(one.returned, one.pickled) for one in server._outcomes] == ([(data[0] != 0, data[1:])] if data else [])
    assert server.failed.set.called is not any(one.returned for one in server._outcomes)


@functools.cache
def _keepers() -> Keepers:
    """One for all inputs, as it has a thread."""
    return Keepers(mock.Mock(options=(), ssh=()), {}, 1.0, RankWords(2, 1.0, 1.0).hear, is_local=True)


def keepers(data: bytes) -> None:
    """hvdliterun knows of a host what its keeper has said last, up to what no keeper says, which is the end of it."""
    data = data[: MOST_ANSWERS * MESSAGE.size]
    said = [*MESSAGE.iter_unpack(data[: len(data) // MESSAGE.size * MESSAGE.size])]
    known = (*OF_RANKS, Word.HOLDS, Word.TAKE)
    heard = said[: next((place for place, (word, _) in enumerate(said) if word not in known), len(said))]
    one = KeeperOfHost("host", mock.Mock(), 0.0)
    with said_to(data) as (own, other), mock.patch("hvdlite.cli.keepers.say") as told:
        _keepers()._hear(one, own)
        answered = sum(word == Word.CLAIM for word, _ in heard) * MESSAGE.size
        assert len(answers_to(other)) == answered
    assert told.called is (len(heard) < len(said))
    assert one.kept == next((number for word, number in reversed(heard) if word in (Word.HOLDS, Word.TAKE)), 0)
    assert one.answered == sum(word == Word.HOLDS for word, _ in heard)
    assert not _keepers().kept
    assert one.child.wait.called or one.link is None  # one that has said nothing is late, and given up with those


def safekeeping(data: bytes) -> None:
    """A keeper's answer is one to what was asked."""
    for asked in ASKED:
        with said_to(data) as (own, _), suppress(OSError):
            number, file = _exchange(own, MESSAGE.pack(asked, 7), [])
            assert data[: MESSAGE.size] == MESSAGE.pack(Word.HOLDS if asked == Word.FETCH else asked, number)
            assert file is None


def meeting(data: bytes) -> None:
    """Who says what no rank says is hung up on, and nobody waits for longer than can be."""
    joined: list[Join] = []

    def wait_for(predicate: object, timeout_s: float) -> None:
        assert 0 <= timeout_s <= threading.TIMEOUT_MAX

    def join(request: Join, link: socket.socket) -> None:
        joined.append(request)
        link.close()

    with closing(MeetingPoint(join)) as point, mock.patch.object(point._changed, "wait_for", wait_for):
        for said in (data, *(struct.pack("<Q", len(line)) + line for line in data.split(b"\n"))):
            with said_to(said) as (own, _):
                point._serve(own)
    for request in joined:
        assert isinstance(request.worker, int) and isinstance(request.failed, int | None)


def met(data: bytes) -> None:
    """What a meeting point answers is bytes of ranks, or a complaint; a rank that joins has a place, or hears why."""
    with suppress(ConnectionError):
        values, complaint = meeting_point._answer(data)
        assert isinstance(complaint, str) and all(isinstance(value, bytes) for value in values)
    with suppress(ConnectionError), said_to(data) as (own, _):
        assert meeting_point.receive(own) == data[8 : 8 + struct.unpack_from("<Q", data)[0]]
    with suppress(StartupError):
        member = Membership("", 1)
        member.generation = member._read(data)
        assert member.rank >= 0


def notices(data: bytes) -> None:
    """Whatever processes of this user say; the rank that has failed is the first one that is named so."""
    said = [b"", *itertools.islice(parts(data), MOST_DATAGRAMS)]
    with closing(RankNotices(1.0)) as heard, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        for piece in said:
            link.sendto(piece, NAME + heard.environment[NOTICES].encode())
        assert not heard.are_late
    named = [RANK.unpack_from(piece, 1)[0] for piece in said if piece[:1] == ENDS and len(piece) > RANK.size]
    assert heard.failed == next(iter(named), None)


class _LocalLink(socket.socket):
    """A unix socket that takes options of TCP."""

    def setsockopt(self, *option: object) -> None:
        pass


@functools.cache
def _station() -> Station:
    """One for all inputs, as it has threads."""
    return Station("fuzz", [LOOPBACK], key=KEY)


def station(data: bytes) -> None:
    """The doctor's measurements: what is no command ends the connection."""
    data = data[:MOST_ANSWERS]
    with said_to(data) as (own, other):
        _station()._answer(_LocalLink(fileno=own.detach()))
        pings = len(data) - len(data.lstrip(doctor.PING))
        assert len(answers_to(other)) >= pings * doctor.CLOCK.size


def datagrams(data: bytes) -> None:
    """Who knows the key has an answer, shorter than what was sent."""
    link = mock.Mock(recvfrom=lambda nbytes: (data, "sender"))
    _station()._answer_datagram(link)
    for (answer, _), _ in link.sendto.call_args_list:
        assert len(answer) < len(data) and data.startswith(doctor.datagram(KEY, data[: doctor.NONCE_BYTES], len(data)))


def door(data: bytes) -> None:
    """A door that another host tells can be tried and shown; in what it has measured there are no infinities."""
    for said in (data, struct.pack("<I", len(data)) + data):
        with said_to(said) as (own, _), suppress(OSError):
            told = doctor.receive_door(own, KEY)
            assert f"{told}".isprintable()
            with mock.patch("socket.socket.connect_ex", return_value=1):
                kept, tries = network._connect(told)
            assert kept is None and len(tries) == len(told.addresses)
            network._interface_with(told.addresses, "192.0.2.1")
    for measure in (network._pinged, network._streamed):
        with said_to(data) as (own, _), suppress(OSError), mock.patch.object(network, "_STREAM_S", 0.0):
            other = mock.Mock(wraps=own, sendall=lambda said: None, shutdown=lambda how: None)
            figures = measure(other)
            assert all(map(math.isfinite, figures if isinstance(figures, tuple) else [figures]))


_DOOR = {"host": "a", "addresses": [asdict(LOOPBACK)], "tcp_ports": [1], "udp_ports": [0]}
_VISITS = [Visit("key", (0, 1), rank, 1.0, b"data") for rank in (0, 1)]
_JOINED = [Generation(2, (0, 1), are_alike=False), "no rank is left"]

TARGETS = {
    "call_messages": Fuzzed(call_messages, [struct.pack("<Q", 3) + bytes(32) + b"abc" + bytes(32)]),
    "outcome": Fuzzed(outcome, [b"\1result", b"\0failure"]),
    "keeper": Fuzzed(keeper, [b"".join(MESSAGE.pack(word, 1 << 32) for word in ASKED)]),
    "keepers": Fuzzed(keepers, [b"".join(MESSAGE.pack(word, 3) for word in (Word.HOLDS, *OF_RANKS, Word.TAKE))]),
    "safekeeping": Fuzzed(safekeeping, [MESSAGE.pack(word, 1) for word in (Word.HOLDS, Word.NEWS, Word.CLAIM)]),
    "second_copy": Fuzzed(second_copy, [struct.pack("<QQ3sQQQQ", 5, 3, b"abc", 0, 0, 4, 1 << 40)]),
    "notices": Fuzzed(notices, [ENDS + RANK.pack(3) + bytes([Notice.STARTING, Notice.STARTED])]),
    "meeting": Fuzzed(meeting, [b"\n".join(map(plain.dumps, _VISITS)), plain.dumps(Join(3, failed=1))]),
    "met": Fuzzed(met, [struct.pack("<Q", 1) + b"a", plain.dumps(([b"data"], "")), *map(plain.dumps, _JOINED)]),
    "station": Fuzzed(station, [b"ppp", b"ppd", b"ps" + bytes(100), b"f"]),
    "datagrams": Fuzzed(datagrams, [doctor.datagram(KEY, bytes(8), 36).ljust(36, b"\0")]),
    "door": Fuzzed(door, [json.dumps(_DOOR).encode(), struct.pack("<30d", *range(30)), struct.pack("<Qd", 0, 1.0)]),
}
