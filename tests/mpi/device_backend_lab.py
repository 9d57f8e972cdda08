"""Backends for buffers on GPUs, over the simulated driver, whose memory a test reads and writes as any other."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from backend_lab import LAYOUTS, RING, SIZE, SMALL, Lab, Layout, name_of
from cuda_lab import simulated
from hvdlite.collectives.adder import DeviceAdder
from hvdlite.collectives.base import Backend, Completion
from hvdlite.collectives.direct import DirectBackend
from hvdlite.collectives.pinned import PinnedBackend
from hvdlite.collectives.requests import Channel
from hvdlite.collectives.ring import RingBackend
from hvdlite.dtypes import SUM, Reduction
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.layout import Range
from hvdlite.memory.views import Buffer

_ALL = (tuple(range(SIZE)),)
_SEVERAL = [nodes for nodes in LAYOUTS if len(nodes) > 1]
_BY_MPI: dict[str, Layout] = {f"gpu cuda_aware {name_of(nodes)}": nodes for nodes in _SEVERAL[-1:]}
DEVICE_KINDS: dict[str, Layout] = {"gpu": _ALL} | {f"gpu {name_of(nodes)}": nodes for nodes in _SEVERAL} | _BY_MPI


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
        across = ring_of_gpus if kind in _BY_MPI else pinned_ring
        backend = lab.composed(nodes, SMALL // 2, backend, None if rail is None else across(lab, rail, memory))
    return Settled(backend, memory)


def pinned_ring(lab: Lab, comm: MPI.Intracomm, memory: DeviceMemory) -> PinnedBackend:
    return PinnedBackend(lab.ring(comm), memory)


def ring_of_gpus(lab: Lab, comm: MPI.Intracomm, memory: DeviceMemory) -> RingBackend:
    """To any MPI memory of the simulated GPU is what that of the host is."""
    return RingBackend(
        lab.endpoint(comm).beside(Channel.DEVICE),
        memory,
        DeviceAdder(memory, segments=1),
        segment_bytes=lab.segment_bytes,
        limits=RING,
        recorder=lab.recorder,
    )
