"""Memory of a GPU: an allocation per rank of a node, which all of them map; work on it is enqueued on one stream."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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

_Shared = tuple[bytes, int | None]
"""What a rank passes on to the others: bytes, and an open file."""


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

    def add_multicast(self, buffer: FusionBuffer) -> None:
        """Give all copies of ``buffer`` one address more, by which a GPU writes to all of them, or adds them up.

        Collective in the node. ``buffer.no_multicast`` says, alike on all ranks, why it could not be.
        """
        node, segment = self._node, buffer.owner
        is_first = node.local_rank == 0
        made: list[_native.Multicast] = []

        def ask() -> _Shared:
            if not isinstance(segment, _native.FileSegment):
                raise RuntimeError("memory is shared by CUDA IPC")
            made.append(_native.Multicast(segment, node.local_size))
            return _native.cuda_device_uuid(self.ordinal).encode(), None

        try:
            gpus = [uuid for uuid, _ in self._agreed(ask)]
            if len(set(gpus)) < len(gpus):
                raise StartupError("ranks share a GPU")
            (multicast,) = made
            (_, file), *_ = self._agreed(lambda: (b"", multicast.create()) if is_first else None)
            assert file is not None

            def join() -> None:
                if not is_first:
                    multicast.open(file)
                multicast.join()

            try:
                self._agreed(join)
            finally:
                os.close(file)
            self._agreed(multicast.bind)
            self._agreed(multicast.map)
            buffer.multicast = multicast.address
        except StartupError as error:
            buffer.no_multicast = str(error)

    def _shared(self, nbytes: int) -> _native.DeviceSegment:
        made: list[_native.DeviceSegment] = []

        def share() -> _Shared | None:
            made.append(self._segments(self.ordinal, nbytes))
            return made[0].share() if self._node.local_size > 1 else None

        def map_all() -> None:
            made[0].map(
                [theirs for theirs, _ in told],
                [-1 if file is None else file for _, file in told],
                self._node.local_rank,
            )

        try:
            told = self._agreed(share)
            try:
                self._agreed(map_all)
            finally:
                for _, file in told:
                    if file is not None:
                        os.close(file)
        except StartupError as error:
            raise StartupError(f"cannot share {nbytes} bytes of memory between GPUs: {error}") from None
        return made[0]

    def _agreed(self, step: Callable[[], _Shared | None]) -> list[_Shared]:
        """What every rank's ``step`` shares, once all have made it; the caller closes the files.

        Raises:
            StartupError: on every rank of the node alike: it failed on some.
        """
        shared, file, problem = b"", None, ""
        try:
            shared, file = step() or (b"", None)
        except RuntimeError as error:
            problem = str(error)
        try:
            told = self._node.exchange(f"{shared.hex()}{_BETWEEN}{problem}", file)
        finally:
            if file is not None:
                os.close(file)
        parts = [text.partition(_BETWEEN) for text, _ in told]
        found = [f"rank {rank}: {text}" for rank, (_, _, text) in zip(self._node.ranks, parts, strict=True) if text]
        if found:
            for _, theirs in told:
                if theirs is not None:
                    os.close(theirs)
            raise StartupError("; ".join(found))
        return [(bytes.fromhex(digits), theirs) for (digits, _, _), (_, theirs) in zip(parts, told, strict=True)]

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
