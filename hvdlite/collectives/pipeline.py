"""Pieces of a buffer that travel between ranks, each sent on as soon as it is there.

What moves is a `Plan`, which depends on sizes and ranks only, so every rank knows what the others send it; how it
moves is `run`. The plans of each algorithm are in plans.py.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hvdlite import _native
from hvdlite.collectives.base import Range
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.memory import Buffer

if TYPE_CHECKING:
    from mpi4py import MPI

    from hvdlite.collectives.requests import Endpoint

_SHORTEST_NAP_S, _LONGEST_NAP_S = 60e-6, 1e-3  # a shorter one takes as long, by the slack of the kernel's timers
WINDOW = 8  # pieces on their way at a time, in each direction


@dataclass(frozen=True, slots=True)
class Fold:
    """``own = postscale * op(prescale * arrived, prescale * own_scale * own)``; with ``own_first``, own comes first."""

    op: ReduceOp
    own_scale: float = 1.0
    prescale: float = 1.0
    postscale: float = 1.0
    own_first: bool = False


class Send(NamedTuple):
    """Elements [start, stop) to rank ``to``, once the first ``after`` of the plan's receives are taken in."""

    to: int
    start: int
    stop: int
    after: int


class Receive(NamedTuple):
    """Elements [start, stop) from rank ``source``, taken in once the first ``after`` of the plan's sends have left.

    ``fold`` None: what arrives replaces what is there.
    """

    source: int
    start: int
    stop: int
    fold: Fold | None
    after: int


class Plan:
    """What a rank sends and receives, written down as if it did one thing after another.

    Whoever runs it sends each piece as soon as what it depends on has arrived, and receives ahead. What one rank sends
    another stands in the same order in both plans. What arrives in the place of something sent before must be cut as
    that was.

    Args:
        piece_numel: most elements of one message.

    Attributes:
        outgoing: in the order in which they go.
        arriving: in the order in which they are taken in.
        scaled: elements [start, stop) that are multiplied by ``scale`` before anything is sent.
    """

    def __init__(self, piece_numel: int) -> None:
        self.outgoing: list[Send] = []
        self.arriving: list[Receive] = []
        self.scaled: Range = (0, 0)
        self.scale = 1.0
        self._piece_numel = piece_numel
        self._sent: dict[int, int] = {}  # how many sends there are up to the last one of a piece, by its start
        self._rounds: list[tuple[list[int], list[int], list[int]]] = []  # starts, stops and numbers of what arrives

    def send(self, to: int, ranges: Iterable[Range], *, backwards: bool = False) -> None:
        """Send ``ranges`` as they are after all receives so far; ``backwards``: the last piece first."""
        for start, stop in self._cut(ranges, backwards):
            self.outgoing.append(Send(to, start, stop, self._arrivals(start, stop)))
            self._sent[start] = len(self.outgoing)

    def receive(
        self, source: int, ranges: Iterable[Range], fold: Fold | None = None, *, backwards: bool = False
    ) -> None:
        """Receive what ``source`` sends as the same ``ranges``."""
        pieces = self._cut(ranges, backwards)
        numbers = range(len(self.arriving) + 1, len(self.arriving) + len(pieces) + 1)
        self.arriving += [Receive(source, start, stop, fold, self._sent.get(start, 0)) for start, stop in pieces]
        by_start = sorted(zip(pieces, numbers, strict=True))
        self._rounds.append(
            ([start for (start, _), _ in by_start], [stop for (_, stop), _ in by_start], [n for _, n in by_start])
        )

    def scale_first(self, elements: Range, scale: float) -> None:
        """Multiply ``elements`` by ``scale`` before anything is sent; at most once in a plan."""
        self.scaled, self.scale = elements, scale

    def _cut(self, ranges: Iterable[Range], backwards: bool) -> list[Range]:
        pieces = cut(ranges, self._piece_numel)
        return pieces[::-1] if backwards else pieces

    def _arrivals(self, start: int, stop: int) -> int:
        """How many receives there are up to the last one into [start, stop)."""
        for starts, stops, numbers in reversed(self._rounds):
            first, last = bisect_right(stops, start), bisect_left(starts, stop)
            if first < last:
                return max(numbers[first:last])
        return 0


def cut(ranges: Iterable[Range], piece_numel: int) -> list[Range]:
    """``ranges`` in order as pieces of at most ``piece_numel`` elements; ranges that touch are joined first."""
    return [
        (begin, min(begin + piece_numel, stop))
        for start, stop in _joined(ranges)
        for begin in range(start, stop, piece_numel)
    ]


def _joined(ranges: Iterable[Range]) -> Iterator[Range]:
    start = stop = 0
    for next_start, next_stop in ranges:
        if next_start == stop:
            stop = next_stop
            continue
        yield start, stop
        start, stop = next_start, next_stop
    yield start, stop


def run(plan: Plan, buf: Buffer, endpoint: Endpoint, scratch: int, slot_bytes: int) -> None:
    """Execute ``plan`` on this rank's copy of ``buf``: a `Run` from start to finish."""
    execution = Run(plan, buf, endpoint, scratch, slot_bytes)
    execution.start()
    execution.finish()


class Run:
    """The execution of a plan on this rank's copy of ``buf``: how far sends and receives have come.

    Args:
        scratch: address of `WINDOW` slots of ``slot_bytes``, each at least a piece; used until `finish` returns.
    """

    def __init__(self, plan: Plan, buf: Buffer, endpoint: Endpoint, scratch: int, slot_bytes: int) -> None:
        self._plan = plan
        self._outgoing = plan.outgoing
        self._arriving = plan.arriving
        self._sent = 0
        self._posted = 0
        self._arrived = 0
        self._sends: deque[MPI.Request] = deque()
        self._receives: deque[MPI.Request] = deque()
        self._buf = buf
        self._address = buf.address
        self._itemsize = buf.dtype.itemsize
        self._endpoint = endpoint
        self._scratch = scratch
        self._slot_bytes = slot_bytes
        self._first_arrival_s = 0.0

    def start(self) -> None:
        """Put the first pieces on their way."""
        for reduction in first_scale(self._plan, self._buf):
            _native.reduce(*reduction)
        self._send_ready()
        self._post_receives()

    def finish(self) -> None:
        """Return once all that this rank does is done. Raises like `Endpoint.until`."""
        for piece in self._arriving:
            if not self._next_is_here():
                self._endpoint.until(self._next_is_here, piece.source, self._nap_s())
            self._receives.popleft()
            if self._arrived == 0:
                self._first_arrival_s = time.monotonic()
            for reduction in additions(piece, self._buf, self._slot(self._arrived)):
                _native.reduce(*reduction)
            self._arrived += 1
        if self._outgoing:
            self._endpoint.until(self._all_is_sent, self._outgoing[-1].to)

    def _nap_s(self) -> float:
        """How long what has been posted keeps the network busy, with a margin; 0 where nobody knows, or it is short.

        Kernels take in what comes meanwhile. Whoever looks more often takes time from backward and gains none.
        """
        left = len(self._arriving) - self._arrived
        if self._arrived < 2:
            return 0.0
        per_piece_s = (time.monotonic() - self._first_arrival_s) / (self._arrived - 1)
        nap_s = min(per_piece_s * min(left, WINDOW) / 4, _LONGEST_NAP_S)
        return nap_s if nap_s > _SHORTEST_NAP_S else 0.0

    def _next_is_here(self) -> bool:
        self._send_ready()
        self._post_receives()
        return (
            bool(self._receives) and self._receives[0].Test() and self._have_left(self._arriving[self._arrived].after)
        )

    def _all_is_sent(self) -> bool:
        self._send_ready()
        return self._have_left(len(self._outgoing))

    def _send_ready(self) -> None:
        while self._sent < len(self._outgoing):
            to, start, stop, after = self._outgoing[self._sent]
            # Not all at once: what the receiver has not asked for yet would be buffered, and so copied, there.
            if after > self._arrived or not self._have_left(self._sent - WINDOW + 1):
                return
            address, nbytes = self._address + start * self._itemsize, (stop - start) * self._itemsize
            self._sends.append(self._endpoint.send(address, nbytes, to))
            self._sent += 1

    def _have_left(self, count: int) -> bool:
        """Whether the first ``count`` sends are done."""
        while self._sent - len(self._sends) < count:
            if not self._sends or not self._sends[0].Test():
                return False
            self._sends.popleft()
        return True

    def _post_receives(self) -> None:
        while self._posted < min(self._arrived + WINDOW, len(self._arriving)):
            source, start, stop, fold, after = self._arriving[self._posted]
            if fold is not None:
                address = self._slot(self._posted)
            elif self._have_left(after):
                address = self._address + start * self._itemsize
            else:
                return
            self._receives.append(self._endpoint.receive(address, (stop - start) * self._itemsize, source))
            self._posted += 1

    def _slot(self, index: int) -> int:
        return self._scratch + index % WINDOW * self._slot_bytes


Reduction = tuple[list[int], list[int], int, DType, ReduceOp, float, float]
"""The arguments of a call of `_native.reduce`."""


def first_scale(plan: Plan, buf: Buffer) -> list[Reduction]:
    """What is to be done before anything is sent."""
    start, stop = plan.scaled
    if start == stop or plan.scale == 1.0:
        return []
    own = [buf.address + start * buf.dtype.itemsize]
    return [(own, own, stop - start, buf.dtype, ReduceOp.SUM, plan.scale, 1.0)]


def additions(piece: Receive, buf: Buffer, arrived: int) -> list[Reduction]:
    """What is to be done with ``piece``, which lies at the address ``arrived`` if it is to be folded."""
    fold = piece.fold
    if fold is None:
        return []
    own = buf.address + piece.start * buf.dtype.itemsize
    numel = piece.stop - piece.start
    operands = [own, arrived] if fold.own_first else [arrived, own]
    folded = ([own], operands, numel, buf.dtype, fold.op, fold.prescale, fold.postscale)
    if fold.own_scale == 1.0:
        return [folded]
    return [([own], [own], numel, buf.dtype, ReduceOp.SUM, fold.own_scale, 1.0), folded]
