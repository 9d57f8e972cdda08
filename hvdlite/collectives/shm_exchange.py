"""Tensors that live anywhere between the ranks of one node: through windows of shared memory, which all can read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hvdlite import _native
from hvdlite.collectives.base import ScatterReduction
from hvdlite.collectives.node_waits import NodeWaits
from hvdlite.counters import Traffic
from hvdlite.memory.layout import ALIGNMENT
from hvdlite.node import Node
from hvdlite.recorder import Lane, Recorder

_WINDOW_BYTES = 256 << 10
_STREAMED_BYTES = 16 << 20  # larger results do not fit the caches; to read their old contents first would take longer
_CARD = 0x687664  # the same for all: the coordinator has seen to it that all ranks do the same


class ShmExchange:
    """A `hvdlite.collectives.exchange.Exchange`, and what `ShmBackend` does with tensors that live anywhere.

    Attributes:
        native: for who sees for itself that all ranks do the same.
        windows: for calls that are prepared.
    """

    def __init__(self, node: Node, waits: NodeWaits, spin_us: int, recorder: Recorder) -> None:
        self._rank, self._size = node.local_rank, node.local_size
        self._waits = waits
        self._recorder = recorder
        nbytes = max(_WINDOW_BYTES, node.local_size * ALIGNMENT)
        self._segment = node.share(_native.OrderedExchange.bytes_needed(node.local_size, nbytes))
        self.native = _native.OrderedExchange(
            self._segment.address,
            node.local_rank,
            node.local_size,
            node.abort_address,
            spin_us,
            nbytes,
            _STREAMED_BYTES,
        )
        self.windows = _native.Windows(self.native, _CARD)

    @property
    def traffic(self) -> Traffic:
        """See `hvdlite.collectives.exchange.Exchange`."""
        return Traffic(*self.native.traffic)

    def tell(self, numbers: Sequence[int], label: str) -> Sequence[Sequence[int]]:
        """See `hvdlite.collectives.exchange.Exchange`."""
        status, told = self.native.tell(_CARD, numbers, self._waits.timeout_s)
        self._expect_ok(status, "exchange of sizes", label)
        width = len(numbers)
        return [told[width * rank : width * (rank + 1)] for rank in range(self._size)]

    def exchange(
        self, source: int, target: int, sent: Sequence[int], received: Sequence[int], label: str, owner: object
    ) -> None:
        """See `hvdlite.collectives.exchange.Exchange`."""
        departures = [*zip(accumulate(sent, initial=source), sent, strict=False)]
        arrivals = [*zip(accumulate(received, initial=target), received, strict=False)]
        with self._recorder.span(Lane.ALLTOALL, label, sum(sent)):
            self._expect_ok(self.native.alltoall(_CARD, departures, arrivals, self._waits.timeout_s), "alltoall", label)

    def _expect_ok(self, status: int, operation: str, label: str) -> None:
        self._waits.expect_ok(status, operation, label, self.native)

    def broadcast(self, tensors: _native.TensorList, nbytes: int, root: int, label: str) -> None:
        """See `hvdlite.collectives.base.Backend.broadcast_tensors`."""
        with self._recorder.span(Lane.BROADCAST, label, nbytes):
            status = self.native.broadcast(_CARD, tensors, nbytes, root, self._waits.timeout_s)
            self._expect_ok(status, "broadcast", label)

    def allgather(self, source: int, targets: Sequence[int], nbytes: Sequence[int], label: str) -> None:
        """See `hvdlite.collectives.base.Backend.allgather_tensors`."""
        arrivals = [(target, size if target else 0) for target, size in zip(targets, nbytes, strict=True)]
        with self._recorder.span(Lane.ALLGATHER, label, sum(nbytes)):
            status = self.native.spread(_CARD, (source, nbytes[self._rank]), arrivals, self._waits.timeout_s)
            self._expect_ok(status, "allgather", label)

    def reduce_scatter(self, job: ScatterReduction, label: str) -> None:
        """See `hvdlite.collectives.base.Backend.reduce_scatter_tensors`; they travel in their own type."""
        inputs, output, numels, dtype, reduction = job
        with self._recorder.span(Lane.NODE_REDUCE_SCATTER, label, sum(numels) * dtype.itemsize, dtype.label):
            status = self.native.reduce_scatter(_CARD, inputs, numels, output, dtype, *reduction, self._waits.timeout_s)
            self._expect_ok(status, "reduce_scatter", label)
