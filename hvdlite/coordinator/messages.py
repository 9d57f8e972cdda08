"""What coordinators say to one another, and its wire form.

A *request* describes an operation the same way on every rank (request.py). A *claim* says that ranks are ready for it
and climbs from a rank to its node leader and up the tree of leaders. A *response* says that every rank is ready,
a *fault* that they contradict one another, a *notice* is everything rare; these come down from the root as one
ordered log.

Each link (rank to leader, leader to parent, root to all) is a reliable byte stream with a codebook of its own:
the first time a request passes it is spelled out and given a slot, afterwards the slot is sent. Only the
sender decides which slot to reuse, and a stream keeps its order, so the two ends never disagree about a slot.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from hvdlite.coordinator.request import Key, Request

KNOWN_REQUESTS = 1024
"""The most operations of which it is remembered what follows from their requests, as they come again in every step."""


REMEMBERED_PLANS = 64
"""So many plans back a rank knows what they were."""


@dataclass(frozen=True, slots=True)
class Claim:
    """``ranks`` (None: all that the sender speaks for) are ready for ``request``."""

    request: Request
    sequence: int
    ranks: tuple[int, ...] | None = None

    @property
    def key(self) -> Key:
        return self.request.name, self.sequence


@dataclass(frozen=True, slots=True)
class Response:
    """Every rank is ready. ``last``: where all have departed, the rank that did so last; else -1."""

    request: Request
    sequence: int
    last: int = -1
    key: Key = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.request.name, self.sequence))


@dataclass(frozen=True, slots=True)
class Fault:
    """The ranks contradict one another about ``key``; every rank raises ``text``."""

    key: Key
    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Anything rare: shutdown, timeline, stall query and answer; ``content`` is JSON."""

    content: dict[str, Any]

    @property
    def has_a_place(self) -> bool:
        """Whether all ranks have to have done the same operations before it: nobody does any after the end, and where
        the timeline stops ranks meet."""
        return self.content["kind"] in ("shutdown", "timeline_start", "timeline_stop")


@dataclass(frozen=True, slots=True)
class EndOfBatch:
    """The responses since the last one may be fused: the boundary is part of the log, so that all ranks fuse alike."""


class Verb(IntEnum):
    """What a message about the frozen plan says, and what its count is."""

    HOLD = 0  # from the root: hold new claims back, and say where you have paused in so many operations
    HELD = 1  # to the root: done; how many operations of the plan are ready. Without a plan: 0, or -1 if claims wait
    RESUME = 2  # from the root: go on as before
    FREEZE = 3  # from the root: the plan is as many operations as the log ended with
    READY = 4  # to the parent: operations that all ranks below are ready for
    GO = 5  # from the root: operations that all ranks are ready for
    BREAK = 6  # to the root: the plan will not come true; before which operation of it somebody waits, 0 for none; or
    # `TOO_SHORT`
    END = 7  # from the root: of the plan only so many operations will be done
    RELEASE = 8  # from the root: as FREEZE, but no GO will come: each rank sees for itself what all are ready for
    REOPEN = 9  # from the root: END, and what was claimed is not: an earlier plan begins anew, which runs free


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """About the frozen plan, see plan_member.py."""

    verb: Verb
    count: int = 0
    is_begun: bool = False  # the operation after ``count`` is, on some node
    places: tuple[int, ...] = ()  # in the period. HELD: of what came after a pause; RELEASE, REOPEN: where bursts begin
    plan: int = 0  # REOPEN: its number
    first: int = 0  # REOPEN: at which place of its period it begins


TOO_SHORT = -1
"""In place of a count: several periods of the plan could be one."""

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
            beside = [message.places, message.plan, message.first]
            payload = json.dumps(beside).encode() if any(beside) else b""
            self._frame(_PLAN, payload, message.verb + message.is_begun * len(_VERBS), message.count)
        elif isinstance(message, Claim):
            self.written.claims += 1
            payload = b"" if message.ranks is None else json.dumps(message.ranks).encode()
            self._frame(_CLAIM, payload, self._slot(message.request), message.sequence)
        elif isinstance(message, Response):
            payload = b"" if message.last < 0 else json.dumps(message.last).encode()
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
            self._frame(_DEFINE, pickle.dumps(request), 0)
            return 0
        slot = self._slots.popitem(last=False)[1] if len(self._slots) >= self._capacity else len(self._slots)
        self._slots[request] = slot
        self._frame(_DEFINE, pickle.dumps(request), slot)
        return slot

    def _frame(self, tag: int, payload: bytes, slot: int = 0, sequence: int = 0) -> None:
        self.outbox += _FRAME.pack(tag, slot, sequence, len(payload))
        self.outbox += payload


class Decoder:
    """The receiving end of a link, whose other end is known to be a rank of the job: requests are unpickled."""

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
                is_begun, verb = divmod(slot, len(_VERBS))
                places, plan, first = _loads(payload) if payload else ((), 0, 0)
                yield PlanMessage(_VERBS[verb], sequence, is_begun == 1, tuple(places), plan, first)
            elif tag == _DEFINE:
                self._requests[slot] = pickle.loads(payload)
            else:
                yield self._message(tag, slot, sequence, payload)
        self._inbox = data[start:]

    def _message(self, tag: int, slot: int, sequence: int, payload: bytes) -> Message:
        if tag == _CLAIM:
            return Claim(self._requests[slot], sequence, tuple(_loads(payload)) if payload else None)
        if tag == _RESPONSE:
            return Response(self._requests[slot], sequence, _loads(payload) if payload else -1)
        if tag == _FAULT:
            name, number, text = _loads(payload)
            return Fault((name, number), text)
        if tag == _NOTICE:
            return Notice(_loads(payload))
        assert tag == _END_OF_BATCH, tag
        return EndOfBatch()


def _loads(payload: bytes) -> Any:
    """Raises ValueError where it is no JSON, or nested too deeply to be read."""
    try:
        return json.loads(payload)
    except RecursionError:
        raise ValueError(f"{len(payload)} bytes of JSON are nested too deeply") from None
