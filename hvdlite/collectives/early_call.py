"""Prepared calls for allreduces of few bytes across nodes (early.py): all in native code, or step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from hvdlite import _native
from hvdlite.collectives.early import EarlyAllreduce
from hvdlite.dtypes import SUM, DType, ReduceOp, Reduction
from hvdlite.memory.layout import Layout
from hvdlite.memory.packets import Packets

if TYPE_CHECKING:
    from hvdlite.collectives.bound import BoundSchedule

MEETING = Layout.of([1], DType.UINT8, DType.UINT8)
ANY = Reduction(ReduceOp.MAX)
"""How the bytes of a meeting are reduced: 1 of who drops it, else 0."""
NOBODYS = [0]
"""Where zeros are that nobody has stored, and what nobody wants."""

_DONE, _NOT_YET = _native.DirectCall.DONE, _native.DirectCall.NOT_YET
_DONE_AND_RUNG, _ABORTED = _native.DirectCall.DONE_AND_RUNG, _native.DirectCall.ABORTED


@dataclass(eq=False)
class _EarlyCall:
    early: EarlyAllreduce
    layout: Layout
    reduction: Reduction
    patience_s: float
    label: str
    part: int | None
    is_recorded: bool

    def ready_ns(self) -> int:
        return 0  # all that there was is recorded

    def record(self, began_ns: int) -> None:
        if self.is_recorded:
            self.early.record(self.label, began_ns, self.layout)


@dataclass(eq=False)
class InOneCall(_EarlyCall):
    """What `hvdlite.collectives.base.Backend.prepare_allreduce` returns.

    Native code does everything until a rank is late; from there on ``early`` goes on with what it has begun.

    Args:
        direct: see `EarlyAllreduce.prepared`.
    """

    direct: _native.EarlyAllreduce
    _schedule: BoundSchedule | None = field(default=None, init=False)  # on the leader of a node
    _resumed: tuple[int, int, int] = field(default=(0, 0, _ABORTED), init=False)

    def run(self, inputs: Sequence[int], outputs: Sequence[int], plan: int, count: int, heard: int, /) -> int:
        direct = self.direct
        if not direct.can_run:
            self._schedule = self.early.bind(direct, self.layout, self.reduction)
        result = direct.run(inputs, outputs, plan, count, heard)
        if result in (_DONE, _DONE_AND_RUNG):
            self.record(direct.began_ns)
        return result

    def resume(self, result: int) -> int:
        direct = self.direct
        assert result == direct.BEGUN, result
        is_done = self.finish()
        ended = _NOT_YET if not is_done else _DONE_AND_RUNG if direct.has_news else _DONE
        plan, count, _ = direct.last()
        self._resumed = plan, count, ended
        return ended

    def finish(self) -> bool:
        """Bring to its end what `direct` has begun, if it comes soon; whether it has."""
        direct, early = self.direct, self.early
        early.take_over(direct, self.layout, self.reduction, self.label)
        is_done = early.finish_soon(direct.outputs, self.layout, lambda: direct.has_news, self.patience_s)
        if is_done:
            self.record(early.began_ns)
        return is_done

    def count_done(self, times: int) -> None:
        if self._schedule is not None:
            self._schedule.count_done(times)

    def last(self) -> tuple[int, int, int]:
        last = self.direct.last()
        return self._resumed if self._resumed[:2] == last[:2] else last


@dataclass(eq=False)
class StepByStep(_EarlyCall):
    """The same where native code finds no function of MPI."""

    counts: _native.ReadyCounts
    direct: ClassVar[None] = None
    _last: tuple[int, int, int] = field(default=(0, 0, _NOT_YET), init=False)

    def run(self, inputs: Sequence[int], outputs: Sequence[int], plan: int, count: int, heard: int, /) -> int:
        self._last = plan, count, _ABORTED  # unless it comes to an end
        result = self._attempt(inputs, outputs, plan, count, heard)
        self._last = plan, count, result
        return result

    def _attempt(self, inputs: Sequence[int], outputs: Sequence[int], plan: int, count: int, heard: int) -> int:
        early, counts, layout = self.early, self.counts, self.layout
        counts.want_ring(False)
        counts.set(plan, count)
        if not early.await_node(counts, plan, count, heard, self.patience_s):
            return _NOT_YET
        inputs, outputs = self._tensors(inputs, outputs)
        early.begin(early.tensors(inputs, layout), layout, self.reduction, self.label)
        is_disturbed = partial(counts.has_news, heard)
        if not early.finish_soon(early.tensors(outputs, layout), layout, is_disturbed, self.patience_s):
            return _NOT_YET
        self.record(early.began_ns)
        return _DONE_AND_RUNG if counts.has_news(heard) else _DONE

    def _tensors(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Addresses of all that lie in the layout."""
        if self.part is None:
            return inputs, outputs
        itemsize, numels = self.layout.dtype.itemsize, self.layout.numels
        starts = accumulate(numels[:-1], initial=0)
        wanted = [outputs[0] if i == self.part else 0 for i in range(len(numels))]
        return [inputs[0] + itemsize * start for start in starts], wanted

    def resume(self, result: int) -> int:
        raise AssertionError(result)  # `run` has raised what went wrong

    def count_done(self, times: int) -> None:
        """`EarlyAllreduce.finish` has."""

    def last(self) -> tuple[int, int, int]:
        return self._last


EarlyCall = InOneCall | StepByStep


def early_call(
    early: EarlyAllreduce,
    counts: _native.ReadyCounts,
    layout: Layout,
    reduction: Reduction,
    patience_s: float,
    label: str,
    *,
    part: int | None = None,
    is_recorded: bool = True,
) -> EarlyCall:
    """A prepared call by ``early``, which takes as many bytes.

    Args:
        patience_s: how long others may be late before the coordinator waits for them.
        label: for people.
        part: of the tensors, which are then those of one, whose result alone is wanted.
        is_recorded: by the recorder of ``early``, when it is done.
    """

    def make(*how: Any) -> _native.EarlyAllreduce:
        return _native.EarlyAllreduce(*how) if part is None else _native.EarlyReduceScatter(*(*how, part))

    direct = early.prepared(counts, layout, reduction, patience_s, make)
    if direct is None:
        return StepByStep(early, layout, reduction, patience_s, label, part, is_recorded, counts)
    return InOneCall(early, layout, reduction, patience_s, label, part, is_recorded, direct)


def meeting_call(early: EarlyAllreduce, counts: _native.ReadyCounts, patience_s: float, label: str) -> EarlyCall:
    """One in which all ranks meet, and nothing is reduced: a message of a byte, of tensors that are `NOBODYS`."""
    return early_call(early, counts, MEETING, ANY, patience_s, label, is_recorded=False)


@dataclass(eq=False)
class GatherCall(InOneCall):
    """One that tells, and gives (`hvdlite.operations.telling`), by ``packets``."""

    direct: _native.EarlyGather
    packets: Packets

    def resume(self, result: int) -> int:
        """What all have told is in `packets`, unless others are late: `NOT_YET`."""
        direct = self.direct
        assert result == direct.BEGUN, result
        if direct.progress == _native.BoundMessages.DONE:
            self.count_done(1)
            self.record(direct.began_ns)
            return result
        if self.finish():
            return result
        plan, count, _ = direct.last()
        self._resumed = plan, count, _NOT_YET
        return _NOT_YET


def gather_call(
    early: EarlyAllreduce,
    counts: _native.ReadyCounts,
    packets: Packets,
    room: _native.PacketRoom,
    room_then: int,
    rows: tuple[Sequence[int], int, int, bool],
    patience_s: float,
    label: str,
) -> GatherCall | None:
    """A prepared call by ``early``, which takes as many bytes; None where native code finds no MPI.

    Args:
        packets: of which each rank sends its own now.
        room: that ranks make, as long as it stays ``room_then``.
        rows: numbers, column, bytes of a row, and whether it is an alltoall, as `Backend.prepare_gather` takes them.
    """

    def make(*how: Any) -> _native.EarlyGather:
        return _native.EarlyGather(*(*how, *rows, packets.rank, packets.places, room, room_then))

    direct = early.prepared(counts, packets.layout, SUM, patience_s, make)
    if direct is None:
        return None
    return GatherCall(early, packets.layout, SUM, patience_s, label, None, True, direct, packets)
