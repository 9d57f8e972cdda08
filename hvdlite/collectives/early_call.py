"""Prepared calls for allreduces of few bytes across nodes (early.py): all in native code, or step by step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from hvdlite import _native
from hvdlite.collectives.early import EarlyAllreduce
from hvdlite.dtypes import Reduction
from hvdlite.memory.layout import Layout

if TYPE_CHECKING:
    from hvdlite.collectives.bound import BoundSchedule

_DONE, _NOT_YET = _native.DirectCall.DONE, _native.DirectCall.NOT_YET
_DONE_AND_RUNG, _ABORTED = _native.DirectCall.DONE_AND_RUNG, _native.DirectCall.ABORTED


class InOneCall:
    """What `hvdlite.collectives.base.Backend.prepare_allreduce` returns.

    Native code does everything until a rank is late; from there on ``early`` goes on with what it has begun.

    Args:
        direct: see `EarlyAllreduce.prepared`.
    """

    def __init__(
        self,
        early: EarlyAllreduce,
        direct: _native.EarlyAllreduce,
        layout: Layout,
        reduction: Reduction,
        patience_s: float,
        label: str,
    ) -> None:
        self.direct = direct
        self._early = early
        self._layout = layout
        self._reduction = reduction
        self._patience_s = patience_s
        self._label = label
        self._schedule: BoundSchedule | None = None  # on the leader of a node
        self._resumed = 0, 0, _ABORTED

    def run(self, inputs: Sequence[int], outputs: Sequence[int], plan: int, count: int, heard: int, /) -> int:
        direct = self.direct
        if not direct.can_run:
            self._schedule = self._early.bind(direct, self._layout, self._reduction)
        result = direct.run(inputs, outputs, plan, count, heard)
        if result in (_DONE, _DONE_AND_RUNG):
            self._early.record(self._label, direct.began_ns, self._layout)
        return result

    def resume(self, result: int) -> int:
        direct, early = self.direct, self._early
        assert result == direct.BEGUN, result
        early.take_over(direct, self._layout, self._reduction, self._label)
        is_done = early.finish_soon(direct.outputs, self._layout, lambda: direct.has_news, self._patience_s)
        ended = _NOT_YET if not is_done else _DONE_AND_RUNG if direct.has_news else _DONE
        plan, count, _ = direct.last()
        self._resumed = plan, count, ended
        return ended

    def count_done(self, times: int) -> None:
        if self._schedule is not None:
            self._schedule.count_done(times)

    def last(self) -> tuple[int, int, int]:
        last = self.direct.last()
        return self._resumed if self._resumed[:2] == last[:2] else last

    def ready_ns(self) -> int:
        return 0  # all that there was is recorded


class StepByStep:
    """The same where native code finds no function of MPI."""

    direct = None

    def __init__(
        self,
        early: EarlyAllreduce,
        counts: _native.ReadyCounts,
        layout: Layout,
        reduction: Reduction,
        patience_s: float,
        label: str,
    ) -> None:
        self._early = early
        self._counts = counts
        self._layout = layout
        self._reduction = reduction
        self._patience_s = patience_s
        self._label = label
        self._last = 0, 0, _NOT_YET

    def run(self, inputs: Sequence[int], outputs: Sequence[int], plan: int, count: int, heard: int, /) -> int:
        self._last = plan, count, _ABORTED  # unless it comes to an end
        result = self._attempt(inputs, outputs, plan, count, heard)
        self._last = plan, count, result
        return result

    def _attempt(self, inputs: Sequence[int], outputs: Sequence[int], plan: int, count: int, heard: int) -> int:
        early, counts, layout = self._early, self._counts, self._layout
        counts.want_ring(False)
        counts.set(plan, count)
        if not early.await_node(counts, plan, count, heard, self._patience_s):
            return _NOT_YET
        early.begin(early.tensors(inputs, layout), layout, self._reduction, self._label)
        is_rung = partial(counts.has_news, heard)
        if not early.finish_soon(early.tensors(outputs, layout), layout, is_rung, self._patience_s):
            return _NOT_YET
        return _DONE_AND_RUNG if is_rung() else _DONE

    def resume(self, result: int) -> int:
        raise AssertionError(result)  # `run` has raised what went wrong

    def count_done(self, times: int) -> None:
        """`EarlyAllreduce.finish` has."""

    def last(self) -> tuple[int, int, int]:
        return self._last

    def ready_ns(self) -> int:
        return 0
