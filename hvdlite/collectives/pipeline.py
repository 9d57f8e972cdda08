"""Pieces of a buffer that travel around a ring or along a chain, each forwarded as soon as it is there.

What moves is a `Plan`, which depends on sizes and ranks only, so every rank knows what its neighbours send; how
it moves is `run`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdlite import _native
from hvdlite.collectives.base import Range
from hvdlite.dtypes import ReduceOp
from hvdlite.memory import Buffer

if TYPE_CHECKING:
    from mpi4py import MPI

    from hvdlite.collectives.requests import Endpoint

WINDOW = 8  # pieces on their way at a time, in each direction


@dataclass(frozen=True, slots=True)
class Fold:
    """``own = postscale * op(prescale * arrived, prescale * own_scale * own)``."""

    op: ReduceOp
    own_scale: float = 1.0
    prescale: float = 1.0
    postscale: float = 1.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop), one message. ``fold`` None: what arrives replaces what is there."""

    start: int
    stop: int
    fold: Fold | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a rank sends to its right: ``own``, then the first ``forwarded`` of the pieces ``arriving`` from its left.

    Needs at least two ranks.
    """

    own: list[Piece]
    arriving: list[Piece]
    forwarded: int

    @property
    def outgoing(self) -> list[Piece]:
        return self.own + self.arriving[: self.forwarded]

    def then(self, other: Plan) -> Plan:
        """Both plans in one go, where ``other`` starts with what this one forwards no more."""
        assert [(p.start, p.stop) for p in other.own] == [(p.start, p.stop) for p in self.arriving[self.forwarded :]]
        return Plan(self.own, self.arriving + other.arriving, len(self.arriving) + other.forwarded)


def cut(ranges: Iterable[Range], piece_numel: int, fold: Fold | None = None) -> list[Piece]:
    """``ranges`` in order as pieces of at most ``piece_numel`` elements; ranges that touch are joined first."""
    return [
        Piece(begin, min(begin + piece_numel, stop), fold)
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


def plan_reduce_scatter(
    shards: Sequence[Range], rank: int, piece_numel: int, op: ReduceOp, prescale: float, postscale: float
) -> Plan:
    """Ring in which rank r ends with ``shards[r]``, reduced: it starts at rank r + 1 and goes all the way."""
    size = len(shards)
    arriving: list[Piece] = []
    for step in range(size - 1):
        # At the first step both operands are raw; later, what arrives carries the scale already.
        fold = Fold(
            op,
            own_scale=1.0 if step == 0 else prescale,
            prescale=prescale if step == 0 else 1.0,
            postscale=postscale if step == size - 2 else 1.0,
        )
        arriving += cut([shards[(rank - step - 2) % size]], piece_numel, fold)
    last = len(cut([shards[rank]], piece_numel))
    return Plan(cut([shards[(rank - 1) % size]], piece_numel), arriving, len(arriving) - last)


def plan_allgather(blocks: Sequence[Sequence[Range]], rank: int, piece_numel: int) -> Plan:
    """Ring in which ``blocks[r]`` starts at rank r and goes all the way."""
    size = len(blocks)
    arriving: list[Piece] = []
    for step in range(size - 1):
        arriving += cut(blocks[(rank - step - 1) % size], piece_numel)
    last = len(cut(blocks[(rank + 1) % size], piece_numel))
    return Plan(cut(blocks[rank], piece_numel), arriving, len(arriving) - last)


def plan_broadcast(numel: int, root: int, rank: int, size: int, piece_numel: int) -> Plan:
    """Chain from ``root`` to the right, up to the rank on its left."""
    pieces = cut([(0, numel)], piece_numel)
    if rank == root:
        return Plan(pieces, [], 0)
    return Plan([], pieces, 0 if (rank + 1) % size == root else len(pieces))


def run(plan: Plan, buf: Buffer, endpoint: Endpoint, scratch: int, slot_bytes: int) -> None:
    """Execute ``plan`` on this rank's copy of ``buf``. Raises like `Endpoint.until`.

    Args:
        scratch: address of `WINDOW` slots of ``slot_bytes``, each at least a piece.
    """
    _Run(plan, buf, endpoint, scratch, slot_bytes).run()


class _Run:
    """The state of one run: how far sends and receives have come."""

    def __init__(self, plan: Plan, buf: Buffer, endpoint: Endpoint, scratch: int, slot_bytes: int) -> None:
        self._arriving = plan.arriving
        self._outgoing = plan.outgoing
        self._folds = any(piece.fold is not None for piece in plan.arriving)
        self._ready = len(plan.own)  # of the outgoing pieces, how many may be sent
        self._sent = 0
        self._posted = 0
        self._arrived = 0
        self._sends: deque[MPI.Request] = deque()
        self._receives: deque[MPI.Request] = deque()
        self._sending: dict[int, MPI.Request] = {}  # the last send of each piece, by its start
        self._buf = buf
        self._itemsize = buf.dtype.itemsize
        self._endpoint = endpoint
        self._left = (endpoint.rank - 1) % endpoint.size
        self._right = (endpoint.rank + 1) % endpoint.size
        self._slots = [scratch + slot_bytes * slot for slot in range(WINDOW)]

    def run(self) -> None:
        for index, piece in enumerate(self._arriving):
            self._endpoint.until(self._next_is_here, self._left)
            self._receives.popleft()
            self._arrived += 1
            if piece.fold is not None:
                self._fold(piece, piece.fold, self._slots[index % WINDOW])
            self._ready = min(self._ready + 1, len(self._outgoing))
        self._endpoint.until(self._all_is_sent, self._right)

    def _next_is_here(self) -> bool:
        self._send_ready()
        self._post_receives()
        return bool(self._receives) and self._receives[0].Test()

    def _all_is_sent(self) -> bool:
        self._send_ready()
        while self._sends and self._sends[0].Test():
            self._sends.popleft()
        return self._sent == len(self._outgoing) and not self._sends

    def _send_ready(self) -> None:
        # Not all at once: what the neighbour has not asked for yet would be buffered, and so copied, there.
        while self._sent < self._ready:
            if len(self._sends) == WINDOW:
                if not self._sends[0].Test():
                    return
                self._sends.popleft()
            piece = self._outgoing[self._sent]
            request = self._endpoint.send(self._address(piece.start), self._nbytes(piece), self._right)
            self._sends.append(request)
            self._sending[piece.start] = request
            self._sent += 1

    def _post_receives(self) -> None:
        while self._posted < min(self._arrived + WINDOW, len(self._arriving)):
            piece = self._arriving[self._posted]
            if piece.fold is not None:
                address = self._slots[self._posted % WINDOW]
            else:
                # The result of this piece replaces our part of it, which must have left before.
                if self._folds and not self._has_left(piece):
                    return
                address = self._address(piece.start)
            self._receives.append(self._endpoint.receive(address, self._nbytes(piece), self._left))
            self._posted += 1

    def _has_left(self, piece: Piece) -> bool:
        sending = self._sending.get(piece.start)
        return sending is not None and sending.Test()

    def _fold(self, piece: Piece, fold: Fold, arrived: int) -> None:
        own = self._address(piece.start)
        numel = piece.stop - piece.start
        dtype = self._buf.dtype
        if fold.own_scale != 1.0:
            _native.reduce([own], [own], numel, dtype, ReduceOp.SUM, fold.own_scale)
        _native.reduce([own], [arrived, own], numel, dtype, fold.op, fold.prescale, fold.postscale)

    def _address(self, start: int) -> int:
        return self._buf.address + start * self._itemsize

    def _nbytes(self, piece: Piece) -> int:
        return (piece.stop - piece.start) * self._itemsize
