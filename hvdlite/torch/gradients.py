"""A gradient's slot, and the contract of buckets: to load gradients that are there, and to deliver reduced ones."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hvdlite.memory.base import Home, Region
from hvdlite.memory.views import TensorView
from hvdlite.torch.device import Now, is_on_device, new_empty, storage_of
from hvdlite.torch.tensor_view import check_memory, dtype_of, gradient_dtype, is_expanded
from hvdlite.tracebacks import stacklevel

SMALL_BYTES = 32 << 10
"""Up to this size a gradient is copied into its slot by whoever submits the bucket, and travels with the other small
ones as one tensor: to describe it to the coordinator takes longer, 7 us against 1 us and 0.2 us per KiB."""


Kind = tuple[torch.dtype, bool]
"""Element type, and whether on a GPU: gradients of one kind may share a bucket."""


class ConvertedParameter(ValueError):
    """A parameter is another than when its bucket was made."""


class Slot:
    """One parameter and the place of its gradient.

    Attributes:
        active: whether the bucket counts on this gradient.
        address: of the memory of `loaded`; programs change what is behind a tensor, as by ``p.grad.data = ...``.
        changed: the slots of the optimizer whose gradients somebody has changed on their way; emptied by who reduces.
        is_on_device: whether the parameter is in the memory of a GPU.
        is_sparse: whether all ranks reduce this gradient as a sparse one.
        loaded: ``p.grad`` when the bucket was loaded, or when it came if that was long before; until it is delivered.
        passes_left: backward passes until the gradient is complete; kept by `Arrival`.
        place: in a block or a fusion buffer, where the gradient has one: the region, and the byte where it starts.
        shape: of the gradient in the order of memory, so that ranks whose parameters lie in another order
            (channels_last) are told so, instead of adding what does not belong together.
        version: of `loaded`; torch counts changes in place.
        view: a tensor in `place`, if there is one.
    """

    __slots__ = (
        "active", "address", "bucket", "changed", "dtype", "element_type", "index", "is_contiguous", "is_on_device",
        "is_sparse", "loaded", "name", "nbytes", "numel", "param", "passes_left", "place", "shape", "sparse_as_dense",
        "strides", "version", "view",
    )  # fmt: skip

    def __init__(self, index: int, name: str, param: torch.Tensor, sparse_as_dense: bool, changed: list[Slot]) -> None:
        self.index = index
        self.changed = changed
        self.name = name
        self.param = param
        self.sparse_as_dense = sparse_as_dense
        self.active = False
        self.is_sparse = False
        self.passes_left = 0
        self.bucket: Bucket | None = None
        self.place: tuple[Region, int] | None = None
        self.view: torch.Tensor | None = None
        self.loaded: torch.Tensor | None = None
        self.version = self.address = 0
        self.measure()

    def measure(self) -> None:
        """Take over dtype, shape and layout from the parameter, which may be converted between steps."""
        self.dtype = gradient_dtype(self.param)
        self.element_type = dtype_of(self.dtype)
        self.is_on_device = is_on_device(self.param)
        self.numel = self.param.numel()
        self.nbytes = self.numel * self.dtype.itemsize
        # As autograd lays out gradients: like the parameter where that has neither gaps nor overlaps.
        self.strides = torch.empty_like(self.param, device="meta").stride()
        self.is_contiguous = torch.empty_like(self.param, device="meta").is_contiguous()
        self.shape = tuple(self.param.shape)
        if not self.param.is_contiguous():
            by_stride = sorted(range(self.param.dim()), key=lambda dim: -self.strides[dim])
            self.shape = tuple(self.shape[dim] for dim in by_stride)

    @property
    def kind(self) -> Kind:
        return self.dtype, self.is_on_device

    @property
    def is_converted(self) -> bool:
        """Whether the parameter has another dtype by now, or has moved to a GPU or from there."""
        return self.kind != (gradient_dtype(self.param), is_on_device(self.param))

    @property
    def is_large(self) -> bool:
        """Whether its gradient is a tensor of its own to the coordinator."""
        return self.nbytes > SMALL_BYTES

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

    def contribution(self) -> torch.Tensor | None:
        """``p.grad`` as a gapless block in the parameter's layout; None where this rank contributes zeros.

        Raises:
            ConvertedParameter: the parameter was converted since its bucket was made.
            ValueError: the gradient has no memory of its own.
        """
        gradient = self._gradient()
        if gradient is None:
            return None
        self._see_to_view()
        if (
            type(gradient) is torch.Tensor
            and gradient.layout is torch.strided
            and gradient.dtype is self.dtype
            and gradient.numel() == self.numel
            and (gradient.is_contiguous() if self.is_contiguous else gradient.stride() == self.strides)
            and not gradient.is_neg()
        ):
            self._note_loaded(gradient)
            return gradient
        laid_out = self._laid_out(gradient)
        self._note_loaded(gradient)
        return laid_out

    def sparse_contribution(self) -> torch.Tensor | None:
        """``p.grad`` as a sparse tensor with one sparse dimension; None where this rank has no rows.

        Raises:
            ConvertedParameter: the parameter was converted since its bucket was made.
        """
        gradient = self._gradient()
        if gradient is None:
            return None
        self._check(gradient)
        self._note_loaded(gradient)
        # A dense one comes after another way through the model.
        return gradient if self.could_be_sparse else gradient.to_dense().to_sparse(1)

    def dense(self) -> torch.Tensor:
        """The contribution as ``p.grad`` itself, where the result can be written; zeros where there is none."""
        dense = self.contribution()
        if dense is None:
            dense = torch.zeros_like(self.param, dtype=self.dtype, requires_grad=False)
        elif dense.requires_grad or _is_anothers(dense) or (_is_shared(dense) and not _is_placed(dense)):
            dense = dense.detach().clone()
        if self.active and dense is not self.param.grad:
            self.param.grad = dense
        self._note_loaded(dense)
        return dense

    def _gradient(self) -> torch.Tensor | None:
        """``p.grad``, if it is to be reduced. Without one it is the parameter that tells of a conversion."""
        gradient = self.param.grad if self.active else None
        if gradient is None and self.active and self.is_converted:
            raise self._converted(self.param)
        return gradient

    def _note_loaded(self, gradient: torch.Tensor) -> None:
        self.loaded, self.version, self.address = gradient, gradient._version, _address_of(gradient)

    def note_arrival(self) -> None:
        """Have `note_if_changed` tell what is done to ``p.grad`` from now on."""
        if self.param.grad is not None:
            self._note_loaded(self.param.grad)

    def note_if_changed(self) -> bool:
        """Add this one to `changed` unless ``p.grad`` is as it was when it was loaded for other ranks.

        Returns:
            Whether it is `loaded`, in the same memory.
        """
        gradient = self.param.grad
        loaded, self.loaded = self.loaded, None
        if gradient is None:
            if loaded is not None:  # dropped, as of a layer that is not to be trained yet
                self.changed.append(self)
            return False
        is_there = gradient is loaded and _address_of(gradient) == self.address
        is_other = loaded is not None and not is_there
        # Views of one buffer have one version, which the gradients of others change.
        is_changed = is_other or (gradient._version != self.version and not _is_placed(gradient))
        if is_changed and not self.is_converted:  # of which nothing is lost
            self.changed.append(self)
        return is_there

    def deliver_in_place(self, reduced: torch.Tensor) -> None:
        """Make ``reduced``, in which the gradient was reduced where it was, ``p.grad``, should that be another now."""
        if self.active and not self.note_if_changed():
            self.hand_over(reduced)

    def hand_over(self, reduced: torch.Tensor) -> None:
        """Make ``reduced`` ``p.grad``, converted like the parameter if that was done after backward.

        Who trains in half precision steps in full: backward(), model.float(), step(), model.half().
        """
        try:
            self.param.grad = reduced
        except RuntimeError:  # to ask each parameter before costs more
            self.param.grad = reduced.to(self.param.device, gradient_dtype(self.param))

    def settle_in(self, region: Region, start: int) -> torch.Tensor:
        """Have a `view`, which is returned, from byte ``start`` of ``region`` on."""
        self.place = region, start
        self.view = view = self._view_into(region, start)
        return view

    def _view_into(self, region: Region, start: int) -> torch.Tensor:
        if not self.nbytes:  # at the end of the region there may be no memory
            return new_empty(self.param, tuple(self.param.shape)).to(self.dtype)
        # A storage for each: whoever copies or pickles one gradient does not take all memory along.
        storage = storage_of(region.narrow(start, self.nbytes))
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, 0, self.param.shape, self.strides)

    def _see_to_view(self) -> None:
        """Make `view` anew if the program, whose ``p.grad`` it has been, has given it other memory."""
        if self.place is not None and self.view is not None and self.nbytes:
            region, start = self.place
            if self.view.data_ptr() != region.address + start:
                self.view = self._view_into(region, start)

    def deliver_view(self) -> None:
        """Make `view`, if there is one, ``p.grad``, or the contents of that where the program has chosen its place."""
        if not self.active:
            return
        self.note_if_changed()
        self._see_to_view()
        gradient = self.param.grad
        if self.view is None or gradient is self.view:
            return
        if gradient is not None and _is_placed(gradient):
            gradient.copy_(self.view)
        else:
            self.hand_over(self.view)

    def enter_view(self) -> None:
        """Have a gradient live in `view`, if there is one, unless the program has chosen its place."""
        gradient = self.param.grad
        if self.active and self.view is not None and gradient is not None and not _is_placed(gradient):
            self.param.grad = self.view.copy_(gradient)

    def leave_view(self) -> None:
        """Copy a gradient that lives in `view` to memory of its own; the view will hold something else."""
        if self.view is not None and self.param.grad is self.view:
            self.param.grad = self.view.clone()

    def _laid_out(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is not torch.strided:
            if not self.sparse_as_dense:
                warnings.warn(
                    f"the gradient of '{self.name}' is sparse, but the ranks reduce it as a dense one: in the first "
                    "step it was dense on some rank, or missing on all, or it has several sparse dimensions. From now "
                    "on it is made dense, as with sparse_as_dense=True.",
                    stacklevel=stacklevel(),
                )
                self.sparse_as_dense = True
            gradient = gradient.to_dense()
        self._check(gradient)
        check_memory(gradient, f"the gradient of '{self.name}'")
        gradient = gradient.resolve_neg()  # the imaginary part of a conjugate reads as minus what is there
        if _same_layout(gradient, self.strides):
            return gradient
        return torch.empty_strided(gradient.shape, self.strides, dtype=self.dtype, device=gradient.device).copy_(
            gradient
        )

    def _check(self, gradient: torch.Tensor) -> None:
        if gradient.dtype is not self.dtype or gradient.numel() != self.numel:
            raise self._converted(gradient)

    def _converted(self, found: torch.Tensor) -> ConvertedParameter:
        return ConvertedParameter(
            f"the gradient of '{self.name}' is {found.dtype} with {found.numel()} elements, but the parameter had "
            f"{self.dtype} with {self.numel} elements in the step before; convert models between steps"
        )


def dense_views(slots: Sequence[Slot]) -> list[TensorView]:
    """The view of `Slot.dense` of each."""
    gradients = [slot.dense() for slot in slots]  # which may take kernels
    now = Now()
    return [
        TensorView(
            slot.address,
            slot.shape,
            slot.element_type,
            gradient.data,  # owns the memory as it is now, should p.grad.data = ... bring another
            now.on_device(gradient) if slot.is_on_device else None,
        )
        for slot, gradient in zip(slots, gradients, strict=True)
    ]


def _address_of(gradient: torch.Tensor) -> int:
    """0 of one without a place for its elements."""
    return gradient.data_ptr() if gradient.layout is torch.strided else 0


def _is_placed(gradient: torch.Tensor) -> bool:
    """Whether the program has made ``gradient`` a view of a buffer of its own: there it looks for the result.

    What autograd leaves is no view, unless it has a graph. What is expanded, or sparse, has no place for every
    element.
    """
    return (
        gradient._is_view()
        and not gradient.requires_grad
        and gradient.layout is torch.strided
        and not is_expanded(gradient)
    )


_USES = 2
"""Of a gradient of one parameter, by that and by the object that is asked for the number; likewise of its memory."""


def _is_anothers(gradient: torch.Tensor) -> bool:
    """Whether another parameter has the same tensor as its gradient, as the program has put it there."""
    uses: int = gradient._use_count()  # type: ignore[attr-defined]
    return uses > _USES


def _is_shared(gradient: torch.Tensor) -> bool:
    """Whether others have the memory of ``gradient`` as well.

    Of ``h + p.unsqueeze(0)`` autograd makes the gradient of ``p`` a view of that of ``h``, of which a backward pass
    that still runs makes others; and so of ``p[None] + q[None]`` two gradients in one place.
    """
    uses: int = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    return uses > _USES


def _same_layout(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether ``tensor`` lies as ``strides`` say; those of dimensions of one element mean nothing."""
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True))


def list_of(slots: Sequence[Slot]) -> str:
    """Which they are, for messages."""
    if len(slots) < 2:
        return slots[0].name if slots else "no parameters"
    return f"{slots[0].name} to {slots[-1].name} ({len(slots)} parameters)"


class UnderWay(Protocol):
    """An operation that was submitted."""

    def wait(self) -> Any:
        """Sleep until the operation is complete; return its result or raise its error. May be called again."""


class Bucket(ABC):
    """Gradients that are reduced together, once all of them are there.

    Attributes:
        names: of the tensors that travel, for messages.
        names_compared: the same, and which slots were off at the end of the last step: ranks that do not agree on that
            would drift apart.
        home: where all these tensors live, if they live in one place.
        is_exposed: whether the program could change gradients since they were loaded, as in backward.
        active: how many slots the bucket counts on.
        missing: how many of the active slots have no complete gradient yet; kept by `Arrival`.
        loaded: the gradients as `load` found them, until the end of the step.
        loads_views: whether these are (inputs, outputs), and the inputs have the elements of all gradients.
        pending: the operation, from submission to the end of the step.
        streams: of a GPU, by the driver's handles: those on which gradients of this step were made that had hooks; kept
            by `Arrival`.
        submitted_ns: when, while a timeline is recorded.
    """

    home: Home | None = None
    is_exposed = False
    loaded: Any = None
    loads_views = False
    pending: UnderWay | None = None
    submitted_ns = 0

    def __init__(self, name: str, slots: Sequence[Slot]) -> None:
        self.name = name
        self.slots = slots
        self.names: Sequence[str] = [slot.name for slot in slots]
        self.names_compared: Sequence[str] = self.names
        self.active = self.missing = 0
        self.streams: set[int] = set()

    def count_active(self) -> None:
        """Set `active` and `missing`, after slots were switched on or off."""
        self.active = self.missing = sum(slot.active for slot in self.slots)
        off = [slot for slot in self.slots if not slot.active]
        self.names_compared = [*self.names[:-1], f"{self.names[-1]}, without {list_of(off)}"] if off else self.names

    @abstractmethod
    def load(self) -> None:
        """Set `loaded` to the gradients as they are; a parameter without gradient contributes zeros."""

    @abstractmethod
    def deliver(self) -> None:
        """Make every ``p.grad`` the reduced gradient, once `pending` is complete."""
