"""Where gradients are while they are reduced: in homes in the fusion buffer, or in memory of their own.

Of a sparse gradient the rows that a rank has travel; the rest of this is about dense ones.

After ``zero_grad()``, whose default drops gradients, autograd hands over a fresh tensor in every step. On one node
that tensor is reduced where it is: it passes the shared memory in windows that stay in cache. To copy it into a home
first and reduce that takes half as long again (14 MiB: 3.7 ms against 2.7), and its memory twice. Across nodes, where
what travels has to be in one place, it is copied into its home once, and `Bucket.deliver` makes that ``p.grad``.

Gradients that stay (``zero_grad(set_to_none=False)``) live in their homes, and nothing is copied. Dropping is the
cheaper of the two: keeping means to write zeros, and then to read home and fresh gradient and write their sum.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hvdlite import _native
from hvdlite.fusion.fusion_buffer import FusionBuffer, Home, slot_offsets
from hvdlite.memory import TensorView
from hvdlite.torch.compression import AnyCompressor
from hvdlite.torch.sparse import SparseReduction, no_entries
from hvdlite.torch.tensor_view import dtype_of, view_of

_SMALL_BYTES = 32 << 10
"""Up to this size a gradient is copied into its slot by whoever submits the bucket, and travels with the other small
ones as one tensor: to describe it to the coordinator takes longer, 7 us against 1 us and 0.2 us per KiB."""


class Slot:
    """One parameter and where its gradient belongs.

    ``shape`` is that of the gradient in the order of memory, so that ranks whose parameters lie in another order
    (channels_last) are told so, instead of adding what does not belong together.
    """

    __slots__ = (
        "active", "bucket", "dtype", "index", "is_sparse", "name", "nbytes", "numel", "param", "passes_left", "shape",
        "sparse_as_dense", "strides", "version", "view",
    )  # fmt: skip

    def __init__(self, index: int, name: str, param: torch.Tensor, sparse_as_dense: bool) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.sparse_as_dense = sparse_as_dense
        self.active = False  # whether its bucket counts on it
        self.is_sparse = False  # whether all ranks reduce its gradient as a sparse one
        self.passes_left = 0
        self.version = 0  # of p.grad when its bucket was loaded; torch counts changes in place
        self.bucket: Bucket | None = None
        self.view: torch.Tensor | None = None  # of its place in the fusion buffer
        self.measure()

    def measure(self) -> None:
        """Take over dtype, shape and layout of the parameter, which may be converted as long as no plan exists."""
        self.dtype = self.param.dtype
        self.numel = self.param.numel()
        self.nbytes = self.numel * self.param.element_size()
        # As autograd lays out gradients: like the parameter where that has neither gaps nor overlaps.
        self.strides = torch.empty_like(self.param, device="meta").stride()
        self.shape = tuple(self.param.shape)
        if not self.param.is_contiguous():
            by_stride = sorted(range(self.param.dim()), key=lambda dim: -self.strides[dim])
            self.shape = tuple(self.shape[dim] for dim in by_stride)

    @property
    def is_large(self) -> bool:
        """Whether its gradient is a tensor of its own to the coordinator."""
        return self.nbytes > _SMALL_BYTES

    @property
    def could_be_sparse(self) -> bool:
        """Whether its gradient on this rank is one to be reduced as a sparse one: of rows, as embeddings have them."""
        gradient = self.param.grad
        return (
            gradient is not None
            and gradient.layout is torch.sparse_coo
            and gradient.sparse_dim() == 1
            and not self.sparse_as_dense
        )

    def fits(self, gradient: torch.Tensor) -> bool:
        """Whether `laid_out` would return ``gradient`` itself, as it would in almost all cases; False may be wrong."""
        return (
            gradient.layout is torch.strided
            and gradient.dtype is self.dtype
            and gradient.numel() == self.numel
            and gradient.stride() == self.strides
        )

    def laid_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """``gradient`` as a gapless block in the parameter's layout: itself in almost all cases, else a copy.

        Raises:
            ValueError: the parameter was converted after the first step.
        """
        if gradient.layout is not torch.strided:
            if not self.sparse_as_dense:
                warnings.warn(
                    f"the gradient of '{self.name}' is sparse, but the ranks reduce it as a dense one: in the first "
                    "step it was dense on some rank, or missing on all, or it has several sparse dimensions. From now "
                    "on it is made dense, as with sparse_as_dense=True.",
                    stacklevel=2,
                )
                self.sparse_as_dense = True
            gradient = gradient.to_dense()
        self.check(gradient)
        if gradient.stride() == self.strides or _same_layout(gradient, self.strides):
            return gradient
        return torch.empty_strided(gradient.shape, self.strides, dtype=self.dtype).copy_(gradient)

    def check(self, gradient: torch.Tensor) -> None:
        """Raises:
        ValueError: the parameter was converted after the first step.
        """
        if gradient.dtype is not self.dtype or gradient.numel() != self.numel:
            raise ValueError(
                f"the gradient of '{self.name}' is {gradient.dtype} with {gradient.numel()} elements, but the "
                f"parameter had {self.dtype} with {self.numel} elements in the first step; convert models before that"
            )

    def dense_gradient(self) -> torch.Tensor:
        """``p.grad`` in the parameter's layout; zeros where this rank has none. Becomes ``p.grad`` itself."""
        gradient = self.param.grad if self.active else None
        if gradient is None:
            dense = torch.zeros_like(self.param, requires_grad=False)
        else:
            dense = self.laid_out(gradient.detach() if gradient.requires_grad else gradient)
        if dense is not gradient and self.active:
            self.param.grad = dense
        self.version = dense._version
        return dense

    def warn_if_changed(self, gradient: torch.Tensor | None) -> None:
        """Warn unless ``gradient``, which is ``p.grad``, is as it was when it was loaded for other ranks."""
        if gradient is not None and gradient._version != self.version:
            warnings.warn(
                f"the gradient of '{self.name}' was changed between loss.backward() and optimizer.step(), on its way "
                "to other ranks; all or part of the change is lost. Call optimizer.synchronize() before you clip or "
                "unscale gradients, and optimizer.step() inside `with optimizer.skip_synchronize():` after that.",
                stacklevel=2,
            )


def _same_layout(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether ``tensor`` lies as ``strides`` say; those of dimensions of one element mean nothing."""
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True))


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> object: ...


class Bucket(ABC):
    """Gradients that are reduced together, once all of them are there."""

    def __init__(self, name: str, slots: Sequence[Slot]) -> None:
        self.name = name
        self.slots = slots
        self.names = [slot.name for slot in slots]
        self.missing = 0  # active slots whose gradients are not complete yet
        self.loaded: Any = None  # what `load` took, until it is submitted
        self.pending: Pending | None = None  # from submission to synchronize()

    @abstractmethod
    def load(self) -> None:
        """Set `loaded`: the gradients as they are; a parameter without one contributes zeros."""

    @abstractmethod
    def submit(self, allreduce: Callable[..., Pending]) -> None:
        """Set `pending`, a reduction of what was loaded.

        Args:
            allreduce: `Group.allreduce_async` with the options that all buckets share.
        """

    @abstractmethod
    def deliver(self) -> None:
        """Make every ``p.grad`` the reduced gradient, once it is there."""


class SparseBucket(Bucket):
    """One gradient whose rows are gathered from all ranks.

    Args:
        reduction: starts it, of a sparse tensor and a name.
    """

    def __init__(self, name: str, slot: Slot, reduction: Callable[[torch.Tensor, str], SparseReduction]) -> None:
        super().__init__(name, [slot])
        self._reduction = reduction
        self._reduced: SparseReduction | None = None

    def load(self) -> None:
        slot = self.slots[0]
        gradient = slot.param.grad if slot.active else None
        if gradient is None:
            gradient = no_entries(slot.param)
        else:
            slot.check(gradient)
            slot.version = gradient._version
            if not slot.could_be_sparse:  # a dense one, after another way through the model
                gradient = gradient.to_dense().to_sparse(1)
        self.loaded = gradient

    def submit(self, allreduce: Callable[..., Pending]) -> None:
        self.pending = self._reduced = self._reduction(self.loaded, self.name)
        self.loaded = None

    def deliver(self) -> None:
        slot = self.slots[0]
        if slot.active and self._reduced is not None:
            slot.warn_if_changed(slot.param.grad)
            slot.param.grad = self._reduced.synchronize()
        self._reduced = None


class DenseBucket(Bucket):
    """Gradients that travel in one allreduce."""

    home: Home | None = None

    def load(self) -> None:
        self.loaded = self._tensors()

    def submit(self, allreduce: Callable[..., Pending]) -> None:
        inputs, outputs = self.loaded
        self.pending = allreduce(inputs, outputs, name=self.name, names=self.names, home=self.home)
        self.loaded = None

    def leave_out(self, slot: Slot) -> None:
        """Go without ``slot``; before submission, and not where slots have homes."""
        self.slots = [other for other in self.slots if other is not slot]
        self.names = [other.name for other in self.slots]

    @abstractmethod
    def _tensors(self) -> tuple[Sequence[TensorView], Sequence[TensorView]]:
        """(inputs, outputs) of the allreduce of the gradients as they are."""


class LooseBucket(DenseBucket):
    """Gradients in memory of their own, which come and go through the runtime's staging buffer."""

    def _tensors(self) -> tuple[Sequence[TensorView], Sequence[TensorView]]:
        views = [view_of(slot.dense_gradient(), slot.shape) for slot in self.slots]
        return views, views

    def deliver(self) -> None:
        for slot in self.slots:
            if slot.active:
                slot.warn_if_changed(slot.param.grad)


class CompressedBucket(DenseBucket):
    """Gradients that a user's Compressor turns into something else."""

    def __init__(self, name: str, slots: Sequence[Slot], compression: AnyCompressor) -> None:
        super().__init__(name, slots)
        self._compression = compression
        self._compressed: list[tuple[torch.Tensor, Any]] = []

    def _tensors(self) -> tuple[Sequence[TensorView], Sequence[TensorView]]:
        self._compressed = []
        for slot in self.slots:
            tensor, ctx = self._compression.compress(slot.dense_gradient())
            self._compressed.append((tensor.contiguous(), ctx))
        views = [view_of(tensor) for tensor, _ in self._compressed]
        return views, views

    def deliver(self) -> None:
        for slot, (tensor, ctx) in zip(self.slots, self._compressed, strict=True):
            if slot.active:
                assert slot.param.grad is not None
                slot.warn_if_changed(slot.param.grad)
                slot.param.grad.copy_(self._compression.decompress(tensor, ctx))
        self._compressed = []


class BlockBucket(DenseBucket):
    """Large gradients where autograd has left them, each a tensor to the runtime; and small ones in a block, where they
    stay, and which is one tensor to it."""

    def __init__(self, name: str, slots: Sequence[Slot], block: np.ndarray | None = None) -> None:
        """
        Args:
            block: memory for the small ones, (`block_bytes` of them,) uint8; its own if None.
        """
        self._large, self._small = _by_size(slots)
        super().__init__(name, [*self._large, *self._small])
        if not self._small:
            return
        self._dtype = dtype_of(self._small[0].dtype)
        self._numels = [slot.numel for slot in self._small]
        self._offsets, _ = slot_offsets(self._numels, self._dtype.itemsize)
        memory = np.zeros(block_bytes(self._small), np.uint8) if block is None else block
        for slot, offset in zip(self._small, self._offsets, strict=True):
            slot.view = _view_into(memory, offset * self._dtype.itemsize, slot)
        numel = self._offsets[-1] + self._numels[-1]
        self._block = TensorView(memory.ctypes.data, (numel,), self._dtype, memory)
        self.names = [*self.names[: len(self._large)], _range_name(self._small)]

    def _tensors(self) -> tuple[Sequence[TensorView], Sequence[TensorView]]:
        inputs, outputs = self._load_large()
        if not self._small:
            return inputs, outputs
        self._pack_small()
        return [*inputs, self._block], [*outputs, self._block]

    def _load_large(self) -> tuple[Sequence[TensorView], Sequence[TensorView]]:
        views = [view_of(slot.dense_gradient(), slot.shape) for slot in self._large]
        return views, views

    def _pack_small(self) -> None:
        addresses = []
        kept = []  # until they are copied
        for slot in self._small:
            gradient = slot.param.grad
            if gradient is None or not slot.active:
                addresses.append(0)
                continue
            slot.version = gradient._version
            if not slot.fits(gradient):
                gradient = slot.laid_out(gradient)
                kept.append(gradient)
            addresses.append(gradient.data_ptr())
        block, dtype = self._block, self._dtype
        _native.TensorList(addresses, self._numels, self._offsets).pack(block.address, 0, block.numel, dtype, dtype)

    def deliver(self) -> None:
        for slot in self.slots:
            if slot.active:
                gradient = slot.param.grad
                if gradient is None or gradient._version != slot.version:
                    slot.warn_if_changed(gradient)
                if slot.view is not None and gradient is not slot.view:
                    slot.param.grad = slot.view


class HomeBucket(BlockBucket):
    """Gradients that live in the fusion buffer: the large ones, and behind them the block of the small ones."""

    def __init__(self, name: str, slots: Sequence[Slot], buffer: FusionBuffer, offset_bytes: int) -> None:
        large, small = _by_size(slots)
        starts, end = _home_layout(large, offset_bytes)
        super().__init__(name, slots, buffer.memory[end : end + block_bytes(small)] if small else None)
        self.home = Home(buffer, offset_bytes)
        for slot, start in zip(large, starts, strict=True):
            slot.view = _view_into(buffer.memory, start, slot)
        self._places = [view_of(slot.view, slot.shape) for slot in large if slot.view is not None]
        self._zeros = [TensorView(0, view.shape, view.dtype, None) for view in self._places]

    def _load_large(self) -> tuple[Sequence[TensorView], Sequence[TensorView]]:
        inputs = list(self._places)
        for i, slot in enumerate(self._large):
            gradient = slot.param.grad
            if gradient is None or not slot.active:
                inputs[i] = self._zeros[i]
                continue
            slot.version = gradient._version
            if gradient is not slot.view:
                inputs[i] = view_of(slot.laid_out(gradient), slot.shape)
        return inputs, self._places


def _by_size(slots: Sequence[Slot]) -> tuple[list[Slot], list[Slot]]:
    """(large, small)."""
    large = [slot for slot in slots if slot.is_large]
    return large, [slot for slot in slots if not slot.is_large]


def _view_into(memory: np.ndarray, start: int, slot: Slot) -> torch.Tensor:
    """A tensor laid out like the gradient of ``slot`` from byte ``start`` of ``memory`` on."""
    # A storage for each: whoever copies or pickles one gradient does not take all memory along.
    storage = torch.from_numpy(memory[start : start + slot.nbytes]).untyped_storage()
    return torch.empty(0, dtype=slot.dtype).set_(storage, 0, slot.param.shape, slot.strides)


def block_bytes(slots: Sequence[Slot]) -> int:
    """Bytes of a block of ``slots``, of one dtype."""
    itemsize = slots[0].param.element_size()
    return slot_offsets([slot.numel for slot in slots], itemsize)[1] * itemsize


def _home_layout(large: Sequence[Slot], offset_bytes: int) -> tuple[list[int], int]:
    """(where each of ``large`` starts, where the block of the small ones does), in bytes, as `slot_offsets` has it."""
    if not large:
        return [], offset_bytes
    itemsize = large[0].param.element_size()
    offsets, numel = slot_offsets([slot.numel for slot in large], itemsize)
    return [offset_bytes + offset * itemsize for offset in offsets], offset_bytes + numel * itemsize


def _range_name(slots: Sequence[Slot]) -> str:
    return slots[0].name if len(slots) == 1 else f"{slots[0].name} to {slots[-1].name} ({len(slots)} parameters)"
