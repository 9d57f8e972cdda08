"""Messages of a process group from and to memory of GPUs, by way of the host's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvdlite import _native
from hvdlite.device_transfer import DeviceTransfer
from hvdlite.distributed.blocks import block_of, part_of
from hvdlite.dtypes import DType
from hvdlite.memory.views import OnDevice, TensorView
from hvdlite.recorder import Recorder
from hvdlite.torch.device import Now

_LEAST_BYTES = 64 << 10


class DeviceMessages:
    """Of GPU ``ordinal``.

    Messages lie in pageable memory while they travel, which other processes may read; the GPU copies by pinned memory.
    """

    def __init__(self, ordinal: int, recorder: Recorder, check: Callable[[], None]) -> None:
        self._ordinal = ordinal
        self._lock = threading.Lock()  # guards what follows; several threads send
        self._transfer = DeviceTransfer(recorder, 0.0, check)
        self._copies = _native.DeviceCopies(ordinal)
        self._pinned: list[tuple[_native.PinnedMemory, _native.Moment]] = []  # used until the moment

    def download(self, tensor: torch.Tensor, title: str, timeout_s: float) -> torch.Tensor:
        """Its bytes, (nbytes,) uint8, once the current stream and the copy have come so far.

        Raises:
            CollectiveError: they have not within ``timeout_s``, or the group has failed.
        """
        block = block_of(tensor)
        address, nbytes = part_of(block)
        on_host = _bytes(nbytes)
        view = TensorView(address if nbytes else 0, (nbytes,), DType.UINT8, block, Now().on_device(block))

        def take(sources: Sequence[TensorView], _: Sequence[TensorView]) -> None:
            if nbytes:
                ctypes.memmove(on_host.data_ptr(), sources[0].address, nbytes)

        with self._lock:
            self._transfer.timeout_s = timeout_s
            self._transfer.run_on([view], [], take, title)
        return on_host

    def expect(self, tensor: torch.Tensor) -> Expected:
        """Room for a message to ``tensor``.

        Raises:
            ValueError: it is not contiguous.
        """
        where = Now().on_device(tensor)
        assert where is not None
        if not tensor.is_contiguous():
            raise ValueError("recv takes contiguous tensors on a GPU; pass one, and copy it")
        return Expected(self, *part_of(tensor), where)

    def upload(self, address: int, source: torch.Tensor, where: OnDevice) -> _native.Moment:
        """Enqueue the copy of ``source`` to the GPU; when it is done."""
        nbytes = source.numel()
        with self._lock:
            block = self._taken(nbytes)
            if nbytes:
                ctypes.memmove(block.address, source.data_ptr(), nbytes)
            moment = self._copies.begin([where.ready], [(address, block.address, nbytes)])
            self._pinned.append((block, moment))
        return moment

    def _taken(self, nbytes: int) -> _native.PinnedMemory:
        """Memory that no copy uses. It is never freed before the end, as the driver waits for all streams then."""
        for index, (block, moment) in enumerate(self._pinned):
            if block.nbytes >= nbytes and moment.is_reached:
                del self._pinned[index]
                return block
        return _native.PinnedMemory(self._ordinal, max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length()))


class Expected:
    """A message on its way to ``nbytes`` at ``address``.

    Attributes:
        on_host: where it arrives, (nbytes,) uint8.
        where: the tensor is, and when it may be overwritten.
    """

    def __init__(self, messages: DeviceMessages, address: int, nbytes: int, where: OnDevice) -> None:
        self.on_host = _bytes(nbytes)
        self.where = where
        self._messages = messages
        self._address = address

    def upload(self) -> _native.Moment:
        """It has come; when the tensor has it."""
        return self._messages.upload(self._address, self.on_host, self.where)


def _bytes(nbytes: int) -> torch.Tensor:
    """On the host, whatever torch's default device is."""
    return torch.from_numpy(np.empty(nbytes, np.uint8))
