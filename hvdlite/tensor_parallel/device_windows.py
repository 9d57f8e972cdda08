"""Windows in the memory of the GPUs of a node, and the streams by which ranks exchange through them.

As on the host (window.py) there are two windows, used in turns. What is said there of a rank that has passed a barrier
holds here for its stream: when it has passed the meeting of exchange n + 1, the streams of all ranks are done with the
window of exchange n, but for one that is read later, see `will_be_read_late`. Threads never wait for a GPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from hvdlite import _native
from hvdlite.device_clock import DeviceClock
from hvdlite.errors import CollectiveError, gpu_blamed
from hvdlite.group import Group
from hvdlite.memory.base import FusionBuffer
from hvdlite.memory.layout import align_up, shard_bounds
from hvdlite.memory.views import OnDevice
from hvdlite.operations.allocate import allocate_on_device
from hvdlite.recorder import Lane
from hvdlite.tensor_parallel.shared_meeting import SharedMeeting, shared_memory
from hvdlite.tensor_parallel.window import window_bytes
from hvdlite.torch.device import bytes_of

_LOG = logging.getLogger("hvdlite")
_WINDOWS = 2
_SETTLE_S = 5.0
_SLICE_S = 0.005
_MANY = 64


class Place(NamedTuple):
    """A part of a window, of which every rank has a copy.

    Attributes:
        memory: this rank's copy, (nbytes,) uint8.
        addresses: of every rank's copy.
        multicast: the address of all copies together; 0: there is none.
    """

    memory: torch.Tensor
    addresses: tuple[int, ...]
    multicast: int


def _allocate(group: Group, each: int, where: OnDevice, name: str, *, multicast: bool) -> FusionBuffer | None:
    """Windows of ``each`` bytes; collective."""
    return allocate_on_device(group, _WINDOWS * each, where, f"{name}.{each}", multicast=multicast)


class _Enqueued(NamedTuple):
    """An exchange.

    Attributes:
        began: timed, as ``moment`` is then; None where nothing is recorded.
    """

    began: _native.Moment | None
    moment: _native.Moment
    purpose: str
    since_s: float


class DeviceWindows:
    """What ranks of ``meeting`` share on GPUs. Collective to build; `wake`, `watch` and `close` are for the world.

    Attributes:
        first, second: streams on which copies between GPUs take turns; ranks meet, and reduce, on the first.
        no_multicast: why the windows have no address in common; empty if they have one.

    Args:
        where: this rank's GPU.
        name: of the memory; the same on every rank, and not taken.
    """

    @classmethod
    def build(cls, meeting: SharedMeeting, where: OnDevice, name: str) -> DeviceWindows | str:
        """Collective. Where GPUs do not reach one another's memory, on all ranks alike: how tensors there travel."""
        skips = meeting.group.config.ub_skip_multicast
        buffer = _allocate(meeting.group, window_bytes(1), where, name, multicast=not skips)
        if buffer is None:
            return "by way of memory of the host"
        if len(buffer.copies) != meeting.size:
            return "by NCCL"
        windows = cls(meeting, where, name)
        windows.no_multicast = "UB_SKIPMC is set" if skips else buffer.no_multicast
        meeting.group.world.accompany(windows)
        windows._take(buffer, where, "windows")
        return windows

    def __init__(self, meeting: SharedMeeting, where: OnDevice, name: str) -> None:
        self.ordinal = where.ordinal
        self._meeting = meeting
        self._name = name
        barrier_bytes = align_up(_native.StreamBarrier.bytes_needed(meeting.size))
        words = shared_memory(meeting.group, f"{name}.words", barrier_bytes + 8 * meeting.size)
        self._exchanges = words.numpy()[barrier_bytes : barrier_bytes + 8 * meeting.size].view(np.int64)
        """That each rank has enqueued, as it was when it closed."""
        self._enqueued_in_all = 0  # of this rank
        self.first, self.second = _native.DeviceStream(where.ordinal), _native.DeviceStream(where.ordinal)
        self._barrier = _native.StreamBarrier(self.first, words.numpy(), meeting.rank, meeting.size)
        self.no_multicast = ""
        self._buffer: FusionBuffer | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._each = 0  # bytes of a window
        self._turn = 0
        self._read_late = deque([False] * (_WINDOWS + 1), _WINDOWS + 1)  # in the latest exchanges; at last in this one
        self._met: _native.Moment | None = None  # the latest meeting
        self._last: _native.Moment | None = None  # the end of the latest exchange
        self._stream = 0  # the caller's, in the latest exchange
        self._began: _native.Moment | None = None  # the latest exchange, if the timeline is written
        self._clock: DeviceClock | None = None
        self._lock = threading.Lock()  # guards _enqueued, and the clock
        self._enqueued: deque[_Enqueued] = deque()

    def reserve(self, nbytes: int, where: OnDevice, purpose: object = "reserve") -> None:
        """Make each window at least so large; all ranks ask for the same, for the same purpose."""
        if nbytes <= self._each:
            return
        self._meeting.meet(f"{purpose}, with {nbytes} bytes of memory of GPUs")
        each, has_multicast = window_bytes(nbytes), not self.no_multicast
        buffer = _allocate(self._meeting.group, each, where, self._name, multicast=has_multicast)
        assert buffer is not None, "the GPUs have shared memory before"
        if has_multicast and buffer.no_multicast:
            self.give_up_multicast(f"windows of {each} bytes: {buffer.no_multicast}")
        self._take(buffer, where, purpose)

    def give_up_multicast(self, why: str) -> None:
        """For good; all ranks do, for the same reason."""
        self.no_multicast = why
        if self._meeting.rank == 0:
            _LOG.warning("tensor parallelism: GPUs go on without multicast: %s", why)

    def _take(self, buffer: FusionBuffer, where: OnDevice, purpose: object) -> None:
        """Each rank has zeroed its own copy, which others may write once all have met."""
        before = self._buffer, self._memory
        self._buffer, self._each, self._memory = buffer, buffer.nbytes // _WINDOWS, bytes_of(buffer.region)
        self.begin(where)
        self.meet()
        self.ended(str(purpose))
        # Not earlier: others read them by multicast until they have met, and it would take our copy from them.
        del before

    def begin(self, where: OnDevice) -> None:
        """The caller's current stream may write into the next window."""
        stream = where.current_stream()
        if self._met is not None:
            self._met.precede(stream)
            if stream != self._stream:  # which may have to read a window yet
                _native.Moment(self.ordinal, self._stream).precede(stream)
        self._stream = stream
        self._turn = (self._turn + 1) % _WINDOWS
        self._read_late.append(False)
        is_recorded = self._meeting.group.recorder.enabled
        self._began = _native.Moment(self.ordinal, stream, True) if is_recorded else None

    def will_be_read_late(self) -> None:
        """The window whose turn it is will be read when the next exchange has begun, but not any longer."""
        self._read_late[-1] = True

    def await_readers(self) -> None:
        """Before this rank writes into the windows of others, whose turn it is: they have read what is there.

        Where they did so before the latest meeting, it costs nothing.
        """
        if self._read_late[0]:
            self.meet()
            self.second.follow([self.moment(self.first)])

    def place(self, offset_bytes: int, nbytes: int) -> Place:
        """A part of the window whose turn it is."""
        assert self._buffer is not None
        begin = self._turn * self._each + offset_bytes
        addresses = tuple(address + begin for address in self._buffer.copies)
        multicast = 0 if self.no_multicast else self._buffer.multicast + begin
        return Place(self._memory[begin : begin + nbytes], addresses, multicast)

    def follow(self, stream: _native.DeviceStream) -> None:
        """``stream`` comes after what the caller has enqueued until now."""
        stream.follow([_native.Moment(self.ordinal, self._stream)])

    def join(self) -> None:
        """The first stream comes after what the second one has been given."""
        self.first.follow([self.moment(self.second)])

    def meet(self) -> None:
        """The first stream, after what the caller has enqueued until now, waits for those of all ranks."""
        self.follow(self.first)
        self._barrier.meet()
        self._met = self.moment(self.first)

    def allreduce(self, place: Place, numel: int, dtype: int, op: int) -> None:
        """Add up all copies, into all copies, between two meetings."""
        self.follow(self.first)
        self._barrier.allreduce(place.addresses, numel, dtype, op, 1.0, 1.0)

    def multicast_allreduce(self, place: Place, dtype: int) -> None:
        """Likewise, each rank an equal share of it in the switch."""
        self.meet()
        nbytes = place.memory.numel()
        start, stop = shard_bounds(nbytes, self._meeting.size, self._meeting.rank, 1)
        self.first.multicast_sum(0, place.multicast + start, stop - start, dtype)
        self.meet()

    def moment(self, stream: _native.DeviceStream) -> _native.Moment:
        """Reached when ``stream`` has done all that it was given until now."""
        return _native.Moment(self.ordinal, stream.handle)

    def ended(self, purpose: str) -> _native.Moment:
        """Reached when the first stream has done an exchange, of which all has been enqueued now."""
        self._last = _native.Moment(self.ordinal, self.first.handle, self._began is not None)
        self._enqueued_in_all += 1
        self._meeting.group.recorder.mark(Lane.WINDOW, purpose)
        with self._lock:
            if self._began is not None and self._clock is None:
                self._clock = DeviceClock(self.ordinal, self._meeting.group.recorder)
            is_first = not self._enqueued
            self._enqueued.append(_Enqueued(self._began, self._last, purpose, time.monotonic()))
            if len(self._enqueued) > _MANY:
                self._forget_done()
        if is_first:
            self._meeting.group.world.coordinator.wake()  # which has somebody to watch from now on
        return self._last

    # For the world.

    @property
    def is_under_way(self) -> bool:
        """Whether a stream has something to do, as far as is known."""
        return bool(self._enqueued)

    def watch(self) -> None:
        """See that the first stream goes on.

        Raises:
            CollectiveError: it has not come to the end of an exchange in time; names it, and the ranks that are late.
        """
        with self._lock:
            with gpu_blamed(self._meeting.ranks[self._meeting.rank], "tensor parallelism"):
                self._forget_done()
            if not self._enqueued:
                return
            _, _, purpose, since_s = self._enqueued[0]
        limit_s = self._meeting.group.world.config.ub_timeout_s
        if time.monotonic() - since_s > limit_s:
            late = [self._meeting.ranks[place] for place in self._barrier.late()]
            raise CollectiveError(
                f"tensor parallelism, {purpose}, ranks {list(self._meeting.ranks)}: GPU {self.ordinal} has not done it "
                f"in {limit_s:g} s"
                + (f", and the GPUs of ranks {late} are behind" if late else "")
                + "; if they are only slow, raise HVDLITE_UB_TIMEOUT_SECONDS"
            )

    def _forget_done(self) -> None:
        while self._enqueued and self._enqueued[0].moment.is_reached:
            began, ended, purpose, _ = self._enqueued.popleft()
            if began is not None and self._clock is not None:
                self._clock.record(purpose, began, ended)

    def wake(self) -> None:
        """End every wait of the streams, as the world has failed."""
        self._barrier.release()

    def close(self) -> None:
        """Let the streams come to an end; what does not is left behind."""
        if not self.no_multicast:  # what others have yet to read goes with us
            self._await_own_exchanges()
            self._barrier.meet()
            self._last = self.moment(self.first)
        deadline_s = time.monotonic() + _SETTLE_S
        while self._last is not None and not self._last.is_reached:
            if time.monotonic() > deadline_s:
                _LOG.error("GPU %d does not come to an end with tensor parallelism; it is left behind", self.ordinal)
                return
            time.sleep(_SLICE_S)

    def _await_own_exchanges(self) -> None:
        """Until this rank's main thread has enqueued its part of what others have; all ranks close at once.

        Who ends the world may be an exchange ahead, and a meeting of this rank would be taken for its part in that.
        """
        self._exchanges[self._meeting.rank] = self._enqueued_in_all
        self._meeting.group.world.engine.backend.barrier()
        deadline_s = time.monotonic() + _SETTLE_S
        while self._enqueued_in_all < self._exchanges.max() and time.monotonic() < deadline_s:
            time.sleep(_SLICE_S)
