"""Memory of a GPU: an allocation per rank of a node, which all of them map; work on it is enqueued on one stream."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Protocol

from hvdlite import _native
from hvdlite.dtypes import DType
from hvdlite.errors import StartupError
from hvdlite.memory.base import FusionBuffer, Memory
from hvdlite.memory.layout import align_up
from hvdlite.memory.segment import Segment
from hvdlite.memory.views import Buffer, TensorView

_SLICE_S = 0.005
_BETWEEN = ":"  # what a rank has shared, in hexadecimal digits, and its problem


class DeviceSharer(Protocol):
    """The ranks of a node, as far as memory of GPUs is concerned."""

    ranks: tuple[int, ...]
    local_rank: int
    local_size: int

    def share(self, nbytes: int) -> Segment:
        """A zeroed segment of the host's memory that every local rank maps; collective."""

    def exchange(self, text: str, file: int | None = None) -> list[tuple[str, int | None]]:
        """What every local rank gave, open files for this process to close among it; collective."""


class DeviceMemory(Memory):
    """What the ranks of ``node`` share on their GPUs, of which this rank's is ``ordinal``; it keeps no buffer alive.

    A call returns when its work is enqueued on ``stream``, and the work is done in the order of the calls.

    Args:
        segments: how ranks share it; the same on every rank.
    """

    is_on_device = True

    def __init__(
        self, node: DeviceSharer, ordinal: int, segments: type[_native.DeviceSegment] = _native.FileSegment
    ) -> None:
        super().__init__(node.local_rank, ordinal)
        self.ordinal = ordinal
        self.stream = _native.DeviceStream(ordinal)
        self._node = node
        self._segments = segments

    def allocate(self, nbytes: int) -> FusionBuffer:
        """See `Memory.allocate`.

        Raises:
            StartupError: on every rank of the node alike: a GPU has not so much left, or cannot reach another one.
        """
        segment = self._shared(nbytes)
        buffer = self._new_buffer(tuple(segment.copies), nbytes, segment)
        self.stream.zero(buffer.address, nbytes)
        return buffer

    def _shared(self, nbytes: int) -> _native.DeviceSegment:
        segment: _native.DeviceSegment | None = None
        shared, file, problem = b"", None, ""
        try:
            segment = self._segments(self.ordinal, nbytes)
            if self._node.local_size > 1:
                shared, file = segment.share()
        except RuntimeError as error:
            problem = str(error)
        try:
            told = self._node.exchange(f"{shared.hex()}{_BETWEEN}{problem}", file)
        finally:
            if file is not None:
                os.close(file)
        files = [theirs for _, theirs in told]
        parts = [text.partition(_BETWEEN) for text, _ in told]
        try:
            self._raise_problems(nbytes, [theirs for _, _, theirs in parts])
            assert segment is not None
            try:
                segment.map(
                    [bytes.fromhex(theirs) for theirs, _, _ in parts],
                    [-1 if theirs is None else theirs for theirs in files],
                    self._node.local_rank,
                )
            except RuntimeError as error:
                problem = str(error)
        finally:
            for theirs in files:
                if theirs is not None:
                    os.close(theirs)
        self._raise_problems(nbytes, [text for text, _ in self._node.exchange(problem)])
        return segment

    def _raise_problems(self, nbytes: int, problems: Sequence[str]) -> None:
        found = [f"rank {rank}: {text}" for rank, text in zip(self._node.ranks, problems, strict=True) if text]
        if found:
            raise StartupError(f"cannot share {nbytes} bytes of memory between GPUs: {'; '.join(found)}")

    def filled(self, shape: tuple[int, ...], dtype: DType, value: float) -> TensorView:
        view = TensorView(0, shape, dtype, None)
        segment = self._segments(self.ordinal, align_up(view.nbytes))
        segment.map([b""], [-1], 0)
        self.stream.fill(segment.copies[0], view.numel, dtype, value)
        return view._replace(address=segment.copies[0], owner=segment)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.stream.copy(target, source, nbytes)

    tensors = staticmethod(_native.TensorList)

    def pack(self, tensors: _native.TensorList, dtype: DType, part: Buffer, begin: int) -> None:
        self.stream.pack(tensors, part.address, begin, begin + part.numel, dtype, part.dtype)

    def pack_on(self, stream: int, tensors: _native.TensorList, part: Buffer) -> None:
        """`pack` of tensors of the type of ``part``, all of it, enqueued on a stream of the caller's."""
        _native.DeviceStream.borrowed(self.ordinal, stream).pack(
            tensors, part.address, 0, part.numel, part.dtype, part.dtype
        )

    def unpack(self, part: Buffer, begin: int, tensors: _native.TensorList, dtype: DType) -> None:
        self.stream.unpack(tensors, part.address, begin, begin + part.numel, part.dtype, dtype)

    def moment(self) -> _native.Moment:
        """Reached once all is done that was enqueued until now."""
        return _native.Moment(self.ordinal, self.stream.handle)

    def settle(self, timeout_s: float) -> bool:
        """Sleep until nothing is left to do; whether that came true in time."""
        moment, deadline_s = self.moment(), time.monotonic() + timeout_s
        while not moment.is_reached:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_SLICE_S)
        return True
