"""Operations of which ranks tell one another how much they give, and give it with that if it is little.

Where a program repeats one, and waits for it, it is one native call as long as ranks give as much as the last time
(prepared_telling.py), between nodes if that is little.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hvdlite._native import PacketRoom
from hvdlite.collectives.node_gather import NodeGather
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import SUM, Reduction
from hvdlite.engine import Engine
from hvdlite.memory.layout import Layout
from hvdlite.memory.packets import Packets, Piece
from hvdlite.operations.one_allreduce import OneAllreduce
from hvdlite.operations.operation import Work
from hvdlite.recorder import Lane

if TYPE_CHECKING:
    from hvdlite._native import TensorList


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

    @abstractmethod
    def give(self, engine: Engine, submission: Submission, told: Told, label: str) -> object:
        """What is left to be done when all have told; returns what the user gets."""

    def run(self, engine: Engine, work: Work, label: str) -> object:
        ((_, submission),) = work
        return self.give(engine, submission, self._tell(engine, submission, label), label)

    def go_on(self, engine: Engine, submission: Submission, packets: Packets, label: str) -> None:
        """`run`, where all have told by ``packets`` already."""
        self.give(engine, submission, self._told_by(packets, engine), label)

    def _tell(self, engine: Engine, submission: Submission, label: str) -> Told:
        """What all ranks tell, this one by ``submission``."""
        packets, own, gather = self.packets_in(engine), self.numbers(submission), engine.backend.gather
        if gather is not None and gather.takes(len(own)):
            with engine.recorder.span(self.lane, label, self.nbytes(own)):
                numbers = gather.tell(own, self.pieces(submission), label)
            return Told(numbers, gather if max(map(self.nbytes, numbers)) <= gather.room(len(own)) else None)
        if packets is None:
            return Told(engine.exchange.tell(own, label), None)
        self.reduce(engine, submission, packets.layout, label)
        return self._told_by(packets, engine)

    def _told_by(self, packets: Packets, engine: Engine) -> Told:
        numbers = packets.numbers
        most = max(map(self.nbytes, numbers))
        engine.rooms.note(self, most)
        return Told(numbers, packets if most <= packets.room else None)

    def packets_in(self, engine: Engine) -> Packets | None:
        """By which ranks tell the next time; None where they do it otherwise."""
        known = engine.rooms.of(self)
        return self.packets_with(engine, 0 if known is None else known.now)

    def packets_with(self, engine: Engine, room: int) -> Packets | None:
        """Likewise, where `PacketRoom.now` is ``room``."""
        if engine.early is None:
            return None
        width, wanted = self.packet(engine.size)
        least = PacketRoom.enough_for(wanted)
        # Of what is too much numbers are told.
        return engine.packets(width, max(room, least)) or engine.packets(width, least)

    def layout_in(self, engine: Engine) -> Layout | None:
        packets = self.packets_in(engine)
        return None if packets is None else packets.layout

    def sources(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        packets = self.packets_in(engine)
        assert packets is not None, self
        packets.write(self.numbers(submission), self.pieces(submission))
        return packets.sources

    def targets(self, engine: Engine, submission: Submission, layout: Layout) -> TensorList:
        packets = self.packets_in(engine)
        assert packets is not None, self
        return packets.targets

    def reduced_by(self, engine: Engine, layout: Layout) -> Reduction:
        return SUM

    def drop_early(self, engine: Engine) -> None:
        packets = self.packets_in(engine)
        assert packets is not None, self
        packets.write_dropped()
        self._drop_early(engine, packets.sources)

    def is_met(self, engine: Engine, address: int) -> bool:
        """Where there is no room for what they give, ranks wait inside for others, which have to be at it."""
        packets = self.packets_in(engine)
        assert packets is not None, self
        return packets.are_all_at(address)
