"""Backends between several nodes: allreduces of few bytes go as early.py says, and a prepared one in one call."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite import _native
from hvdlite.collectives.base import DONE, Backend, Completion, PreparedCall, TensorReduction
from hvdlite.collectives.early import EarlyAllreduce
from hvdlite.collectives.early_call import early_call, meeting_call
from hvdlite.config import Config
from hvdlite.dtypes import DType, Reduction
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import Buffer


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
        early.record(label, early.began_ns, layout)
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
        return early_call(early, counts, layout, reduction, patience_s, label)

    def prepare_reduce_scatter(
        self,
        counts: _native.ReadyCounts,
        numels: Sequence[int],
        dtype: DType,
        wire_dtype: DType,
        reduction: Reduction,
        patience_s: float,
        label: str,
    ) -> PreparedCall | None:
        early, layout = self.early, Layout.of(numels, dtype, wire_dtype)
        if early is None or not early.takes(layout.nbytes):
            return None
        return early_call(early, counts, layout, reduction, patience_s, label, part=self.rank)

    def prepare_barrier(self, counts: _native.ReadyCounts, patience_s: float, label: str) -> PreparedCall | None:
        return None if self.early is None else meeting_call(self.early, counts, patience_s, label)
