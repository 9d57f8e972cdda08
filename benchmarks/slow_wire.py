"""Ranks of one machine as if they were on several, with a wire between them that carries so many bytes a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import hvdlite.node
import hvdlite.world
from hvdlite.collectives.across_nodes import AcrossNodes
from hvdlite.collectives.base import Backend, Completion
from hvdlite.config import Config
from hvdlite.counters import Traffic
from hvdlite.dtypes import SUM, Reduction
from hvdlite.memory.layout import Range
from hvdlite.memory.views import Buffer
from hvdlite.node import Door

if TYPE_CHECKING:
    from hvdlite.collectives.ring import RingBackend


@contextmanager
def machines(machine_of: Sequence[int], bytes_per_s: float) -> Iterator[None]:
    """Runtimes that start in this block find the ranks of their own machine only, and reach others by a slow wire.

    Args:
        machine_of: each rank.
    """
    connect, build_ring = hvdlite.node._connect_to_leader, hvdlite.world.build_ring

    def reach(doors: dict[int, Door], rank: int, deadline_s: float) -> Any:
        own = {r: door for r, door in doors.items() if machine_of[r] == machine_of[rank]}
        return connect(own, rank, deadline_s)

    def build_slow(*arguments: Any) -> Backend:
        return SlowBackend(build_ring(*arguments), bytes_per_s)

    with (
        mock.patch.object(hvdlite.node, "_connect_to_leader", reach),
        mock.patch.object(hvdlite.world, "build_ring", build_slow),
    ):
        yield


class SlowBackend(AcrossNodes):
    """``inner``, none of whose operations is over before a wire has carried what each rank must send for it.

    Those of few bytes, which `hvdlite.collectives.early` does, take no time on this wire.
    """

    def __init__(self, inner: RingBackend, bytes_per_s: float) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.endpoint = inner.endpoint
        self.memory, self.recorder = inner.memory, inner.recorder
        self.bound_allreduce, self.begin_allreduce = inner.bound_allreduce, inner.begin_allreduce
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._is_free_s = 0.0  # the wire: by time.monotonic

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        return self._carry(2 * buf.nbytes, lambda: self._inner.allreduce(buf, reduction, label=label))

    def reduce_scatter(
        self,
        buf: Buffer,
        blocks: Sequence[Sequence[Range]],
        reduction: Reduction = SUM,
        *,
        stays_open: bool = False,
        label: str = "",
    ) -> Completion:
        return self._carry(
            _nbytes(buf, blocks),
            lambda: self._inner.reduce_scatter(buf, blocks, reduction, stays_open=stays_open, label=label),
        )

    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        return self._carry(_nbytes(buf, blocks), lambda: self._inner.allgather(buf, blocks, closes=closes, label=label))

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        return self._carry(buf.nbytes, lambda: self._inner.broadcast(buf, root, label=label))

    def _carry(self, nbytes: int, operate: Callable[[], Completion]) -> Completion:
        begin_s = max(time.monotonic(), self._is_free_s)
        self._is_free_s = begin_s + nbytes * (self.size - 1) / self.size / self._bytes_per_s
        return _Arrival(operate(), self._is_free_s)

    def barrier(self) -> None:
        self._inner.barrier()

    def configure(self, config: Config) -> None:
        super().configure(config)
        self._inner.configure(config)

    @property
    def traffic(self) -> Traffic:
        return self._inner.traffic

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self.early = None  # which refers to this backend
        self._inner.close()


class _Arrival(Completion):
    def __init__(self, begun: Completion, arrives_s: float) -> None:
        self._begun = begun
        self._arrives_s = arrives_s

    def wait(self) -> None:
        self._begun.wait()
        time.sleep(max(0.0, self._arrives_s - time.monotonic()))


def _nbytes(buf: Buffer, blocks: Sequence[Sequence[Range]]) -> int:
    return sum(stop - start for ranges in blocks for start, stop in ranges) * buf.dtype.itemsize
