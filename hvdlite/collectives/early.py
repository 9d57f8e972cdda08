"""Allreduces of few bytes across nodes, which a rank may begin before the others are ready.

Such an operation is its own agreement: no rank comes to its end before all have begun. Whoever waits inside may leave,
and come back. What some ranks have begun, and others never will, all bring to its end for nobody: messages that are on
their way cannot be taken back.

On nodes of several ranks all of these begin together. The node reduces into its leader's place, the leaders exchange,
and a word in shared memory says that the result is there, for the node to spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from hvdlite import _native
from hvdlite.collectives.base import Backend
from hvdlite.collectives.thresholds import at_once_bytes
from hvdlite.config import Config
from hvdlite.dtypes import DType, Reduction
from hvdlite.memory.base import FusionBuffer, Memory
from hvdlite.memory.layout import Layout, Range
from hvdlite.memory.segment import Segment
from hvdlite.memory.views import Buffer
from hvdlite.naps import nap_until
from hvdlite.recorder import Lane, Recorder

if TYPE_CHECKING:
    from hvdlite.collectives.bound import BoundSchedule
    from hvdlite.collectives.requests import Endpoint

MOST_BYTES = 32 << 10


class Leaders(Protocol):
    """The leaders of all nodes; see `hvdlite.collectives.ring.RingBackend`."""

    recorder: Recorder
    endpoint: Endpoint

    def begin_allreduce(
        self,
        buf: Buffer,
        reduction: Reduction,
        label: str,
        by: Callable[[_native.BoundMessages], int] | None = None,
    ) -> BoundSchedule: ...


class EarlyAllreduce:
    """One such operation after the other, between all ranks.

    Args:
        leaders: None on other ranks.
        node: of this node's ranks, where there are several.
        place: of `MOST_BYTES`.
        turns: whose first word is the number of exchanges whose result has come to this node.
        nodes: how many there are.
        ranks: of this node, by their names for people.
        spin_us: how long ranks of a node look for one another before they sleep.
        timeout_s: the longest wait for other ranks.
        check: raises once the world has failed.

    Attributes:
        most_bytes: that it takes; none until `configure` was called.
    """

    def __init__(
        self,
        leaders: Leaders | None,
        node: Backend | None,
        place: FusionBuffer,
        turns: Segment,
        memory: Memory,
        *,
        nodes: int,
        ranks: Sequence[int],
        spin_us: int,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        self.most_bytes = 0
        self._nodes = nodes
        self._leaders = leaders
        self._node = node
        self._others: list[list[Range]] = [[] for _ in ranks[1:]]
        self._places = {dtype: place.buffer(0, MOST_BYTES // dtype.itemsize, dtype) for dtype in DType}
        self._parts: dict[tuple[DType, int], Buffer] = {}  # of `_places`, by type and elements
        self._turns = turns
        self._memory = memory
        self._leader_rank = ranks[0]
        self._spin_us = spin_us
        self._timeout_s = timeout_s
        self._check = check
        self._turn = 0
        self._part: Buffer | None = None  # of what has begun
        self._exchange: BoundSchedule | None = None  # of it, while it is on its way; None on ranks that lead no node
        self._label = ""
        self._began_ns = 0

    def configure(self, config: Config) -> None:
        """Take over what of ``config`` may change between two operations; the same on every rank."""
        self.most_bytes = min(MOST_BYTES, at_once_bytes(config.small_bytes, config.segment_bytes, self._nodes))

    def takes(self, nbytes: int) -> bool:
        """Whether it does allreduces of so many bytes in the type that travels."""
        return 0 < nbytes <= self.most_bytes

    @property
    def has_begun(self) -> bool:
        """Whether `finish` has to follow."""
        return self._part is not None

    def begin(self, inputs: _native.TensorList | None, layout: Layout, reduction: Reduction, label: str) -> None:
        """Put this rank's tensors on their way; returns when all ranks of the node have called it.

        Args:
            inputs: as they lie in ``layout``, of at least a byte and at most `MOST_BYTES`; None: nobody wants the
                result.
        """
        assert self._part is None, label
        self._label, self._began_ns = label, time.monotonic_ns()
        part = self._part_of(layout)
        if inputs is not None:
            self._memory.pack(inputs, layout.dtype, part, 0)
        across = reduction
        if self._node is not None:
            in_node, across = reduction.split()
            self._node.reduce_scatter(part, self._all_to_leader(part), in_node, stays_open=True, label=label).wait()
        if self._leaders is not None:
            self._exchange = self._leaders.begin_allreduce(part, across, label)
        self._turn += 1
        self._part = part

    @property
    def endpoint(self) -> Endpoint | None:
        """By which native code may do all of it; None where it may not, or is not wanted."""
        if self._leaders is None or self._node is not None or self._leaders.endpoint.functions is None:
            return None
        return self._leaders.endpoint

    def place(self, layout: Layout) -> int:
        """The address by way of which tensors travel."""
        return self._part_of(layout).address

    def do_at_once(
        self, by: Callable[[_native.BoundMessages], int], layout: Layout, reduction: Reduction, label: str
    ) -> bool:
        """`begin` and `finish` by native code, where there is an `endpoint`; whether it is done, or has only begun.

        Args:
            by: packs, sends and, if the result comes soon, unpacks; see `BoundSchedule.start`.
        """
        assert self._part is None and self._leaders is not None, label
        self._label, self._began_ns = label, time.monotonic_ns()
        part = self._part_of(layout)
        exchange = self._leaders.begin_allreduce(part, reduction, label, by)
        if exchange.is_done:
            self._record(part)
            return True
        self._turn += 1
        self._part, self._exchange = part, exchange
        return False

    def has_come(self) -> bool:
        """Of what has begun: whether its result is there, so that `finish` will not wait for other nodes."""
        if self._exchange is not None and self._exchange.advance():
            self._exchange = None
            _native.store64(self._turns.address, self._turn)
        return self._exchange is None and _native.load64(self._turns.address) >= self._turn

    def finish(self, outputs: _native.TensorList | None, layout: Layout) -> None:
        """Bring it to its end.

        Args:
            outputs: as they lie in ``layout``; None: the result is dropped.

        Raises:
            CollectiveError: a rank did not come in time; or what ``check`` raises.
        """
        self._wait(self.has_come)
        part = self._part
        assert part is not None
        if self._node is not None:
            self._node.allgather(part, self._all_to_leader(part), closes=True, label=self._label).wait()
        if outputs is not None:
            self._memory.unpack(part, 0, outputs, layout.dtype)
        self._part = None
        self._record(part)

    def drop(self, layout: Layout, reduction: Reduction, label: str) -> None:
        """Some ranks have begun what will not be done: bring it to its end. All ranks call it at one place."""
        if not self.has_begun:
            self.begin(None, layout, reduction, label)
        self.finish(None, layout)

    def await_others(self, is_disturbed: Callable[[], bool], patience_s: float) -> bool:
        """Of what has begun: whether its result came before ``is_disturbed()`` was true, and in time."""
        until_s = time.monotonic() + min(patience_s, self._timeout_s / 2)
        has_come, clock = self.has_come, time.monotonic
        self._wait(lambda: has_come() or is_disturbed() or clock() >= until_s)
        return has_come()

    def _wait(self, done: Callable[[], bool]) -> None:
        """Return once ``done()``, which is true at the latest when `has_come` is.

        Raises:
            CollectiveError: that was not so in time; or what ``check`` raises.
        """
        if done():
            return
        if self._exchange is not None:
            self._exchange.endpoint.until(done, self._exchange.peer)
            return
        late = f"allreduce '{self._label}': rank {self._leader_rank}, which exchanges for this node, brought no result"
        nap_until(done, late, timeout_s=self._timeout_s, check=self._check)

    def tensors(self, addresses: Sequence[int], layout: Layout) -> _native.TensorList:
        return self._memory.tensors(addresses, layout.numels, layout.offsets)

    def await_node(self, counts: _native.ReadyCounts, plan: int, count: int, heard: int, patience_s: float) -> bool:
        """Whether all ranks of the node are ready."""
        return self._node is None or counts.wait(plan, count, heard, patience_s, self._spin_us)

    def _record(self, part: Buffer) -> None:
        if self._leaders is not None:
            recorder, dtype = self._leaders.recorder, part.dtype.label
            recorder.add(Lane.RING, self._label, self._began_ns, time.monotonic_ns(), part.nbytes, dtype)

    def _part_of(self, layout: Layout) -> Buffer:
        key = layout.wire_dtype, layout.end
        return self._parts.get(key) or self._parts.setdefault(key, self._places[key[0]].narrow(0, layout.end))

    def _all_to_leader(self, part: Buffer) -> list[list[Range]]:
        return [[(0, part.numel)], *self._others]
