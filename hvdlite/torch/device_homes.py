"""Gradients that live in a fusion buffer on GPUs: a kernel copies what autograd leaves elsewhere, none copies back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.memory.base import FusionBuffer
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.views import OnDevice, TensorView
from hvdlite.torch.device import Now, current_stream
from hvdlite.torch.gradients import Slot
from hvdlite.torch.homes import HomeBucket


class DeviceHomeBucket(HomeBucket):
    """As `HomeBucket`. The stream of the user packs the small gradients, and all are ready when it has come so far."""

    def __init__(
        self, name: str, slots: Sequence[Slot], memory: DeviceMemory, buffer: FusionBuffer, offset_bytes: int
    ) -> None:
        super().__init__(name, slots, memory, buffer, offset_bytes)
        self._device_memory = memory

    def load(self) -> None:
        super().load()
        here = Now().on_device(self.slots[0].param)  # after all that was enqueued for them
        inputs, outputs = self.loaded
        self.loaded = _at(here, inputs), _at(here, outputs)

    def _pack_small(self, gradients: Sequence[torch.Tensor | None]) -> None:
        stream = current_stream(self._small[0].param)
        self._device_memory.pack_on(stream, self._as_in_block(gradients), self._block)


def _at(here: OnDevice | None, views: Sequence[TensorView]) -> list[TensorView]:
    return [view._replace(device=here) for view in views]
