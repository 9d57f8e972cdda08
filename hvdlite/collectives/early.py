"""Allreduces of few bytes across nodes, which a rank may begin before the others are ready.

Such an operation is its own agreement: no rank comes to its end before all have begun. Whoever waits inside may leave,
and come back. What some ranks have begun, and others never will, all bring to its end for nobody: messages that are on
their way cannot be taken back.

On a node of several ranks each puts its tensors into its place of shared memory. Their leader reduces these, exchanges
the result with the other leaders, and puts what comes of it into all places (csrc/messages/early_turns.h).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from hvdlite import _native
from hvdlite.collectives.polite import polite_look
from hvdlite.collectives.thresholds import at_once_bytes
from hvdlite.config import Config
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.memory.base import FusionBuffer, Memory
from hvdlite.memory.layout import Layout
from hvdlite.memory.segment import Segment
from hvdlite.memory.views import Buffer
from hvdlite.naps import nap_until
from hvdlite.recorder import Lane, Recorder

if TYPE_CHECKING:
    from hvdlite.collectives.bound import BoundSchedule
    from hvdlite.collectives.requests import Endpoint

E = TypeVar("E", bound=_native.EarlyAllreduce)

MOST_BYTES = 32 << 10


class Leaders(Protocol):
    """The leaders of all nodes; see `hvdlite.collectives.ring.RingBackend`."""

    endpoint: Endpoint

    def bound_allreduce(self, buf: Buffer, reduction: Reduction) -> BoundSchedule: ...

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
        place: of `MOST_BYTES`.
        turns: of `turns_bytes`, for the ranks of this node.
        counts: of these ranks, of which one that sleeps is woken when what it waits for has come.
        nodes: of how many ranks each is.
        ranks: of this node, by their names for people.
        spin_us: how long ranks of a node look for one another before they sleep.
        timeout_s: the longest wait for other ranks.
        check: raises once the world has failed.

    Attributes:
        most_bytes: that it takes; none until `configure` was called.
        began_ns: when the last has, by `time.monotonic_ns`.
    """

    def __init__(
        self,
        leaders: Leaders | None,
        place: FusionBuffer,
        turns: Segment,
        counts: _native.ReadyCounts,
        memory: Memory,
        *,
        nodes: Sequence[int],
        ranks: Sequence[int],
        spin_us: int,
        timeout_s: float,
        check: Callable[[], None],
        recorder: Recorder,
    ) -> None:
        self.most_bytes = 0
        self._nodes = len(nodes)
        self._is_split = max(nodes) > 1
        self._leaders = leaders
        self._places = {dtype: place.buffer(0, MOST_BYTES // dtype.itemsize, dtype) for dtype in DType}
        self._parts: dict[tuple[DType, int], Buffer] = {}  # of `_places`, by type and elements
        self._segment = turns
        self._turns = _native.EarlyTurns(counts, turns.address)
        self._memory = memory
        self._ranks = ranks
        self._look = polite_look() if leaders is None else leaders.endpoint.polite_look
        self._spin_us = spin_us
        self._timeout_s = timeout_s
        self._check = check
        self._recorder = recorder
        self._part: Buffer | None = None  # of what has begun
        self._exchange: BoundSchedule | None = None  # of it, while it is on its way; None on ranks that lead no node
        self._label = ""
        self.began_ns = 0

    @staticmethod
    def turns_bytes(ranks: int) -> int:
        """What so many ranks of a node need of zeroed memory."""
        return _native.EarlyTurns.bytes_needed(ranks)

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
        """Put this rank's tensors on their way; on a node's leader it returns when all ranks of the node have.

        Args:
            inputs: as they lie in ``layout``, of at least a byte and at most `MOST_BYTES`; None: nobody wants the
                result.
        """
        part = self._begin(layout, label, time.monotonic_ns())
        if inputs is not None:
            self._memory.pack(inputs, layout.dtype, part, 0)
        self._turns.begin()
        if self._leaders is not None:
            in_node, across = self._split(reduction)
            self._reduce_in_node(part, in_node)
            self._exchange = self._leaders.begin_allreduce(part, across, label)
        self._part = part

    def _begin(self, layout: Layout, label: str, began_ns: int) -> Buffer:
        assert self._part is None, label
        self._label, self.began_ns = label, began_ns
        return self._part_of(layout)

    def _split(self, reduction: Reduction) -> tuple[Reduction | None, Reduction]:
        """What is done in the node, if anything, and between nodes."""
        return reduction.split() if self._is_split else (None, reduction)

    def _reduce_in_node(self, part: Buffer, reduction: Reduction | None) -> None:
        """Of a leader: all places into its own, when all ranks of the node have begun."""
        all_have_begun = self._turns.all_have_begun
        if not all_have_begun():
            late = f"'{self._label}': not all ranks of {list(self._ranks)} on this node have come"
            nap_until(all_have_begun, late, timeout_s=self._timeout_s, check=self._check)
        if reduction is not None:
            _native.reduce([part.address], part.copies, part.numel, part.dtype, *reduction)

    def prepared(
        self,
        counts: _native.ReadyCounts,
        layout: Layout,
        reduction: Reduction,
        patience_s: float,
        make: Callable[..., E],
    ) -> E | None:
        """`begin` and `finish` in one call, unless a rank is late; None where native code finds no MPI.

        Args:
            patience_s: the longest wait for other ranks of the node to be ready.
            make: the call, of what `hvdlite._native.EarlyAllreduce` takes.
        """
        if self._leaders is not None and self._leaders.endpoint.functions is None:
            return None
        place = self._part_of(layout)
        in_node, _ = self._split(reduction)
        tensors = layout.numels, layout.offsets, layout.end, place.copies, place.index, layout.dtype, layout.wire_dtype
        shape = _native.EarlyShape(*tensors, in_node)
        return make(counts, self._turns, self._look, shape, self._spin_us, patience_s)

    def bind(self, call: _native.EarlyAllreduce, layout: Layout, reduction: Reduction) -> BoundSchedule:
        """Give ``call``, which cannot run, of the leader of a node, what it exchanges by; returns that."""
        assert self._leaders is not None
        _, across = self._split(reduction)
        schedule = self._leaders.bound_allreduce(self._part_of(layout), across)
        call.bind(schedule.messages)
        return schedule

    def take_over(self, call: _native.EarlyAllreduce, layout: Layout, reduction: Reduction, label: str) -> None:
        """What ``call`` has begun and not done is as if by `begin`."""
        part, progress = self._begin(layout, label, call.began_ns), call.progress
        if self._leaders is not None:
            in_node, across = self._split(reduction)

            def go_on(messages: _native.BoundMessages) -> int:
                if progress != call.NODE_IS_LATE:
                    return progress
                self._reduce_in_node(part, in_node)
                return messages.start()

            self._exchange = self._leaders.begin_allreduce(part, across, label, go_on)
        self._part = part

    def has_come(self) -> bool:
        """Of what has begun: whether its result is there, so that `finish` will not wait for other nodes."""
        if self._exchange is not None and self._exchange.advance():
            self._exchange = None
            self._spread()
        return self._exchange is None and self._turns.has_come()

    @property
    def result_address(self) -> int:
        """Of what has come."""
        assert self._part is not None
        return self._part.address

    def look(self, is_disturbed: Callable[[], bool]) -> bool:
        """Of what has begun: look for `has_come` or ``is_disturbed()``, as long as is polite; whether it is so."""
        return self._look.until(lambda: self.has_come() or is_disturbed())

    def _spread(self) -> None:
        """Of a leader: the result into all places."""
        part = self._part
        assert part is not None
        others = [place for place in part.copies if place != part.address]
        if others:  # one source and no scale: a copy that reads once
            _native.reduce(others, [part.address], part.nbytes, DType.UINT8, ReduceOp.SUM)
        self._turns.bring()

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
        if outputs is not None:
            self._memory.unpack(part, 0, outputs, layout.dtype)
        self._part = None

    def drop(self, inputs: _native.TensorList | None, layout: Layout, reduction: Reduction, label: str) -> None:
        """Some ranks have begun what will not be done: bring it to its end. All ranks call it at one place.

        Args:
            inputs: of who has not begun, where others look at them.
        """
        if not self.has_begun:
            self.begin(inputs, layout, reduction, label)
        self.finish(None, layout)

    def comes_soon(self, is_disturbed: Callable[[], bool], patience_s: float) -> bool:
        """Whether what has begun has come before ``is_disturbed()`` is true, and in time; waits for it.

        Args:
            patience_s: since it has begun.
        """
        until_s = self.began_ns / 1e9 + min(patience_s, self._timeout_s / 2)
        has_come, clock = self.has_come, time.monotonic
        self._wait(lambda: has_come() or is_disturbed() or clock() >= until_s)
        return has_come()

    def finish_soon(
        self, outputs: _native.TensorList, layout: Layout, is_disturbed: Callable[[], bool], patience_s: float
    ) -> bool:
        """`finish`, if it `comes_soon`; whether it has."""
        if not self.comes_soon(is_disturbed, patience_s):
            return False
        self.finish(outputs, layout)
        return True

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
        late = f"'{self._label}': rank {self._ranks[0]}, which exchanges for this node, brought no result"
        nap_until(done, late, timeout_s=self._timeout_s, check=self._check)

    def tensors(self, addresses: Sequence[int], layout: Layout) -> _native.TensorList:
        return self._memory.tensors(addresses, layout.numels, layout.offsets)

    def await_node(self, counts: _native.ReadyCounts, plan: int, count: int, heard: int, patience_s: float) -> bool:
        """Whether all ranks of the node are ready."""
        return len(self._ranks) == 1 or counts.wait(plan, count, heard, patience_s, self._spin_us)

    def record(self, label: str, began_ns: int, layout: Layout) -> None:
        """One of tensors as ``layout`` says has come to its end."""
        lane, now_ns = Lane.NODE_ALLREDUCE if self._leaders is None else Lane.RING, time.monotonic_ns()
        self._recorder.add(lane, label, began_ns, now_ns, layout.nbytes, layout.wire_dtype.label)

    def _part_of(self, layout: Layout) -> Buffer:
        key = layout.wire_dtype, layout.end
        return self._parts.get(key) or self._parts.setdefault(key, self._places[key[0]].narrow(0, layout.end))
