"""What a user thread hands to the coordinator: the request that all ranks must share, and this rank's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdlite.coordinator.handle import Handle
from hvdlite.coordinator.messages import Claim, Key, Request, Sizes
from hvdlite.fusion.fusion_buffer import Home
from hvdlite.memory import TensorView

Allocate = Callable[[int, tuple[int, ...]], TensorView]
"""(index of the tensor, shape of its result) -> where the result shall go; called on the coordinator thread."""


@dataclass(slots=True)
class Submission:
    """One operation of this rank. ``inputs`` and ``outputs`` keep the tensors alive until it is complete."""

    request: Request
    sequence: int
    inputs: Sequence[TensorView] = ()
    outputs: Sequence[TensorView] = ()
    sizes: Sizes | None = None
    home: Home | None = None
    allocate: Allocate | None = None
    handle: Handle = field(default_factory=Handle)
    submitted_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def key(self) -> Key:
        return self.request.name, self.sequence

    @property
    def label(self) -> str:
        """The name for people: in errors and in the timeline."""
        return self.request.name if self.sequence < 0 else f"{self.request.name}.{self.sequence}"

    def claim(self, rank: int) -> Claim:
        if self.sizes is None:
            return Claim(self.request, self.sequence)
        return Claim(self.request, self.sequence, (rank,), (self.sizes,))
