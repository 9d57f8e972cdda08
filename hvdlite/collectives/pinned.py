"""A backend of the host for buffers of a GPU: what crosses nodes passes through pinned memory of the host.

Copies have streams of their own. While the host has one operation on the wire, the next is on its way from the GPU, and
the one before on its way back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdlite import _native
from hvdlite.collectives.base import LATE_GPU, Backend, Completion
from hvdlite.counters import Traffic
from hvdlite.dtypes import SUM, Reduction
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.layout import Range
from hvdlite.memory.views import Buffer

if TYPE_CHECKING:
    from hvdlite.collectives.ring import RingBackend

_SLOTS = 3  # one on the wire, one coming, one going


class PinnedBackend(Backend):
    """What ``host`` does, on buffers in ``memory``; whoever else uses ``host`` configures and closes it.

    The thread that waits for an operation does its part on the host, asleep while bytes are on their way to it, though
    not for ever: a GPU that does not come so far is a CollectiveError.
    """

    def __init__(self, host: RingBackend, memory: DeviceMemory) -> None:
        self.rank, self.size = host.rank, host.size
        self.memory: DeviceMemory = memory
        self.recorder = host.recorder
        self._host = host
        self._down, self._up = (_native.DeviceStream(memory.ordinal) for _ in range(2))
        self._slots = deque(_Slot() for _ in range(_SLOTS))
        self._in_flight: deque[_Passage] = deque()

    @property
    def traffic(self) -> Traffic:
        return self._host.traffic

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        whole = [(0, buf.numel)]
        return self._pass(
            buf, "allreduce", label, whole, whole, lambda on_host: self._host.allreduce(on_host, reduction, label=label)
        )

    def reduce_scatter(
        self,
        buf: Buffer,
        blocks: Sequence[Sequence[Range]],
        reduction: Reduction = SUM,
        *,
        stays_open: bool = False,
        label: str = "",
    ) -> Completion:
        return self._pass(
            buf,
            "reduce_scatter",
            label,
            [part for ranges in blocks for part in ranges],
            blocks[self.rank],
            lambda on_host: self._host.reduce_scatter(on_host, blocks, reduction, label=label),
        )

    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        others = [part for rank, ranges in enumerate(blocks) if rank != self.rank for part in ranges]
        return self._pass(
            buf,
            "allgather",
            label,
            blocks[self.rank],
            others,
            lambda on_host: self._host.allgather(on_host, blocks, label=label),
        )

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        whole = [(0, buf.numel)]
        downloads, uploads = (whole, []) if root == self.rank else ([], whole)
        return self._pass(
            buf,
            "broadcast",
            label,
            downloads,
            uploads,
            lambda on_host: self._host.broadcast(on_host, root, label=label),
        )

    def barrier(self) -> None:
        self._doze_until(self.memory.moment(), "barrier", "")
        self._host.barrier()

    def _pass(
        self,
        buf: Buffer,
        name: str,
        label: str,
        downloads: Sequence[Range],
        uploads: Sequence[Range],
        operate: Callable[[Buffer], Completion],
    ) -> Completion:
        while len(self._in_flight) >= _SLOTS:
            self._in_flight[0].wait()
        slot = self._slots[0]
        self._slots.rotate(-1)
        memory = slot.memory(self.memory.ordinal, buf.nbytes)
        on_host = Buffer((memory.address,), 0, buf.numel, buf.dtype, memory)
        # After what the GPU has done to the buffer, and so after the slot's last use, which the stream has followed.
        self._down.follow([self.memory.moment()])
        _copy(self._down, on_host.address, buf.address, buf.dtype.itemsize, downloads)
        arrived = _native.Moment(self.memory.ordinal, self._down.handle)

        def finish() -> None:
            self._doze_until(arrived, name, label)
            operate(on_host).wait()
            _copy(self._up, buf.address, on_host.address, buf.dtype.itemsize, uploads)
            emptied = _native.Moment(self.memory.ordinal, self._up.handle)
            slot.emptied = emptied
            self.memory.stream.follow([emptied])

        self._in_flight.append(_Passage(self._in_flight, finish))
        return self._in_flight[-1]

    def _doze_until(self, moment: _native.Moment, name: str, label: str) -> None:
        endpoint = self._host.endpoint
        with endpoint.operation(name, label):
            endpoint.doze(lambda: moment.is_reached, LATE_GPU)


class _Slot:
    """Pinned memory of one operation after the other, which grows to what the largest needs.

    Attributes:
        emptied: when it was copied to the GPU for the last time.
    """

    def __init__(self) -> None:
        self.emptied: _native.Moment | None = None
        self._memory: _native.PinnedMemory | None = None

    def memory(self, ordinal: int, nbytes: int) -> _native.PinnedMemory:
        """At least ``nbytes``."""
        if self._memory is None or self._memory.nbytes < nbytes:
            if self.emptied is not None:
                self.emptied.wait()
            self._memory = _native.PinnedMemory(ordinal, max(nbytes, 1))
        return self._memory


class _Passage(Completion):
    """An operation that has begun; those before it in ``line`` end before it."""

    def __init__(self, line: deque[_Passage], finish: Callable[[], None]) -> None:
        self._line = line
        self._finish = finish

    def wait(self) -> None:
        while self in self._line:
            self._line.popleft()._finish()


def _copy(stream: _native.DeviceStream, target: int, source: int, itemsize: int, ranges: Sequence[Range]) -> None:
    for start, stop in ranges:
        stream.copy(target + start * itemsize, source + start * itemsize, (stop - start) * itemsize)
