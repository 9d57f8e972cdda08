"""Messages of a process group from and to memory of GPUs, by way of the host's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import torch

from hvdlite import _native
from hvdlite.collectives.base import LATE_GPU
from hvdlite.distributed.blocks import block_of, part_of
from hvdlite.memory.views import OnDevice
from hvdlite.naps import nap_until
from hvdlite.torch.device import Now

_LEAST_BYTES = 64 << 10


class DeviceMessages:
    """Of GPU ``ordinal``.

    Messages lie in pageable memory while they travel, which other processes may read; the GPU copies by pinned memory.
    """

    def __init__(self, ordinal: int, check: Callable[[], None]) -> None:
        self._ordinal = ordinal
        self._check = check
        # A copy from the GPU waits for what makes the tensor; what has come must not wait behind it.
        self._from_gpu, self._to_gpu = _native.DeviceCopies(ordinal), _native.DeviceCopies(ordinal)
        self._lock = threading.Lock()  # guards _pinned
        self._pinned: list[tuple[_native.PinnedMemory, _native.Moment]] = []  # used until the moment

    def download(self, tensor: torch.Tensor, title: str, timeout_s: float) -> torch.Tensor:
        """Its bytes, (nbytes,) uint8, once the current stream and the copy have come so far.

        Raises:
            CollectiveError: they have not within ``timeout_s``, or the group has failed.
        """
        block = block_of(tensor)
        address, nbytes = part_of(block)
        where = Now().on_device(block)
        assert where is not None
        on_host = _bytes(nbytes)
        pinned = self._taken(nbytes)
        moment = self._from_gpu.begin([where.ready], [(pinned.address, address, nbytes)])
        try:
            nap_until(lambda: moment.is_reached, f"{title}: {LATE_GPU}", timeout_s=timeout_s, check=self._check)
        except BaseException:
            pinned.leave_behind()  # the copy may yet come
            raise
        if nbytes:
            ctypes.memmove(on_host.data_ptr(), pinned.address, nbytes)
        self._give_back(pinned, moment)
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
        pinned = self._taken(nbytes)
        if nbytes:
            ctypes.memmove(pinned.address, source.data_ptr(), nbytes)
        moment = self._to_gpu.begin([where.ready], [(address, pinned.address, nbytes)])
        self._give_back(pinned, moment)
        return moment

    def _taken(self, nbytes: int) -> _native.PinnedMemory:
        """Memory that no copy uses. It is never freed before the end, as the driver waits for all streams then."""
        with self._lock:
            for index, (pinned, moment) in enumerate(self._pinned):
                if pinned.nbytes >= nbytes and moment.is_reached:
                    del self._pinned[index]
                    return pinned
        return _native.PinnedMemory(self._ordinal, max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length()))

    def _give_back(self, pinned: _native.PinnedMemory, moment: _native.Moment) -> None:
        """It is free once ``moment`` is reached."""
        with self._lock:
            self._pinned.append((pinned, moment))


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
