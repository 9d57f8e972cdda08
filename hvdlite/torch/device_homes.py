"""Gradients that live in a fusion buffer on GPUs: a kernel copies what autograd leaves elsewhere, none copies back."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.memory.views import OnDevice, TensorView
from hvdlite.torch.device import Now
from hvdlite.torch.homes import HomeBucket


class DeviceHomeBucket(HomeBucket):
    """As `HomeBucket`; all is loaded when the stream of the user has come so far."""

    def load(self) -> None:
        super().load()
        here = Now().on_device(self.slots[0].param)  # after all that was enqueued for them
        inputs, outputs = self.loaded
        self.loaded = _at(here, inputs), _at(here, outputs)


def _at(here: OnDevice | None, views: Sequence[TensorView]) -> list[TensorView]:
    return [view._replace(device=here) for view in views]
