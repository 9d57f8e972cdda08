"""Backends for buffers on GPUs, over the simulated driver, whose memory a test reads and writes as any other."""

from __future__ import annotations

from collections.abc import Sequence

from backend_lab import LAYOUTS, SIZE, SMALL, Lab, Layout, name_of
from cuda_lab import simulated
from hvdlite.collectives.base import Backend, Completion
from hvdlite.collectives.direct import DirectBackend
from hvdlite.collectives.pinned import PinnedBackend
from hvdlite.dtypes import SUM, Reduction
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.layout import Range
from hvdlite.memory.views import Buffer

ALL = (tuple(range(SIZE)),)
DEVICE_KINDS: dict[str, Layout] = {"gpu": ALL} | {f"gpu {name_of(nodes)}": nodes for nodes in LAYOUTS if len(nodes) > 1}


class Settled(Backend):
    """``inner``, whose operations are over when their completion has been waited for, for the host as well."""

    def __init__(self, inner: Backend, memory: DeviceMemory) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.memory: DeviceMemory = memory
        self.recorder = inner.recorder
        self._inner = inner

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        return _Settling(self._inner.allreduce(buf, reduction, label=label), self.memory)

    def reduce_scatter(
        self,
        buf: Buffer,
        blocks: Sequence[Sequence[Range]],
        reduction: Reduction = SUM,
        *,
        stays_open: bool = False,
        label: str = "",
    ) -> Completion:
        begun = self._inner.reduce_scatter(buf, blocks, reduction, stays_open=stays_open, label=label)
        return _Settling(begun, self.memory)

    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        return _Settling(self._inner.allgather(buf, blocks, closes=closes, label=label), self.memory)

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        return _Settling(self._inner.broadcast(buf, root, label=label), self.memory)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()


class _Settling(Completion):
    def __init__(self, begun: Completion, memory: DeviceMemory) -> None:
        self._begun = begun
        self._memory = memory

    def wait(self) -> None:
        self._begun.wait()
        self._memory.moment().wait()


def build(lab: Lab, kind: str) -> Settled:
    """Collective."""
    simulated()
    nodes = DEVICE_KINDS[kind]
    node = lab.node(nodes)
    memory = DeviceMemory(node, 0)
    backend: Backend = DirectBackend(node, memory, lab.recorder)
    if len(nodes) > 1:
        rail = lab.rail(nodes)
        cross = None if rail is None else PinnedBackend(lab.ring(rail), memory)
        backend = lab.composed(nodes, SMALL // 2, backend, cross)
    return Settled(backend, memory)
