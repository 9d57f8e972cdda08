"""Allocate: every rank gets a fusion buffer of the same size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvdlite.coordinator.request import Difference
from hvdlite.dtypes import DType
from hvdlite.engine import Engine
from hvdlite.group import Group
from hvdlite.memory.base import FusionBuffer
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.views import OnDevice, TensorView
from hvdlite.operations.operation import Operation, Work


def allocate(group: Group, nbytes: int, name: str | None = None) -> FusionBuffer:
    """A fusion buffer of ``nbytes`` per rank, zeroed; blocks until every rank asks for the same.

    Tensors made from its `memory` are reduced where they are.
    """
    buffer: FusionBuffer = group.submit(Allocate.of(name, (), int(nbytes)), name).wait()
    return buffer


def allocate_on_device(
    group: Group, nbytes: int, where: OnDevice, name: str | None = None, *, multicast: bool = False
) -> FusionBuffer | None:
    """`allocate` in the memory of GPUs; None where the GPUs of these ranks cannot work together.

    Args:
        where: this rank's GPU.
        multicast: whether to give the copies an address in common as well, see `DeviceMemory.add_multicast`.
    """
    beside = [TensorView(0, (0,), DType.UINT8, None, where)]
    request = Allocate.of(name, beside, int(nbytes), multicast)
    buffer: FusionBuffer | None = group.submit(request, name, beside).wait()
    return buffer


@dataclass(frozen=True, eq=False)
class Allocate(Operation):
    """What ranks agree on; an empty tensor on a GPU stands for memory of GPUs."""

    nbytes: int = 0
    multicast: bool = False

    label = "allocate"

    def differences(self, other: Allocate) -> Iterator[Difference]:
        yield from super().differences(other)
        yield Difference("", "size in bytes", self.nbytes, other.nbytes, "Ask for the same size on every rank")

    def run(self, engine: Engine, work: Work, label: str) -> FusionBuffer | None:
        is_there = engine.memory.is_on_device == (self.tensors_on_device > 0)
        if not is_there:
            return None
        buffer = engine.memory.allocate(self.nbytes)
        if self.multicast and isinstance(engine.memory, DeviceMemory) and len(buffer.copies) > 1:
            engine.memory.add_multicast(buffer)
        engine.backend.prepare(buffer.buffer(0, self.nbytes, DType.UINT8))
        return buffer
