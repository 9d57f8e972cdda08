"""What operations run on: the backend of their ranks, memory to pass through, and what may be changed by agreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hvdlite.collectives.across_nodes import AcrossNodes
from hvdlite.collectives.base import Backend
from hvdlite.collectives.exchange import Exchange
from hvdlite.config import Tunable
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.memory.layout import ALIGNMENT, Layout
from hvdlite.memory.packets import Packets, Rooms
from hvdlite.memory.views import Buffer, TensorView
from hvdlite.recorder import Recorder
from hvdlite.topology import Topology

if TYPE_CHECKING:
    from hvdlite._native import TensorList


@dataclass(slots=True)
class Executed:
    """What has been done: operations that were fused are one bucket."""

    buckets: int = 0
    reduced_bytes: int = 0  # in the type that travels


class Administrator(Protocol):
    """Who changes what all ranks must change together; called in the order that all ranks agreed on."""

    def tune(self, settings: Tunable) -> None: ...

    def all_have_joined(self) -> None: ...

    def add_process_set(self, ranks: tuple[int, ...]) -> object:
        """Returns what the user gets."""

    def remove_process_set(self, number: int) -> None: ...


class Engine:
    """The means of one process set, in one kind of memory.

    Args:
        staging: where tensors from elsewhere pass through: a multiple of `ALIGNMENT` bytes for each rank.
        chunk_bytes: how much of it an allreduce uses. On one node a chunk should fit the cache; across nodes it should
            be large enough to fill the wire.
        topology: of the ranks between which ``backend`` works.
        executed: where it counts, together with others.
    """

    def __init__(
        self,
        backend: Backend,
        exchange: Exchange,
        staging: Buffer,
        chunk_bytes: int,
        topology: Topology,
        recorder: Recorder,
        administrator: Administrator,
        executed: Executed | None = None,
    ) -> None:
        self.backend = backend
        self.early = backend.early if isinstance(backend, AcrossNodes) else None
        self.exchange = exchange
        self.memory = backend.memory
        self.rank, self.size = backend.rank, backend.size
        self.ranks = topology.ranks
        self.recorder = recorder
        self.administrator = administrator
        self.executed = executed or Executed()
        self.fastest_allreduce = 0.0
        """Bytes per second, of those that are not small; 0: none was."""
        self._nodes = len(topology.nodes)
        # A whole number of elements of every type, whatever the setting says.
        chunk = staging.narrow(0, max(ALIGNMENT, min(chunk_bytes, staging.nbytes) // ALIGNMENT * ALIGNMENT))
        self._staging = {dtype: staging.as_dtype(dtype) for dtype in DType}
        self._packets: dict[tuple[int, int], Packets] = {}
        self.rooms = Rooms()
        self._chunks = {dtype: chunk.as_dtype(dtype) for dtype in DType}

    def staging(self, dtype: DType) -> Buffer:
        """All of it, as elements of ``dtype``."""
        return self._staging[dtype]

    def chunk(self, dtype: DType) -> Buffer:
        """What an allreduce uses of it."""
        return self._chunks[dtype]

    def tensors(self, views: Sequence[TensorView], layout: Layout) -> TensorList:
        """``views`` as they lie in ``layout``."""
        return self.memory.tensors([view.address for view in views], layout.numels, layout.offsets)

    def packets(self, width: int, room: int) -> Packets | None:
        """To tell ``width`` numbers by, and ``room`` bytes; None where that is more than passes at once."""
        key = width, room
        if Packets.layout_of(self.size, *key).nbytes > self.backend.small_bytes:
            return None
        return self._packets.get(key) or self._packets.setdefault(key, Packets(self.memory, self.rank, self.size, *key))

    def resolved(self, reduction: Reduction, wire_dtype: DType) -> Reduction:
        """AVERAGE as a sum and scales.

        Across nodes partial sums travel in the tensor's type, so 16-bit floats are divided before they are added:
        in fp16, eight ranks of 1e4 already pass 65504. Elsewhere the division comes last, which rounds once.
        """
        op, prescale, postscale = reduction
        if op is not ReduceOp.AVERAGE:
            return reduction
        if wire_dtype.is_half and self._nodes > 1:
            return Reduction(ReduceOp.SUM, prescale / self.size, postscale)
        return Reduction(ReduceOp.SUM, prescale, postscale / self.size)
