"""Small gradients side by side in one block of memory, in which they travel as one tensor.

Where autograd makes each gradient anew in every step, native calls look at all of them, copy them into the block, and
copy the result back; to make a part of the block ``p.grad`` instead takes 1 us for each. A gradient that stays from
step to step is made a part of the block once, and then nothing is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch

from hvdlite import _native
from hvdlite.memory.base import Memory, Region
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.layout import slot_offsets
from hvdlite.memory.views import TensorView
from hvdlite.torch.device import current_stream
from hvdlite.torch.gradients import Slot, list_of

_is_active = operator.attrgetter("active")  # by `map`, which takes half as long as a comprehension


class Block:
    """The block of ``slots``, of one dtype.

    Args:
        memory: that packs and unpacks it.
        region: `block_bytes`; private memory of the host if None.

    Attributes:
        name: of what travels, for messages.
        view: likewise, for the coordinator.
    """

    def __init__(self, memory: Memory, slots: Sequence[Slot], region: Region | None = None) -> None:
        self._memory = memory
        self._slots = slots
        dtype = slots[0].element_type
        self._parameters = [slot.param for slot in slots]
        self._are_contiguous = all(slot.is_contiguous for slot in slots)
        self._numels = [slot.numel for slot in slots]
        self._offsets, _ = slot_offsets(self._numels, dtype.itemsize)
        numel = self._offsets[-1] + self._numels[-1]
        if region is None:
            region = Region.of_numpy(np.zeros(block_bytes(slots), np.uint8))
        views = [
            slot.settle_in(region, offset * dtype.itemsize) for slot, offset in zip(slots, self._offsets, strict=True)
        ]
        self._places = [view.data_ptr() for view in views]
        self._buffer = region.buffer(numel, dtype)
        self.view = TensorView(self._buffer.address, (numel,), dtype, region.owner)
        self.name = list_of(slots)
        self._can_unpack = True
        self._taken = _native.GradientSnapshot()  # of gradients as they were loaded
        self._tensors = self._in_block([0] * len(slots))  # where these lie, if they are as autograd makes them
        self._is_usual = False  # they are
        self._copies_back = False  # and take the results
        self._versions: list[int] = []  # of those that were loaded last

    def load(self) -> None:
        """Fill the block with the gradients as they are."""
        self._taken.take(self._parameters)
        self._is_usual = (
            self._are_contiguous
            and all(map(_is_active, self._slots))
            and self._taken.locate(self._tensors, torch.Tensor, torch.strided, self._slots[0].dtype)
        )
        if self._is_usual:
            self._load_usual()
        else:
            self._taken.drop()
            contributions = [slot.contribution() for slot in self._slots]  # some may be copies
            self._pack(self._in_block([0 if tensor is None else tensor.data_ptr() for tensor in contributions]))

    def deliver(self, *, is_exposed: bool) -> None:
        """Make every ``p.grad`` the reduced gradient.

        Args:
            is_exposed: whether the program could change gradients since `load`, and needs a warning if it did.
        """
        if self._is_usual and (not is_exposed or self._taken.are_unchanged(self._parameters)):
            if self._copies_back:
                self._unpack(self._tensors)
            elif self._taken.addresses != self._places:
                self._deliver_views()
        else:
            self._deliver_views()
        self._taken.drop()

    def _load_usual(self) -> None:
        """Gradients for which `Slot.contribution` would be the gradient itself."""
        self._pack(self._tensors)
        before, self._versions = self._versions, self._taken.versions
        # A tensor that stays has been changed more often than in the step before. One with a graph is somebody else's.
        are_new = not before or before == self._versions
        self._copies_back = are_new and self._can_unpack and not self._taken.require_grad()

    def _deliver_views(self) -> None:
        if self._is_usual:
            taken = self._taken
            for slot, *noted in zip(self._slots, taken.gradients, self._versions, taken.addresses, strict=True):
                slot.loaded, slot.version, slot.address = noted
        for slot in self._slots:
            slot.deliver_view()

    def _in_block(self, addresses: Sequence[int]) -> _native.TensorList:
        return self._memory.tensors(addresses, self._numels, self._offsets)

    def _pack(self, tensors: _native.TensorList) -> None:
        self._memory.pack(tensors, self._buffer.dtype, self._buffer, 0)

    def _unpack(self, tensors: _native.TensorList) -> None:
        self._memory.unpack(self._buffer, 0, tensors, self._buffer.dtype)


class DeviceBlock(Block):
    """A block on a GPU: the stream of the user packs it; its parts become ``p.grad``, which no kernel has to copy."""

    def __init__(self, memory: DeviceMemory, slots: Sequence[Slot], region: Region) -> None:
        super().__init__(memory, slots, region)
        self._device_memory = memory
        self._can_unpack = False

    def _pack(self, tensors: _native.TensorList) -> None:
        self._device_memory.pack_on(current_stream(self._parameters[0]), tensors, self._buffer)


def block_bytes(slots: Sequence[Slot]) -> int:
    """Bytes of a block of ``slots``, of one dtype."""
    itemsize = slots[0].element_type.itemsize
    return slot_offsets([slot.numel for slot in slots], itemsize)[1] * itemsize
