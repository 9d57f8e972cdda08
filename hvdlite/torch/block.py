"""Small gradients side by side in one block of memory, in which they travel as one tensor.

Where autograd makes each gradient anew in every step, it is copied into the block, and the result is copied back, by
one native call each; to make a part of the block ``p.grad`` instead takes 1 us for each. A gradient that stays from
step to step is made a part of the block once, and then nothing is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hvdlite.memory.base import Memory, Region
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.layout import slot_offsets
from hvdlite.memory.views import TensorView
from hvdlite.torch.device import current_stream, new_empty, storage_of
from hvdlite.torch.gradients import Slot

if TYPE_CHECKING:
    from hvdlite._native import TensorList

# Of many tensors by `map`, which takes half as long as a comprehension.
_gradient = operator.attrgetter("grad")
_version = operator.attrgetter("_version")
_dtype = operator.attrgetter("dtype")
_layout = operator.attrgetter("layout")
_requires_grad = operator.attrgetter("requires_grad")
_is_active = operator.attrgetter("active")
_numel = torch.Tensor.numel
_is_contiguous = torch.Tensor.is_contiguous
_address = torch.Tensor.data_ptr
_TENSOR, _STRIDED = {torch.Tensor}, {torch.strided}


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
        for slot, offset in zip(slots, self._offsets, strict=True):
            slot.view = view_into(region, offset * dtype.itemsize, slot)
        self._buffer = region.buffer(numel, dtype)
        self.view = TensorView(self._buffer.address, (numel,), dtype, region.owner)
        self.name = slots[0].name
        if len(slots) > 1:
            self.name += f" to {slots[-1].name} ({len(slots)} parameters)"
        self._views = [slot.view for slot in slots]
        self._can_unpack = True
        self._gradients: list[torch.Tensor] = []  # as they were loaded, if they were `_are_usual`
        self._tensors: TensorList | None = None  # where their results are copied back, if they are
        self._versions: list[int] = []  # of those that were loaded last

    def load(self) -> None:
        """Fill the block with the gradients as they are."""
        gradients = list(map(_gradient, self._parameters))
        if self._are_usual(gradients):
            self._load_usual(gradients)
            return
        self._gradients = []
        contributions = [slot.contribution() for slot in self._slots]  # some may be copies
        self._pack(self._in_block([0 if tensor is None else tensor.data_ptr() for tensor in contributions]))

    def deliver(self) -> None:
        """Make every ``p.grad`` the reduced gradient."""
        gradients, self._gradients = self._gradients, []
        if gradients:
            if self._are_as_loaded(gradients):
                if self._tensors is not None:
                    self._unpack(self._tensors)
                    return
                if all(map(operator.is_, gradients, self._views)):
                    return
            for slot, version in zip(self._slots, self._versions, strict=True):
                slot.version = version
        for slot in self._slots:
            slot.deliver_view()

    def _are_usual(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether all are counted on, and `Slot.contribution` would be the gradient itself."""
        return (
            set(map(type, gradients)) == _TENSOR  # none is missing
            and all(map(_is_active, self._slots))
            and self._are_contiguous
            and set(map(_layout, gradients)) == _STRIDED
            and set(map(_dtype, gradients)) == {self._slots[0].dtype}
            and list(map(_numel, gradients)) == self._numels
            and all(map(_is_contiguous, gradients))
        )

    def _load_usual(self, gradients: list[torch.Tensor]) -> None:
        tensors = self._in_block(list(map(_address, gradients)))
        self._pack(tensors)
        before, self._versions = self._versions, list(map(_version, gradients))
        self._gradients = gradients
        # A tensor that stays has been changed more often than in the step before. One with a graph is somebody else's.
        are_new = not before or before == self._versions
        self._tensors = tensors if are_new and self._can_unpack and not any(map(_requires_grad, gradients)) else None

    def _are_as_loaded(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether they still are what they were, so that nobody needs a warning."""
        now = list(map(_gradient, self._parameters))
        return all(map(operator.is_, now, gradients)) and list(map(_version, now)) == self._versions

    def _in_block(self, addresses: Sequence[int]) -> TensorList:
        return self._memory.tensors(addresses, self._numels, self._offsets)

    def _pack(self, tensors: TensorList) -> None:
        self._memory.pack(tensors, self._buffer.dtype, self._buffer, 0)

    def _unpack(self, tensors: TensorList) -> None:
        self._memory.unpack(self._buffer, 0, tensors, self._buffer.dtype)


class DeviceBlock(Block):
    """A block on a GPU: the stream of the user packs it; its parts become ``p.grad``, which no kernel has to copy."""

    def __init__(self, memory: DeviceMemory, slots: Sequence[Slot], region: Region) -> None:
        super().__init__(memory, slots, region)
        self._device_memory = memory
        self._can_unpack = False

    def _pack(self, tensors: TensorList) -> None:
        self._device_memory.pack_on(current_stream(self._parameters[0]), tensors, self._buffer)


def view_into(region: Region, start: int, slot: Slot) -> torch.Tensor:
    """A tensor laid out like the gradient of ``slot`` from byte ``start`` of ``region`` on."""
    if not slot.nbytes:  # at the end of the region there may be no memory
        return new_empty(slot.param, tuple(slot.param.shape))
    # A storage for each: whoever copies or pickles one gradient does not take all memory along.
    storage = storage_of(region.narrow(start, slot.nbytes))
    return torch.empty(0, dtype=slot.dtype, device=storage.device).set_(storage, 0, slot.param.shape, slot.strides)


def block_bytes(slots: Sequence[Slot]) -> int:
    """Bytes of a block of ``slots``, of one dtype."""
    itemsize = slots[0].element_type.itemsize
    return slot_offsets([slot.numel for slot in slots], itemsize)[1] * itemsize
