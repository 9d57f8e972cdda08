"""Buckets of gradients in memory of their own: as they are, as a user's Compressor makes them, or sparse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.torch.compression import AnyCompressor
from hvdlite.torch.gradients import Bucket, Slot, dense_views
from hvdlite.torch.sparse import no_entries
from hvdlite.torch.tensor_view import views_of


class DenseBucket(Bucket):
    """Gradients that travel in one allreduce; `loaded` has the inputs and the outputs."""

    def leave_out(self, slot: Slot) -> None:
        """Go without ``slot``; before submission, and not where slots have homes."""
        self.slots = [other for other in self.slots if other is not slot]
        self.names = [other.name for other in self.slots]
        self.count_active()


class LooseBucket(DenseBucket):
    """Gradients where autograd has left them, each a tensor to the coordinator."""

    loads_views = True

    def load(self) -> None:
        views = dense_views(self.slots)
        self.loaded = views, views

    def deliver(self) -> None:
        for slot, view in zip(self.slots, self.loaded[1], strict=True):
            slot.deliver_in_place(view.owner)


class CompressedBucket(DenseBucket):
    """Gradients that a user's Compressor turns into something else."""

    def __init__(self, name: str, slots: Sequence[Slot], compression: AnyCompressor) -> None:
        super().__init__(name, slots)
        self._compression = compression
        self._compressed: list[tuple[torch.Tensor, torch.Tensor, Any]] = []  # each with its gradient

    def load(self) -> None:
        self._compressed = []
        for slot in self.slots:
            gradient = slot.dense()
            tensor, ctx = self._compression.compress(gradient)
            self._compressed.append((gradient, tensor.contiguous(), ctx))
        views = views_of(tensor for _, tensor, _ in self._compressed)
        self.loaded = views, views

    def deliver(self) -> None:
        for slot, (gradient, tensor, ctx) in zip(self.slots, self._compressed, strict=True):
            slot.deliver_in_place(gradient)
            gradient.copy_(self._compression.decompress(tensor, ctx))
        self._compressed = []


class SparseBucket(Bucket):
    """One gradient whose rows are gathered from all ranks; `loaded` is a sparse tensor."""

    def load(self) -> None:
        (slot,) = self.slots
        gradient = slot.sparse_contribution()
        self.loaded = no_entries(slot.param, slot.dtype) if gradient is None else gradient

    def deliver(self) -> None:
        (slot,) = self.slots
        if slot.active and self.pending is not None:
            slot.note_if_changed()
            slot.hand_over(self.pending.wait())
