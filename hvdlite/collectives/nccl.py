"""GPUs by NCCL: what a backend does is enqueued on the stream of its memory, and the host waits for none of it.

An operation's `Completion` is there at once: whatever is enqueued on the stream from then on comes after the operation.
What goes wrong on the device later is found by the next call, or by `NcclBackend.check_health`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from hvdlite import _native, agreement, environment, nccl_library
from hvdlite.agreement import Ranks
from hvdlite.collectives.base import DONE, Backend, Completion
from hvdlite.dtypes import SUM, DType, ReduceOp, Reduction
from hvdlite.errors import CollectiveError, HorovodInternalError, StartupError
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.layout import Range
from hvdlite.memory.segment import Segment
from hvdlite.memory.views import Buffer
from hvdlite.nccl_library import version_name
from hvdlite.recorder import Lane, Recorder

_LOG = logging.getLogger("hvdlite")
_INTERFACES = "NCCL_SOCKET_IFNAME"
_LOOK_S = 0.2  # between two looks at the world while ranks connect
_REGISTER_S = 20.0  # of a call that waits for all ranks only
_WAYS = {
    _native.NcclCommunicator.UNREGISTERED: "not registered",
    _native.NcclCommunicator.BUFFER: "a registered buffer",
    _native.NcclCommunicator.WINDOW: "a window",
}
_CLOSE_S = 5.0  # NCCL is left behind then; the end of the process takes it


class NcclBackend(Backend):
    """Collectives between GPUs, one for each rank; collective to build, as `close` is.

    16-bit floats are summed as NCCL does it: partial sums are rounded to 16 bits, in an order that is the same on every
    rank and in every run with the same ranks and sizes. Where the sum is scaled down, as for an average, contributions
    are scaled before they are summed, since partial sums would overflow.

    Args:
        everybody: more ranks perhaps than those of this backend, which build backends of their own at the same time;
            where one of these fails, all do.
        members: the ranks of ``everybody`` between which this backend works.
        interfaces: those that NCCL uses between hosts, unless NCCL_SOCKET_IFNAME is set; empty: any.
        ranks: what errors call the ranks; their number, if None.
        progress: of `progress_bytes`, zeroed and shared by all ranks, where they are on one node; errors then say
            who is late.
        timeout_s: the longest wait for the other ranks.
        check: raises once the world has failed.

    Raises:
        StartupError: on every rank: some rank has no NCCL, or another one, or cannot connect.
        CollectiveError: on every rank: some ranks did not come.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        everybody: Ranks,
        members: Sequence[int],
        interfaces: str,
        ranks: Sequence[int] | None,
        progress: Segment | None,
        timeout_s: float,
        check: Callable[[], None],
        recorder: Recorder,
    ) -> None:
        self.rank = members.index(everybody.rank)
        self.size = len(members)
        self.memory: DeviceMemory = memory
        self.recorder = recorder
        self._ranks = tuple(range(self.size) if ranks is None else ranks)
        self._progress = progress
        self._begun = 0  # operations
        self._timeout_s = timeout_s
        self._check = check
        self._everybody = everybody
        self._members = tuple(members)
        self._registers = True  # memory in which NCCL may work
        self._prepared: WeakSet[Any] = WeakSet()  # segments
        self._word = memory.allocate(DType.INT32.itemsize).buffer(0, 1, DType.INT32)  # for barriers
        _use_interfaces(interfaces)
        self._meet()

    @staticmethod
    def progress_bytes(size: int) -> int:
        """Of the segment ``progress``."""
        return 8 * size

    def prepare(self, buf: Buffer) -> None:
        """Have NCCL work in place in ``buf``, all of a segment of the memory. Collective over ``everybody``.

        Memory is used in one way on all ranks: where these differ, or one cannot, NCCL copies from then on, by
        communicators that are made anew, since a refusal may have broken one.
        """
        if not self._registers or buf.owner in self._prepared:  # backends that are composed of this one share it
            return
        self._prepared.add(buf.owner)
        told = self._everybody.allgather(self._register(buf))
        if len(set(told)) == 1 and not told[0].problem:
            return
        self._registers = False
        if self._everybody.rank == 0:
            what = {rank: outcome.problem or _WAYS[outcome.way] for rank, outcome in enumerate(told)}
            _LOG.info("NCCL copies what it reduces, as it does not work in place in memory of all ranks: %s", what)
        if not self.memory.settle(self._timeout_s):
            self._expect_ok(_native.Barrier.TIMEOUT, "the last work before NCCL connects anew")
        self._meet()

    def supports(self, dtype: DType) -> bool:
        return dtype not in (DType.INT16, DType.BOOL)

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        op, prescale, postscale = _early_scales(reduction, buf.dtype)
        with self._span(Lane.NODE_ALLREDUCE, buf.nbytes, buf.dtype, label):
            self._scale(buf, prescale=prescale)
            if buf.numel > 0:
                self._call("allreduce", label, self._communicator.all_reduce, buf.address, buf.numel, buf.dtype, op)
            self._scale(buf, postscale=postscale)
        return DONE

    def reduce_scatter(
        self,
        buf: Buffer,
        blocks: Sequence[Sequence[Range]],
        reduction: Reduction = SUM,
        *,
        stays_open: bool = False,
        label: str = "",
    ) -> Completion:
        """One call for equal blocks that follow one another, else a group of reductions to one rank each."""
        assert len(blocks) == self.size, (len(blocks), self.size)
        op, prescale, postscale = _early_scales(reduction, buf.dtype)
        with self._span(Lane.NODE_REDUCE_SCATTER, buf.nbytes, buf.dtype, label):
            self._scale(buf, prescale=prescale)
            equal = _equal_blocks(blocks)
            if equal is not None:
                address, numel = _address(buf, equal.start), equal.numel
                self._call("reduce_scatter", label, self._communicator.reduce_scatter, address, numel, buf.dtype, op)
            elif parts := self._parts(buf, blocks, 1):
                self._call("reduce_scatter", label, self._communicator.reduce, parts, buf.dtype, op)
            for start, stop in blocks[self.rank]:
                self._scale(buf.narrow(start, stop), postscale=postscale)
        return DONE

    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        """One call for equal blocks that follow one another, else a group of broadcasts."""
        assert len(blocks) == self.size, (len(blocks), self.size)
        with self._span(Lane.NODE_ALLGATHER, buf.nbytes, buf.dtype, label):
            equal = _equal_blocks(blocks)
            if equal is not None:
                address, nbytes = _address(buf, equal.start), equal.numel * buf.dtype.itemsize
                self._call("allgather", label, self._communicator.all_gather, address, nbytes)
            elif parts := self._parts(buf, blocks, buf.dtype.itemsize):
                self._call("allgather", label, self._communicator.broadcast, parts)
        return DONE

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        with self._span(Lane.BROADCAST, buf.nbytes, buf.dtype, label):
            if buf.numel > 0:
                self._call("broadcast", label, self._communicator.broadcast, [(buf.address, buf.nbytes, root)])
        return DONE

    def barrier(self) -> None:
        """An allreduce of one word for which the host does wait, and so for all that was enqueued before."""
        self.allreduce(self._word, label="")
        self._call("barrier", "", self._communicator.wait)

    def wake(self) -> None:
        """End what is on its way here: the stream goes on, and what it works on is undefined."""
        self._communicator.abort()

    def check_health(self) -> None:
        """Raise what NCCL has noticed while nobody waited for it."""
        problem = self._communicator.error()
        if problem:
            self._fail("NCCL", problem)

    def close(self) -> None:
        if not self._communicator.close(min(_CLOSE_S, self._timeout_s)):
            _LOG.warning("NCCL does not let go of its communicator; it is left to the end of the process")

    def _register(self, buf: Buffer) -> _Outcome:
        assert isinstance(buf.owner, _native.DeviceSegment)
        limit_s = min(_REGISTER_S, self._timeout_s)
        self._step()
        try:
            status, way = self._communicator.register_memory(buf.owner, buf.index, limit_s)
        except RuntimeError as error:
            return _Outcome(_native.NcclCommunicator.UNREGISTERED, str(error))
        if status == _native.Barrier.TIMEOUT:  # the rank for which this one waits has a problem of its own to tell
            return _Outcome(_native.NcclCommunicator.UNREGISTERED, f"it takes more than {limit_s:g} s")
        self._expect_ok(status, "registering memory with NCCL")
        return _Outcome(way, "")

    def _meet(self) -> None:
        """Make the communicator; collective over ``everybody``."""
        told = agreement.exchange(self._everybody, self._card)
        cards = [told[member] for member in self._members]
        agreement.exchange(self._everybody, lambda: self._connect(cards))

    def _card(self) -> _Card:
        try:
            version = nccl_library.load().version
            unique_id = _native.NcclCommunicator.unique_id(self.memory.ordinal) if self.rank == 0 else b""
        except RuntimeError as error:
            raise StartupError(f"NCCL cannot be used here: {error}") from error
        return _Card(version, unique_id)

    def _connect(self, cards: Sequence[_Card]) -> None:
        """Wait for all ranks, with looks at the world, which cannot wake us yet."""
        _compare([card.version for card in cards], self._ranks)
        activity = "connecting by NCCL"
        until = time.monotonic() + self._timeout_s
        self._step()
        try:
            self._communicator = _native.NcclCommunicator(self.memory.ordinal, cards[0].unique_id, self.rank, self.size)
            while True:
                self._check()
                left_s = until - time.monotonic()
                status = self._communicator.settle(min(_LOOK_S, max(left_s, 0.0)))
                if status != _native.Barrier.TIMEOUT or left_s < _LOOK_S:
                    break
        except HorovodInternalError:
            raise
        except RuntimeError as error:
            raise StartupError(f"{activity}: {error}") from error
        self._expect_ok(status, activity)

    def _call(self, operation: str, label: str, call: Callable[..., int], *arguments: object) -> None:
        """``call`` on the stream of the memory, with the time limit."""
        activity = f"{operation} '{label}'" if label else operation
        self._step()
        try:
            status = call(*arguments, self.memory.stream.handle, self._timeout_s)
        except RuntimeError as error:
            self._fail(activity, str(error), error)
        else:
            self._expect_ok(status, activity)

    def _step(self) -> None:
        self._begun += 1
        if self._progress is not None:
            _native.store64(self._progress.address + 8 * self.rank, self._begun)

    def _expect_ok(self, status: int, activity: str) -> None:
        if status == _native.Barrier.OK:
            return
        self.wake()
        self._check()
        if status == _native.Barrier.ABORTED:
            raise CollectiveError(f"{activity}: the job was aborted while this rank waited for NCCL")
        late = [self._ranks[place] for place in self.late()] or ("some" if self._progress is None else "some GPUs")
        raise CollectiveError(
            f"{activity}: of ranks {list(self._ranks)}, {late} did not come within {self._timeout_s:g} s; "
            "if they are only slow, raise HVDLITE_COLLECTIVE_TIMEOUT_SECONDS"
        )

    def late(self) -> Sequence[int]:
        if self._progress is None:
            return ()
        address = self._progress.address
        return [place for place in range(self.size) if _native.load64(address + 8 * place) < self._begun]

    def _fail(self, activity: str, problem: str, cause: Exception | None = None) -> None:
        """What the world knows has precedence: that a rank died says more than that its connection did."""
        self.wake()
        self._check()
        raise CollectiveError(f"{activity}: between ranks {list(self._ranks)}: {problem}") from cause

    def _scale(self, buf: Buffer, *, prescale: float = 1.0, postscale: float = 1.0) -> None:
        """As a reduction over this rank."""
        if (prescale, postscale) != (1.0, 1.0) and buf.numel > 0:
            own = [buf.address]
            self.memory.stream.reduce(own, own, buf.numel, buf.dtype, ReduceOp.SUM, prescale, postscale)

    @staticmethod
    def _parts(buf: Buffer, blocks: Sequence[Sequence[Range]], unit: int) -> list[tuple[int, int, int]]:
        """(address, numel times ``unit``, rank) of every range that is not empty."""
        return [
            (_address(buf, start), (stop - start) * unit, rank)
            for rank, ranges in enumerate(blocks)
            for start, stop in ranges
            if start < stop
        ]


class _Card(NamedTuple):
    """What a rank brings to the start; the unique id is that of the first rank."""

    version: int
    unique_id: bytes


class _Outcome(NamedTuple):
    """What became of a registration.

    Attributes:
        way: as `_WAYS`.
        problem: empty: there is none.
    """

    way: int
    problem: str


class _EqualBlocks(NamedTuple):
    """Block r is [start + r * numel, start + (r + 1) * numel)."""

    start: int
    numel: int


def _equal_blocks(blocks: Sequence[Sequence[Range]]) -> _EqualBlocks | None:
    if len(blocks[0]) != 1:
        return None
    start, stop = blocks[0][0]
    numel = stop - start
    for rank, ranges in enumerate(blocks):
        if list(ranges) != [(start + rank * numel, start + (rank + 1) * numel)]:
            return None
    return _EqualBlocks(start, numel) if numel > 0 else None


def _address(buf: Buffer, element: int) -> int:
    return buf.address + element * buf.dtype.itemsize


def _early_scales(reduction: Reduction, dtype: DType) -> Reduction:
    """``reduction`` with what scales a sum of 16-bit floats down before the sum."""
    op, prescale, postscale = reduction
    if dtype.is_half and op is ReduceOp.SUM and abs(postscale) < 1.0:
        return Reduction(op, prescale * postscale, 1.0)
    return reduction


def _compare(versions: Sequence[int], ranks: Sequence[int]) -> None:
    """Raises StartupError unless all are the same but for the last number."""
    if len({version // 100 for version in versions}) > 1:
        by_version: dict[int, list[int]] = {}
        for rank, version in zip(ranks, versions, strict=True):
            by_version.setdefault(version, []).append(rank)
        which = ", ".join(f"{version_name(version)} on ranks {those}" for version, those in by_version.items())
        raise StartupError(
            f"ranks have different versions of NCCL: {which}; install the same one everywhere, "
            "or name one by HVDLITE_NCCL_LIBRARY"
        )


def _use_interfaces(spec: str) -> None:
    """Before the first communicator of the process, which is when NCCL looks."""
    if spec.strip() and _INTERFACES not in environment.variables():
        environment.add({_INTERFACES: spec})
        _LOG.info("NCCL uses the network interfaces %s (%s was not set)", spec, _INTERFACES)
