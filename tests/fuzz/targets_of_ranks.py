"""What ranks tell one another while they start and while they run; see targets.py."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import socket
import struct
from collections.abc import Sequence
from contextlib import closing, suppress
from unittest import mock

import numpy as np
import torch

from fuzzed import SECRET, Fuzzed, answers_to, parts, said_to
from hvdlite import plain
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
from hvdlite.distributed import links, reach
from hvdlite.distributed.call import call_on, contradiction
from hvdlite.distributed.doors import _CLAIM as CLAIM, Entrance, Guest
from hvdlite.distributed.links import Incoming, Outgoing
from hvdlite.distributed.messages import Arrival, NonsenseError, Offer, Parcel, memory_of
from hvdlite.distributed.work import GroupWork
from hvdlite.errors import CollectiveError, StartupError
from hvdlite.links import link_probe
from hvdlite.links.proof import Caller, Host, new_key
from hvdlite.liveness.sentinel_messages import DamagedError, Failed, Finished, Goodbye, Inbox, read, tellable, written
from hvdlite.node import Node
from hvdlite.operations.barrier import Barrier
from hvdlite.processes import ProcessAddress
from hvdlite.recovery.survivor_meeting import SurvivorMeeting

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
            (passed_on,) = Inbox().feed(written(message._replace(text=tellable(message.text))))
            again = read(passed_on)
            assert isinstance(again, Failed) and (again.rank, again.for_lack) == (message.rank, message.for_lack)
            assert (again.leaver is None) == (message.leaver is None)
        elif message is not None:
            assert read(written(message)[4:]) == message


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


def _said(capacity: int) -> bytes:
    encoder = Encoder(capacity)
    for message in itertools.chain(MESSAGES, MESSAGES):
        encoder.send(message)
    return bytes(encoder.outbox)


def incoming(data: bytes) -> None:
    """Of a process group: messages are those that were sent, or offered, up to where they make no sense."""
    header, memory = links._HEADER, bytes(range(256)) * 256

    def read_memory(process: int, address: int, target: memoryview) -> bool:
        start = address - 1
        if start + len(target) > len(memory):
            return False
        target[:] = memory[start : start + len(target)]
        return True

    sent = rest = data[: 1 << 14]
    expected: list[tuple[int, bytes]] = []
    while len(rest) >= header.size:
        (tag, nbytes, address), rest = header.unpack_from(rest), rest[header.size :]
        body = memory[address - 1 : address - 1 + nbytes] if address else rest[:nbytes]
        if len(body) < nbytes or (address and nbytes < links._OFFERED_BYTES):
            break
        rest = rest if address else rest[nbytes:]
        expected.append((tag, body))
    own, other = socket.socketpair()
    own.setblocking(False)
    came: list[tuple[int, bytes]] = []

    def expect(source: int, tag: int, nbytes: int, offer: Offer | None) -> Arrival:
        return Arrival(source, tag, nbytes, None, offer)

    with own, other, mock.patch.object(reach, "read", read_memory), suppress(OSError, NonsenseError):
        link = Incoming(3, own, 1, expect)
        for piece in parts(sent):
            other.sendall(piece)
            while (arrival := link.read()) is not None:
                if arrival.offer is not None:
                    link.take(arrival)
                came.append((arrival.tag, bytes(arrival.memory)))
    assert came == expected


@functools.cache
def _large() -> torch.Tensor:
    return torch.zeros(links._OFFERED_BYTES, dtype=torch.uint8)


def outgoing(data: bytes) -> None:
    """Of a process group: each offer is taken once; nothing that was to be sent is forgotten."""
    own, other = socket.socketpair()
    own.setblocking(False)
    with own, other:
        link = Outgoing()
        link.link = own
        other.sendall(struct.pack("<q", -1))
        link.hear()
        block = _large()
        link.waiting.extend(Parcel(0, block, memory_of(block), GroupWork(None, [], "send"), 0.0) for _ in range(4))
        offered = [*link.waiting]
        assert not link.write() and len(link.offered) == 4
        taken: list[Parcel] = []
        with suppress(NonsenseError):
            for piece in parts(data[: 1 << 14]):
                other.sendall(piece)
                taken += link.hear()
        assert sorted(map(id, [*taken, *link.drop()])) == sorted(map(id, offered))


def guests(data: bytes) -> None:
    """Of a process group: who comes is one of its ranks; its memory is read only where it proves to have any there."""
    came: list[Guest] = []
    own, other = socket.socketpair()
    with own, other, closing(Entrance("", from_other_nodes=False)) as entrance:
        with closing(entrance.hear(came.append, 3)) as hearing:
            admits = hearing._admit(own, data[: CLAIM.size].ljust(CLAIM.size, b"\0"), b"")
        assert all(admits and guest.rank < 3 and guest.process_with(new_key()) is None for guest in came)


def contradictions(data: bytes) -> None:
    """Of a process group: whatever ranks say of their calls, all of them make the same error of that."""
    said = data.split(b"\n")
    assert str(contradiction("0", said, range(len(said))))


def node(data: bytes) -> None:
    """What a local rank tells is text, with or without a file, and what it shares is memory; or it is named."""
    for local_rank, ask in ((0, lambda node: node._hear(1)), (1, lambda node: node._receive_segment(64))):
        with said_to(data) as (own, _), suppress(CollectiveError):
            one = Node((5,), 0, {}, {}, 1)
            one.ranks, one.local_rank, one.local_size, one._links = (5, 7), local_rank, 2, {1 - local_rank: own}
            text, _ = ask(one)
            assert text.encode() == data[8 : 8 + len(text.encode())]


def link_probes(data: bytes) -> None:
    """A rate is a number, an answer is one to the whole pieces that came; a neighbour that says otherwise is named."""
    small = {"_PIECE": bytes(16), "_PIECES": 2, "_TRIES": 2}
    with mock.patch.multiple(link_probe, **small):
        with said_to(data) as (own, _), suppress(StartupError):
            assert 0 <= link_probe._send(own, "here", "there") < math.inf
        with said_to(data) as (own, other), suppress(StartupError):
            link_probe._answer(own, "here", "there", 0.0)
            assert {nbytes for nbytes, _ in struct.iter_unpack("<Qd", answers_to(other))} <= {0, 16}


def survivors(data: bytes) -> None:
    """Who lives is agreed on by ranks of the last generation; who says what they do not say is named."""
    call, _, answer = data.partition(b"\n")
    said = {"call": call, "answer": answer}
    messages = mock.Mock(receive=lambda source, key: said[key.split()[0]] or None if key[:4] != "join" else None)
    limits = {"silence_s": 0.0, "quiet_s": 0.0, "patience_s": 0.0}
    meeting = SurvivorMeeting(messages, 2, 1, (0, 1), **limits, call=lambda words: None)
    with suppress(StartupError):
        members = meeting.members([], lambda count: "")
        assert 1 in members and {*members} <= {0, 1}


_SAID_BY_SENTINEL = b"".join(
    [
        *(bytes(4), written(Failed(3, "ValueError: \ud800 nan")), bytes(4), written(Goodbye(1)), written(Finished(2))),
        written(Failed(0, "rank 1 has shut down", for_lack=True, leaver=ProcessAddress("boot", 2, 3))),
    ]
)
_SENT = [(0, 3, 0), (1, links._OFFERED_BYTES, 9), (2, 0, 0)]
_CALLS = [call_on("allreduce", torch.Size([shape]), torch.float32).text for shape in (3, 4)]
_PIECES = (struct.pack("<I", 16) + bytes(16)) * 2 + bytes(4)
_MET = [plain.dumps(([0], 1)) + b"\n" + plain.dumps((0, 1)), b"\n" + plain.dumps("they are too few")]

TARGETS = {
    "decoder": Fuzzed(decoder, [_said(0), _said(8)]),
    "requests": Fuzzed(requests, [bytes(range(100)), b"\3layer.weight\xff"]),
    "tree": Fuzzed(tree, [b"".join(struct.pack("<I", n) + bytes(n) for n in (0, 5, 40))]),
    "hello": Fuzzed(hello, [bytes(24 + 32), bytes(48)]),
    "sentinel": Fuzzed(sentinel, [_SAID_BY_SENTINEL, _SAID_BY_SENTINEL[8:], b'{"failed": Infinity, "text": ""}']),
    "told": Fuzzed(told, [plain.dumps((None, {"a": [1.5, b"b"]}, Config(), Failed(3, "")))]),
    "byte_stream": Fuzzed(byte_stream, [bytes(range(200))]),
    "incoming": Fuzzed(incoming, [b"".join(links._HEADER.pack(*one) + b"abc" * (not one[0]) for one in _SENT)]),
    "outgoing": Fuzzed(outgoing, [struct.pack("<5q", 2, 0, -1, 3, 1)]),
    "guests": Fuzzed(guests, [CLAIM.pack(2, True, 1), CLAIM.pack(0, False, 0)]),
    "contradictions": Fuzzed(contradictions, [b"\n".join(_CALLS), _CALLS[0][:30] + b"\n" + _CALLS[1] + bytes(9)]),
    "node": Fuzzed(node, [struct.pack("<Q", 4) + b"text"]),
    "link_probes": Fuzzed(link_probes, [_PIECES * 2, struct.pack("<QdQd", 16, 0.1, 16, 0.2)]),
    "survivors": Fuzzed(survivors, _MET),
}
