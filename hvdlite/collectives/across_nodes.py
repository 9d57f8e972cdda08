"""Backends between several nodes: allreduces of few bytes go as early.py says, and a prepared one in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hvdlite import _native
from hvdlite.collectives.base import DONE, Backend, Completion, PreparedCall, TensorReduction
from hvdlite.collectives.early import EarlyAllreduce
from hvdlite.config import Config
from hvdlite.dtypes import Reduction
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import Buffer

_DONE, _NOT_YET = _native.PreparedAllreduce.DONE, _native.PreparedAllreduce.NOT_YET
_DONE_AND_RUNG, _ABORTED = _native.PreparedAllreduce.DONE_AND_RUNG, _native.PreparedAllreduce.ABORTED


class AcrossNodes(Backend):
    """A backend between several nodes.

    Attributes:
        early: how it does allreduces of few bytes; None: as all others.
    """

    early: EarlyAllreduce | None = None

    @property
    def small_bytes(self) -> int:  # type: ignore[override]
        return 0 if self.early is None else self.early.most_bytes

    def allreduce_tensors(self, job: TensorReduction, *, staging: Buffer, label: str = "") -> Completion:
        inputs, outputs, layout, reduction = job
        early = self.early
        if early is None or not early.takes(layout.nbytes):
            return super().allreduce_tensors(job, staging=staging, label=label)
        if not early.has_begun:
            early.begin(inputs, layout, reduction, label)
        early.finish(outputs, layout)
        return DONE

    def configure(self, config: Config) -> None:
        if self.early is not None:
            self.early.configure(config)

    def prepare_allreduce(
        self,
        counts: _native.ReadyCounts,
        layout: Layout,
        reduction: Reduction,
        home: Buffer | None,
        patience_s: float,
        label: str,
    ) -> PreparedCall | None:
        early = self.early
        if early is None or not early.takes(layout.nbytes):
            return None
        native = early.prepared(counts, layout, reduction)
        return _PreparedCall(early, counts, layout, reduction, patience_s, label, native)


class _PreparedCall:
    """What `AcrossNodes.prepare_allreduce` returns: the steps, in Python.

    Args:
        native: does all of them unless other ranks are late; None: it cannot.
    """

    def __init__(
        self,
        early: EarlyAllreduce,
        counts: _native.ReadyCounts,
        layout: Layout,
        reduction: Reduction,
        patience_s: float,
        label: str,
        native: _native.EarlyAllreduce | None,
    ) -> None:
        self.direct = None  # who is late is for Python
        self._native = native
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
        early, counts = self._early, self._counts
        counts.want_ring(False)
        counts.set(plan, count)
        if not early.await_node(counts, plan, count, heard, self._patience_s):
            return _NOT_YET
        if not self._begin(inputs, outputs, heard):
            if not early.await_others(partial(counts.has_news, heard), self._patience_s):
                return _NOT_YET
            early.finish(early.tensors(outputs, self._layout), self._layout)
        return _DONE_AND_RUNG if counts.has_news(heard) else _DONE

    def _begin(self, inputs: Sequence[int], outputs: Sequence[int], heard: int) -> bool:
        """Whether it is done already."""
        early, native = self._early, self._native
        if native is None:
            early.begin(early.tensors(inputs, self._layout), self._layout, self._reduction, self._label)
            return False
        run = native.run
        return early.do_at_once(
            lambda messages, turn: run(messages, inputs, outputs, turn, heard),
            self._layout,
            self._reduction,
            self._label,
        )

    def last(self) -> tuple[int, int, int]:
        return self._last

    def ready_ns(self) -> int:
        return 0  # `EarlyAllreduce` has recorded all that there was

    def explain(self, result: int) -> None:
        raise AssertionError(result)  # `run` has raised what went wrong
