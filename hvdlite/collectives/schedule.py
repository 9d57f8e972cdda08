"""What a rank sends and receives in a collective between nodes, piece by piece: pure, from sizes and ranks alone.

So every rank knows what the others send it. Algorithms (algorithms.py) write schedules; pipeline.py executes them, and
of those that come again bound.py the short ones and bound_pipeline.py the long ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.memory.layout import Range
from hvdlite.memory.views import Buffer

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
    """Elements [start, stop) to rank ``to``, once the first ``after`` of the schedule's receives are taken in."""

    to: int
    start: int
    stop: int
    after: int


class Receive(NamedTuple):
    """Elements [start, stop) from rank ``source``, taken in once the first ``after`` of the schedule's sends have left.

    ``fold`` None: what arrives replaces what is there.
    """

    source: int
    start: int
    stop: int
    fold: Fold | None
    after: int


class Schedule:
    """What a rank sends and receives, written down as if it did one thing after another.

    A pipeline sends each piece as soon as what it depends on has arrived, and receives ahead. What one rank sends
    another stands in the same order in both schedules. What arrives in the place of something sent before must be cut
    as that was.

    Args:
        piece_numel: most elements of one message.

    Attributes:
        outgoing: in the order in which they go.
        arriving: in the order in which they are taken in.
        scaled: elements that are multiplied by ``scale`` before anything is sent.
    """

    def __init__(self, piece_numel: int) -> None:
        self.outgoing: list[Send] = []
        self.arriving: list[Receive] = []
        self.scaled: Sequence[Range] = ()
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

    def scale_first(self, elements: Sequence[Range], scale: float) -> None:
        """Multiply ``elements`` by ``scale`` before anything is sent; at most once in a schedule."""
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


ReduceCall = tuple[list[int], list[int], int, DType, ReduceOp, float, float]
"""The arguments of a call of `_native.reduce`."""


def first_scale(schedule: Schedule, buf: Buffer) -> list[ReduceCall]:
    """What is to be done before anything is sent."""
    if schedule.scale == 1.0:
        return []
    calls: list[ReduceCall] = []
    for start, stop in schedule.scaled:
        own = [buf.address + start * buf.dtype.itemsize]
        calls.append((own, own, stop - start, buf.dtype, ReduceOp.SUM, schedule.scale, 1.0))
    return calls


def scaling(buf: Buffer, reduction: Reduction) -> list[ReduceCall]:
    """What a reduction over one rank is."""
    _, prescale, postscale = reduction
    if prescale == 1.0 and postscale == 1.0:
        return []
    return [([buf.address], [buf.address], buf.numel, buf.dtype, ReduceOp.SUM, prescale, postscale)]


def additions(piece: Receive, buf: Buffer, arrived: int) -> list[ReduceCall]:
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
