"""Every parser of bytes that come from elsewhere, as a function of bytes: it returns where it took them or refused them
in its own words, and raises where it did neither.

A target has seeds, valid inputs that show a fuzzer the way in. Inputs that once made a target raise are files of
cases/<target>.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

from hvdlite import plain, remote_call
from hvdlite.cli.allocation import find_allocation
from hvdlite.cli.discovery import printed_hosts
from hvdlite.cli.job import Host as JobHost, read_hostfile
from hvdlite.config import Config
from hvdlite.coordinator.control_page import ByteStream
from hvdlite.coordinator.messages import (
    Claim,
    Decoder,
    Encoder,
    EndOfBatch,
    Fault,
    Message,
    Notice,
    PlanMessage,
    Response,
    Verb,
)
from hvdlite.coordinator.tree import Tree
from hvdlite.errors import CollectiveError, ConfigError
from hvdlite.interfaces import Interface, select
from hvdlite.keeper import MESSAGE, Keeper, Word
from hvdlite.operations.barrier import Barrier
from hvdlite.proof import Caller, Host, Secret
from hvdlite.second_copy import SecondCopy
from hvdlite.sentinel_messages import DamagedError, Failed, Goodbye, Inbox, read, shortened, written
from hvdlite.timeline.trace_file import TraceError, TraceFile, merge_traces

Target = Callable[[bytes], None]
BARRIER = Barrier("barrier")
MESSAGES: Sequence[Message] = (
    Claim(BARRIER, 0),
    Claim(BARRIER, 1, (0, 2)),
    Response(BARRIER, 1, 2),
    EndOfBatch(),
    Fault(("barrier", 3), "ranks contradict one another"),
    Notice({"kind": "shutdown", "rank": 1}),
    PlanMessage(Verb.READY, 1 << 40),
)
CASES = Path(__file__).resolve().parent / "cases"
KEY = bytes(range(32))
SECRET = Secret(KEY, b"fuzz", 8)
ASKED = (Word.FETCH, Word.NEWS, Word.ANEW, Word.AT_WORK, Word.CLAIM, Word.STARTING, Word.STARTED, Word.FETCH)


class Fuzzed(NamedTuple):
    take: Target
    seeds: list[bytes]


def parts(data: bytes) -> Iterator[bytes]:
    """``data`` in pieces, of lengths that its own bytes say."""
    start = 0
    while start < len(data):
        end = start + 1 + data[start] % 37
        yield data[start:end]
        start = end


def decoder(data: bytes) -> None:
    """A stream says the same however it is cut, up to where it makes no sense; nothing but a request is unpickled."""
    whole: list[Message] = []
    pieces: list[Message] = []
    with mock.patch.object(pickle, "loads", return_value=BARRIER):  # a pickle is code: who sends one is proven
        for messages, cut in ((whole, [data]), (pieces, list(parts(data)))):
            own = Decoder()
            with suppress(ValueError, LookupError, TypeError, AssertionError):  # which end the job, in order
                for piece in cut:
                    for message in own.feed(piece):
                        messages.append(message)
    assert repr(whole) == repr(pieces)


def requests(data: bytes) -> None:
    """What an encoder with few or many slots writes a decoder reads, whatever names requests have."""
    encoder, decoder = Encoder(data[0] % 5 if data else 1), Decoder()
    sent: list[Message] = []
    for number, piece in enumerate(parts(data)):
        name = piece.decode("utf-8", "surrogateescape") if number % 2 else piece.hex()[:4]
        sent.append(Claim(Barrier(name), number, tuple(piece[:2]) or None))
        sent.append(Response(Barrier(name), -number, sum(piece[:3]) << 50))
        sent.append(Fault((name, number), name))
    for message in sent:
        encoder.send(message)
    read = [message for piece in parts(bytes(encoder.outbox)) for message in decoder.feed(piece)]
    assert read == sent, (read, sent)


def tree(data: bytes) -> None:
    """A neighbour's bytes are messages with their length before them, and the rest has yet to come."""
    own, other = socket.socketpair()
    with own, other:
        links = Tree({1: own}, 1, (), lambda: None)
        expected, rest = [], data[: 1 << 16]
        while len(rest) >= 4 and len(rest) - 4 >= (length := struct.unpack_from("<I", rest)[0]):
            expected.append((1, rest[4 : 4 + length]))
            rest = rest[4 + length :]
        came = []
        with suppress(CollectiveError):
            for piece in parts(data[: 1 << 16]):
                other.sendall(piece)
                came += list(links.receive())
        assert came == expected


def hello(data: bytes) -> None:
    """Nobody proves anything without the key, on either side, and nothing is read beyond the proof."""
    own, other = socket.socketpair()
    with own, other:
        host, caller = Host(SECRET, own), Caller(SECRET, other, bytes(8))
        with suppress(ConnectionError):
            for piece in parts(data):
                host.feed(piece[: host.wanted_bytes])
        assert not host.is_proven and not host.session
        with suppress(ConnectionError):
            caller.answer(data[: caller.answer_bytes].ljust(caller.answer_bytes, b"\0"))
            raise AssertionError(data)


def told(data: bytes) -> None:
    """What is read where strangers may write is a value that can be written again, and so comes back."""
    with suppress(ValueError):
        value = plain.loads(data)
        assert repr(plain.loads(plain.dumps(value))) == repr(value)


def sentinel(data: bytes) -> None:
    """A neighbour's bytes are the same messages however they are cut, up to where they make no sense; what was
    understood can be passed on."""
    whole: list[bytes] = []
    pieces: list[bytes] = []
    for bodies, cut in ((whole, [data]), (pieces, list(parts(data)))):
        inbox = Inbox()
        with suppress(DamagedError):
            for piece in cut:
                bodies.extend(inbox.feed(piece))
    assert whole == pieces[: len(whole)] and len(pieces) == len(whole)
    for body in (data, *whole):
        message = read(body)
        if isinstance(message, Failed):
            (passed_on,) = Inbox().feed(written(Failed(message.rank, shortened(message.text))))
            again = read(passed_on)
            assert isinstance(again, Failed) and again.rank == message.rank
        elif isinstance(message, Goodbye):
            assert read(written(message)[4:]) == message


def call_messages(data: bytes) -> None:
    """Of `hvdlite.run`: what has no HMAC of the session is an error, before memory is taken for it."""
    own, other = socket.socketpair()
    with own, other:
        other.sendall(data[: 1 << 14])
        other.shutdown(socket.SHUT_WR)
        with suppress(OSError):
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
    asked = data[: 100 * MESSAGE.size]
    own, other = socket.socketpair()
    with other, mock.patch.object(kept, "_granted", mock.Mock(get=lambda: 1)):
        other.sendall(asked)
        other.shutdown(socket.SHUT_WR)
        kept._serve(own)
        try:
            said = other.recv(1 << 16)
        except ConnectionResetError:  # the first word: what was no request is thrown away with all after it
            said = other.recv(1 << 16)
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
    own, other = socket.socketpair()
    with other, mock.patch("hvdlite.second_copy._available_bytes", return_value=2 * room_bytes):
        other.sendall(sent)
        other.shutdown(socket.SHUT_WR)
        copy.serve(own, lambda: True, lambda complaint: None)
    assert copy.number == newest
    assert not newest or os.pread(copy._file, len(sent), 0) == commit
    copy.drop()


def byte_stream(data: bytes) -> None:
    """What goes in comes out at every reader, whatever is written and read in turns; words that make no sense give
    no more than the stream holds."""
    capacity, readers = 32, 2
    memory = np.zeros(ByteStream.bytes_needed(readers, capacity), np.uint8)
    first, *others = (ByteStream(memory.data, memory.ctypes.data, readers, capacity) for _ in range(1 + readers))
    written, read, outbox = bytearray(), [bytearray() for _ in others], bytearray()
    for piece in parts(data):
        written += piece
        outbox += piece
        first.write(outbox)
        reader = piece[0] % readers
        read[reader] += others[reader].read(reader)
    while outbox or any(len(one) < len(written) for one in read):
        first.write(outbox)
        for reader, other in enumerate(others):
            read[reader] += other.read(reader)
    assert all(one == written for one in read)
    memory[: 64 * (1 + readers)] = np.resize(np.frombuffer(data or b"\0", np.uint8), 64 * (1 + readers))
    for reader, other in enumerate(others):
        with suppress(OverflowError, TypeError):
            assert len(other.read(reader)) <= 2 * capacity


def trace(data: bytes) -> None:
    """A file that is no trace is refused, by those who read it, merge it, or begin a new one in its place."""
    with tempfile.TemporaryDirectory(dir=_memory()) as directory:
        path, out = Path(directory, "trace.json"), Path(directory, "out.json")
        path.write_bytes(data)
        with suppress(TraceError):
            merge_traces(str(out), [str(path)])
            json.loads(out.read_bytes())
        file = TraceFile(str(path), 7)
        file.open([b'{"ph":"M","pid":0,"name":"process_name"}'])
        file.append([b'{"ph":"X","pid":0,"name":"a"}'])
        file.complete()
        assert json.loads(path.read_bytes())["traceEvents"][-1]["name"] == "a"


def hostfile(data: bytes) -> None:
    """Names that mpirun and ssh take for nothing else; as in what a scheduler says, or the user's script."""
    text = data.decode("utf-8", "replace")
    first, _, rest = text.partition("\n")
    with tempfile.TemporaryDirectory(dir=_memory()) as directory:
        path = Path(directory, "hosts")
        path.write_bytes(data)
        _check_hosts(lambda: read_hostfile(str(path)))
        for environ in (
            {"PBS_NODEFILE": str(path)},
            {"LSB_MCPU_HOSTS": text},
            {"SLURM_JOB_NODELIST": first, "SLURM_TASKS_PER_NODE": rest},
        ):
            _check_hosts(lambda environ=environ: found.hosts if (found := find_allocation(environ)) else ())
        _check_hosts(lambda: printed_hosts(text, 2))


def _check_hosts(read: Callable[[], Iterable[JobHost]]) -> None:
    with suppress(ConfigError):
        for host in read():
            assert host.name[0] != "-" and host.name.isascii() and not set(host.name) & set(" ,:/$`;\\\"'\n\0")
            assert 0 < host.slots < 1_000_000


def settings(data: bytes) -> None:
    """Settings and interfaces, as users write them."""
    text = data.decode("utf-8", "surrogateescape")
    for names in ("FUSION_THRESHOLD", "START_TIMEOUT", "IDLE_SECONDS", "AUTOTUNE", "LOG_LEVEL", "CYCLE_TIME"):
        with suppress(ConfigError):
            config = Config.from_env({f"HVDLITE_{names}": text})
            assert 0 < config.start_timeout_s <= 1e9 and config.idle_s > 0 and 0 <= config.cycle_ms <= 1e9
    with suppress(ConfigError):
        select(text, [Interface("eth0", "192.0.2.1", up=True, loopback=False)])


def _memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def _said(capacity: int) -> bytes:
    encoder = Encoder(capacity)
    for message in itertools.chain(MESSAGES, MESSAGES):
        encoder.send(message)
    return bytes(encoder.outbox)


_EVENTS = [{"ph": "X", "pid": 0, "name": "a"}]
_TRACE = {"otherData": {"hvdlite": "timeline 1", "origin_ns": "7"}, "traceEvents": _EVENTS}

_SAID_BY_SENTINEL = bytes(4) + written(Failed(3, "ValueError: \ud800 nan")) + bytes(4) + written(Goodbye(1))

TARGETS = {
    "decoder": Fuzzed(decoder, [_said(0), _said(8)]),
    "requests": Fuzzed(requests, [bytes(range(100)), b"\3layer.weight\xff"]),
    "tree": Fuzzed(tree, [b"".join(struct.pack("<I", n) + bytes(n) for n in (0, 5, 40))]),
    "hello": Fuzzed(hello, [bytes(24 + 32), bytes(48)]),
    "sentinel": Fuzzed(sentinel, [_SAID_BY_SENTINEL, _SAID_BY_SENTINEL[8:], b'{"failed": Infinity, "text": ""}']),
    "call_messages": Fuzzed(call_messages, [struct.pack("<Q", 3) + bytes(32) + b"abc" + bytes(32)]),
    "told": Fuzzed(told, [plain.dumps((None, {"a": [1.5, b"b"]}, Config(), Failed(3, "")))]),
    "keeper": Fuzzed(keeper, [b"".join(MESSAGE.pack(word, 1 << 32) for word in ASKED)]),
    "second_copy": Fuzzed(second_copy, [struct.pack("<QQ3sQQQQ", 5, 3, b"abc", 0, 0, 4, 1 << 40)]),
    "byte_stream": Fuzzed(byte_stream, [bytes(range(200))]),
    "trace": Fuzzed(trace, [json.dumps(_TRACE).encode()]),
    "hostfile": Fuzzed(hostfile, [b"node0 slots=2 # a\nuser@node1:4\n\n-o\n", b"a[01-03,7]x,b\n2(x4),1", b"a 2 b 1"]),
    "settings": Fuzzed(settings, [b"1e9", b"^=eth0,ib", b"-inf", b"true"]),
}


def cases(name: str) -> list[bytes]:
    """What once made target ``name`` raise."""
    return [path.read_bytes() for path in sorted(CASES.glob(f"{name}/*"))]
