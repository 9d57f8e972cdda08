"""What coordinators say to one another, and its wire form.

A *request* describes an operation the same way on every rank. A *claim* says that ranks are ready for it and
climbs from a rank to its node leader and up the tree of leaders. A *response* says that every rank is ready,
a *fault* that they contradict one another, a *notice* is everything rare; these come down from the root as one
ordered log.

Each link (rank to leader, leader to parent, root to all) is a reliable byte stream with a codebook of its own:
the first time a request passes it is spelled out and given a slot, afterwards the slot is sent. Only the
sender decides which slot to reuse, and a stream keeps its order, so the two ends never disagree about a slot.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from hvdlite.dtypes import DType, ReduceOp

NAMED = -1
"""Sequence number of an operation that the user named; unnamed ones count per operation."""

KNOWN_REQUESTS = 1024
"""The most operations of which it is remembered what follows from their requests, as they come again in every step."""


class Kind(IntEnum):
    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    BARRIER = 3
    ALLOCATE = 4
    ALLTOALL = 5
    REDUCESCATTER = 6
    JOIN = 7
    ADD_PROCESS_SET = 8
    REMOVE_PROCESS_SET = 9
    CONFIGURE = 10

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as it must be on every rank; ``shape`` leaves out dimension 0 where that may differ between ranks."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """An operation as it must be on every rank; `place` alone may differ (then the tensors are copied)."""

    kind: Kind
    name: str
    tensors: tuple[TensorSpec, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    wire_dtype: DType | None = None
    nbytes: int = 0  # of an ALLOCATE
    device: str = "cpu"
    place: tuple[int, int] | None = None
    ranks: tuple[int, ...] = ()  # of a process set
    needs_all: bool = False  # an error where a rank has joined
    settings: tuple[int, ...] = ()  # of a CONFIGURE
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # Looked up at every submission: hash the nested tuples once.
        object.__setattr__(
            self,
            "_hash",
            hash((self.kind, self.name, self.tensors, self.op, self.root, self.nbytes, self.place, self.ranks)),
        )

    def __hash__(self) -> int:
        return self._hash

    def at(self, place: tuple[int, int] | None) -> Request:
        return self if self.place == place else replace(self, place=place)

    def to_json(self) -> bytes:
        return json.dumps(
            [
                self.kind, self.name, [[t.name, t.dtype, t.shape] for t in self.tensors], self.op,
                self.prescale, self.postscale, self.root, self.wire_dtype, self.nbytes, self.device, self.place,
                self.ranks, self.needs_all, self.settings,
            ]
        ).encode()  # fmt: skip

    @classmethod
    def from_json(cls, data: bytes) -> Request:
        (
            kind, name, tensors, op, prescale, postscale, root, wire_dtype, nbytes, device, place, ranks, needs_all,
            settings,
        ) = json.loads(data)  # fmt: skip
        return cls(
            Kind(kind), name, tuple(TensorSpec(n, DType(d), tuple(s)) for n, d, s in tensors), ReduceOp(op),
            prescale, postscale, root, None if wire_dtype is None else DType(wire_dtype), nbytes, device,
            None if place is None else (place[0], place[1]), tuple(ranks), needs_all, tuple(settings),
        )  # fmt: skip


Key = tuple[str, int]
"""(name, sequence): what ranks must agree on to mean the same operation."""

Sizes = tuple[int, ...]
"""What may differ per rank: dimension 0 of every tensor of an allgather, rows for every rank of an alltoall."""


@dataclass(frozen=True, slots=True)
class Claim:
    """``ranks`` (None: all that the sender speaks for) are ready for ``request``; ``sizes`` in the order of ranks."""

    request: Request
    sequence: int
    ranks: tuple[int, ...] | None = None
    sizes: tuple[Sizes, ...] = ()

    @property
    def key(self) -> Key:
        return self.request.name, self.sequence


@dataclass(frozen=True, slots=True)
class Response:
    """Every rank is ready; ``sizes`` by rank, or empty."""

    request: Request
    sequence: int
    sizes: tuple[Sizes, ...] = ()

    @property
    def key(self) -> Key:
        return self.request.name, self.sequence


@dataclass(frozen=True, slots=True)
class Fault:
    """The ranks contradict one another about ``key``; every rank raises ``text``."""

    key: Key
    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Anything rare: shutdown, timeline, stall query and answer; ``content`` is JSON."""

    content: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EndOfBatch:
    """The responses since the last one may be fused: the boundary is part of the log, so that all ranks fuse alike."""


class Verb(IntEnum):
    """What a message about the frozen plan says, and what its count is."""

    HOLD = 0  # from the root: hold new claims back
    HELD = 1  # to the root: done; how many operations of the plan are ready. Without a plan: 0, or -1 if claims wait
    RESUME = 2  # from the root: go on as before
    FREEZE = 3  # from the root: the plan is as many operations as the log ended with
    READY = 4  # to the parent: operations that all ranks below are ready for
    GO = 5  # from the root: operations that all ranks are ready for
    BREAK = 6  # to the root: the plan will not come true
    END = 7  # from the root: of the plan only so many operations will be done


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """About the frozen plan, see frozen_plan.py."""

    verb: Verb
    count: int = 0


Message = Claim | Response | Fault | Notice | EndOfBatch | PlanMessage

_FRAME = struct.Struct("<BIqI")  # tag, slot, sequence, bytes of payload
_VERBS = tuple(Verb)
_DEFINE, _CLAIM, _RESPONSE, _FAULT, _NOTICE, _END_OF_BATCH, _PLAN = range(7)


@dataclass(slots=True)
class Written:
    """How often an encoder sent a claim; a request by its slot; a request spelled out."""

    claims: int = 0
    cached: int = 0
    spelled_out: int = 0


class Encoder:
    """The sending end of a link: appends messages to `outbox`, which the link takes bytes from."""

    def __init__(self, capacity: int) -> None:
        self.outbox = bytearray()
        self.written = Written()
        self._capacity = capacity
        self._slots: OrderedDict[Request, int] = OrderedDict()  # least recently used first

    def send(self, message: Message) -> None:
        if isinstance(message, PlanMessage):
            self._frame(_PLAN, b"", message.verb, message.count)
        elif isinstance(message, Claim):
            self.written.claims += 1
            varies = message.ranks is not None or message.sizes
            payload = json.dumps([message.ranks, message.sizes]).encode() if varies else b""
            self._frame(_CLAIM, payload, self._slot(message.request), message.sequence)
        elif isinstance(message, Response):
            payload = json.dumps(message.sizes).encode() if message.sizes else b""
            self._frame(_RESPONSE, payload, self._slot(message.request), message.sequence)
        elif isinstance(message, Fault):
            self._frame(_FAULT, json.dumps([*message.key, message.text]).encode())
        elif isinstance(message, Notice):
            self._frame(_NOTICE, json.dumps(message.content).encode())
        else:
            self._frame(_END_OF_BATCH, b"")

    def _slot(self, request: Request) -> int:
        slot = self._slots.get(request)
        if slot is not None:
            self.written.cached += 1
            self._slots.move_to_end(request)
            return slot
        self.written.spelled_out += 1
        if self._capacity == 0:
            self._frame(_DEFINE, request.to_json(), 0)
            return 0
        slot = self._slots.popitem(last=False)[1] if len(self._slots) >= self._capacity else len(self._slots)
        self._slots[request] = slot
        self._frame(_DEFINE, request.to_json(), slot)
        return slot

    def _frame(self, tag: int, payload: bytes, slot: int = 0, sequence: int = 0) -> None:
        self.outbox += _FRAME.pack(tag, slot, sequence, len(payload))
        self.outbox += payload


class Decoder:
    """The receiving end of a link."""

    def __init__(self) -> None:
        self._inbox = b""  # what has no end yet
        self._requests: dict[int, Request] = {}

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that ``data`` completes; exhaust it before the next call."""
        if self._inbox:
            data = self._inbox + data
        start = 0
        while len(data) - start >= _FRAME.size:
            tag, slot, sequence, length = _FRAME.unpack_from(data, start)
            end = start + _FRAME.size + length
            if end > len(data):
                break
            payload = data[start + _FRAME.size : end]
            start = end
            if tag == _PLAN:
                yield PlanMessage(_VERBS[slot], sequence)
            elif tag == _DEFINE:
                self._requests[slot] = Request.from_json(payload)
            else:
                yield self._message(tag, slot, sequence, payload)
        self._inbox = data[start:]

    def _message(self, tag: int, slot: int, sequence: int, payload: bytes) -> Message:
        if tag == _CLAIM:
            ranks, sizes = json.loads(payload) if payload else (None, ())
            return Claim(
                self._requests[slot], sequence, None if ranks is None else tuple(ranks), tuple(tuple(s) for s in sizes)
            )
        if tag == _RESPONSE:
            return Response(
                self._requests[slot], sequence, tuple(tuple(s) for s in json.loads(payload)) if payload else ()
            )
        if tag == _FAULT:
            name, number, text = json.loads(payload)
            return Fault((name, number), text)
        if tag == _NOTICE:
            return Notice(json.loads(payload))
        assert tag == _END_OF_BATCH, tag
        return EndOfBatch()
