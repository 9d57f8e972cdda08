"""Operations of which ranks tell one another how much they give, and give it with that if it is little.

Where a program repeats one within a node, and waits for it, it is one native call as long as ranks give as much as
the last time (prepared_telling.py).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hvdlite.collectives.node_gather import NodeGather
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, Reduction
from hvdlite.engine import Engine
from hvdlite.memory.layout import Layout, align_up
from hvdlite.memory.packets import Packets, Piece
from hvdlite.operations.one_allreduce import OneAllreduce
from hvdlite.recorder import Lane

if TYPE_CHECKING:
    from hvdlite._native import TensorList

_LEAST_ROOM = 64
_ROOM_UNIT = 512  # as there are packets for each size


class Told(NamedTuple):
    """What all ranks have told.

    Attributes:
        numbers: by rank.
        packets: where their bytes are, if there was room for those of all; else they have yet to be given.
    """

    numbers: Sequence[Sequence[int]]
    packets: Packets | NodeGather | None


@dataclass(frozen=True, eq=False)
class Telling(OneAllreduce):
    """Such a kind of operation."""

    is_ragged = True
    repeats = True
    is_alltoall: ClassVar[bool] = False
    """Each rank gets other rows, and is told a number of its own."""
    lane: ClassVar[Lane]
    """In which the timeline shows it."""

    @abstractmethod
    def packet(self, size: int) -> tuple[int, int]:
        """How many numbers each of ``size`` ranks tells, and the bytes of a row for each whom it gives one."""

    @abstractmethod
    def numbers(self, submission: Submission) -> Sequence[int]:
        """Those of this rank."""

    @abstractmethod
    def pieces(self, submission: Submission) -> Sequence[Piece]:
        """What this rank gives."""

    @abstractmethod
    def nbytes(self, numbers: Sequence[int]) -> int:
        """How much a rank gives that tells ``numbers``."""

    @abstractmethod
    def column(self, rank: int) -> int:
        """Of the numbers of each rank, which counts the rows for ``rank``; of one tensor."""

    @cached_property
    def row_bytes(self) -> Sequence[int]:
        """Of each tensor."""
        return [math.prod(spec.shape) * spec.dtype.itemsize for spec in self.tensors]

    def tell(self, engine: Engine, submission: Submission, label: str) -> Told:
        """What all ranks tell, this one by ``submission``."""
        packets, own, gather = self._packets(engine), self.numbers(submission), engine.backend.gather
        if gather is not None and gather.takes(len(own)):
            with engine.recorder.span(self.lane, label, self.nbytes(own)):
                numbers = gather.tell(own, self.pieces(submission), label)
            return Told(numbers, gather if max(map(self.nbytes, numbers)) <= gather.room(len(own)) else None)
        if packets is None:
            return Told(engine.exchange.tell(own, label), None)
        self.reduce(engine, submission, packets.layout, label)
        numbers = packets.numbers
        return Told(numbers, packets if max(map(self.nbytes, numbers)) <= packets.room else None)

    def _packets(self, engine: Engine) -> Packets | None:
        if engine.early is None:
            return None
        width, wanted = self.packet(engine.size)
        return engine.packets(width, _LEAST_ROOM if wanted <= _LEAST_ROOM else align_up(wanted, _ROOM_UNIT))

    def layout_in(self, engine: Engine) -> Layout | None:
        packets = self._packets(engine)
        return None if packets is None else packets.layout

    def early_layout(self, engine: Engine) -> Layout | None:
        """None: where there is no room for what they give, ranks wait inside for others, which have to be at it."""
        return None

    def sources(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        packets = self._packets(engine)
        assert packets is not None, self
        packets.write(self.numbers(submission), self.pieces(submission))
        return packets.sources

    def targets(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        packets = self._packets(engine)
        assert packets is not None, self
        return packets.targets

    def reduced_by(self, engine: Engine, layout: Layout) -> Reduction:
        return SUM
