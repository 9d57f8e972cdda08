"""Where pipelines add what arrives: on the host at once, on a GPU by a stream that a host need not wait for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from hvdlite import _native
from hvdlite.collectives.schedule import ReduceCall
from hvdlite.dtypes import DType
from hvdlite.memory.base import Region
from hvdlite.memory.layout import ALIGNMENT, align_up

if TYPE_CHECKING:
    from hvdlite._native import Moment
    from hvdlite.memory.device import DeviceMemory


class Adder(ABC):
    """Does the arithmetic of one schedule after the other, in the order of the calls.

    Attributes:
        is_immediate: what a call is given has been done when it returns.
        segments: of which a message is made, at most.
    """

    is_immediate: bool
    segments: int

    @abstractmethod
    def scratch(self, nbytes: int) -> Region:
        """Memory for what arrives and is to be added."""

    @abstractmethod
    def begin(self, calls: Sequence[ReduceCall]) -> Moment | None:
        """Begin a schedule by ``calls``, after all that works on its memory; when that is done, None: it is."""

    @abstractmethod
    def add(self, calls: Sequence[ReduceCall]) -> Moment | None:
        """When ``calls`` are done; None: they are."""

    @abstractmethod
    def end(self) -> None:
        """What the memory is used for from now on comes after what has been added."""

    @abstractmethod
    def settle(self) -> None:
        """Return once nothing works on the memory."""

    @abstractmethod
    def context(self) -> AbstractContextManager[object]:
        """In which MPI is given addresses of the memory."""


class HostAdder(Adder):
    """In the calls themselves."""

    is_immediate = True
    segments = 1

    def scratch(self, nbytes: int) -> Region:
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return Region.of_numpy(memory[start : start + align_up(max(nbytes, 1))])

    def begin(self, calls: Sequence[ReduceCall]) -> None:
        self.add(calls)

    def add(self, calls: Sequence[ReduceCall]) -> None:
        for call in calls:
            _native.reduce(*call)

    def end(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()


class DeviceAdder(Adder):
    """By kernels on a stream of its own, which need not wait for what the memory's stream does meanwhile.

    A kernel and a wake-up cost the more, the smaller messages are; so these are of several segments.
    """

    is_immediate = False

    def __init__(self, memory: DeviceMemory, segments: int = 16) -> None:
        self.segments = segments
        self._memory = memory
        self._stream = _native.DeviceStream(memory.ordinal)
        self._context = _native.DeviceContext(memory.ordinal)

    def scratch(self, nbytes: int) -> Region:
        view = self._memory.filled((nbytes,), DType.UINT8, 0)
        return Region(view.address, nbytes, view.owner, self._memory.ordinal)

    def begin(self, calls: Sequence[ReduceCall]) -> Moment:
        self._stream.follow([self._memory.moment()])
        return self._enqueue(calls)

    def add(self, calls: Sequence[ReduceCall]) -> Moment | None:
        return self._enqueue(calls) if calls else None

    def end(self) -> None:
        self._memory.stream.follow([self._enqueue([])])

    def settle(self) -> None:
        self._memory.moment().wait()

    def context(self) -> AbstractContextManager[object]:
        return self._context

    def _enqueue(self, calls: Sequence[ReduceCall]) -> Moment:
        for call in calls:
            self._stream.reduce(*call)
        return _native.Moment(self._memory.ordinal, self._stream.handle)
