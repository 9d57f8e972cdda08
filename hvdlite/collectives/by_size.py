"""Two backends for the same ranks and memory: one for what is small, one for what is large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlite.collectives.base import Backend, Completion, EnqueuingCall, TensorReduction
from hvdlite.config import Config
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.memory.layout import Layout, Range
from hvdlite.memory.views import Buffer

if TYPE_CHECKING:
    from hvdlite._native import ReadyCounts


class BySizeBackend(Backend):
    """``small`` up to ``limit_bytes``, and for types that ``large`` does not reduce; ``large`` above."""

    def __init__(self, small: Backend, large: Backend, limit_bytes: int) -> None:
        self.rank, self.size = small.rank, small.size
        self.memory = small.memory
        self.recorder = small.recorder
        self._small = small
        self._large = large
        self._limit_bytes = limit_bytes

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        return self._for(buf).allreduce(buf, reduction, label=label)

    def allreduce_tensors(self, job: TensorReduction, *, staging: Buffer, label: str = "") -> Completion:
        if self._is_small(job.layout):
            return self._small.allreduce_tensors(job, staging=staging, label=label)
        return super().allreduce_tensors(job, staging=staging, label=label)

    def prepare_enqueuing(
        self, counts: ReadyCounts, layout: Layout, reduction: Reduction, staging: Buffer, patience_s: float
    ) -> EnqueuingCall | None:
        if not self._is_small(layout):
            return None
        return self._small.prepare_enqueuing(counts, layout, reduction, staging, patience_s)

    def reduce_scatter(
        self,
        buf: Buffer,
        blocks: Sequence[Sequence[Range]],
        reduction: Reduction = SUM,
        *,
        stays_open: bool = False,
        label: str = "",
    ) -> Completion:
        return self._for(buf).reduce_scatter(buf, blocks, reduction, stays_open=stays_open, label=label)

    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        return self._for(buf).allgather(buf, blocks, closes=closes, label=label)

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        return self._for(buf).broadcast(buf, root, label=label)

    def barrier(self) -> None:
        self._small.barrier()

    def prepare(self, buf: Buffer) -> None:
        self._small.prepare(buf)
        self._large.prepare(buf)

    def configure(self, config: Config) -> None:
        self._small.configure(config)
        self._large.configure(config)

    def supports(self, dtype: DType) -> bool:
        return self._small.supports(dtype)

    def late(self) -> Sequence[int]:
        return self._small.late() or self._large.late()

    def check_health(self) -> None:
        self._small.check_health()
        self._large.check_health()

    def wake(self) -> None:
        self._small.wake()
        self._large.wake()

    def close(self) -> None:
        self._small.close()
        self._large.close()

    def _for(self, buf: Buffer) -> Backend:
        return self._large if buf.nbytes > self._limit_bytes and self._large.supports(buf.dtype) else self._small

    def _is_small(self, layout: Layout) -> bool:
        return layout.nbytes <= self._limit_bytes
