"""HVDLITE_CHECK_NUMERICS: NaN and Inf in a gradient of this rank are named before they are averaged away.

A gradient is looked at when its bucket is loaded, whatever becomes of it then: in its home, staged, compressed or
sparse. That reads it once more, at the speed of memory; the reduction cannot tell whose element was not finite.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdlite import _native
from hvdlite.config import Config
from hvdlite.dtypes import DType
from hvdlite.errors import NumericsError
from hvdlite.memory.views import TensorView
from hvdlite.torch.gradients import Bucket
from hvdlite.torch.reduce_options import ReduceOptions
from hvdlite.torch.tensor_view import dtype_of

_LOG = logging.getLogger("hvdlite")

_OVERFLOWS_IN_A_ROW = 32
"""Steps of a `torch.amp.GradScaler` that may overflow one after the other: each halves the scale, of 65536 at first, so
that after these no scale helps."""

_FLOAT16_LIMIT = 65519.99609375  # the last float32 before 65520, from which on numbers become infinite


class _Gradient(NamedTuple):
    """Of one parameter, in memory without gaps."""

    name: str
    tensor: torch.Tensor


class GradientCheck:
    """Looks at the gradients of one optimizer on this rank.

    Args:
        raises: what is found, rather than to warn of it.
        rank: for messages.
        limit: what the gradients may not exceed on their way, besides.
        sparse_limit: likewise of those that are reduced as sparse ones.
    """

    def __init__(self, *, raises: bool, rank: int, limit: float = math.inf, sparse_limit: float = math.inf) -> None:
        self._raises = raises
        self._rank = rank
        self._limit = limit
        self._sparse_limit = sparse_limit
        self._step = 1
        self._first = self._last = -1  # of the latest steps in a row in which something was found
        self._was_told = False  # of these
        self._knows_scaler = False

    @classmethod
    def wanted(cls, config: Config, rank: int, reduce: ReduceOptions | None = None) -> GradientCheck | None:
        """What ``config`` asks for; None: nothing."""
        if config.check_numerics == "off":
            return None
        raises = config.check_numerics == "raise"
        if reduce is None or reduce.wire_dtype is not DType.FLOAT16:
            return cls(raises=raises, rank=rank)
        # They are cast before they are scaled, and sparse ones afterwards.
        sparse_limit = _FLOAT16_LIMIT / abs(reduce.reduction.prescale or 1.0)
        return cls(raises=raises, rank=rank, limit=_FLOAT16_LIMIT, sparse_limit=sparse_limit)

    def end_step(self) -> None:
        self._step += 1

    def look(self, bucket: Bucket) -> None:
        """At the gradients of ``bucket``, which is loaded.

        Raises:
            NumericsError: one is not finite, and `raises`; names it.
        """
        # Small gradients are in one block by now, and to look at each would take longer than to add them up.
        if not bucket.loads_views or not self._are_fine(bucket.loaded[0]):
            limit = self._sparse_limit if bucket.slots[0].is_sparse else self._limit
            self._look_at([(slot.name, slot.param) for slot in bucket.slots if slot.active], limit)

    def _are_fine(self, views: Sequence[TensorView]) -> bool:
        """Whether all elements are; False where nobody knows."""
        stored = [view for view in views if view.address]
        dtypes = {view.dtype for view in stored}
        if len(dtypes) > 1 or any(view.device is not None for view in stored):
            return False
        addresses, numels = [view.address for view in stored], [view.numel for view in stored]
        return not stored or _native.first_beyond(addresses, numels, dtypes.pop(), self._limit) < 0

    def look_at(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """`look`, at the gradients of parameters with their names."""
        self._look_at(named, self._limit)

    def _look_at(self, named: Sequence[tuple[str, torch.Tensor]], limit: float) -> None:
        gradients = [(name, parameter.grad) for name, parameter in named if parameter.grad is not None]
        found = self._first_beyond([_Gradient(name, _memory_of(gradient)) for name, gradient in gradients], limit)
        if found is not None:
            self._note(found)

    @staticmethod
    def _first_beyond(gradients: Sequence[_Gradient], limit: float) -> _Gradient | None:
        on_host = [gradient for gradient in gradients if gradient.tensor.is_cpu]
        for dtype in {gradient.tensor.dtype for gradient in on_host}:
            alike = [gradient for gradient in on_host if gradient.tensor.dtype is dtype]
            place = _native.first_beyond(
                [tensor.data_ptr() for _, tensor in alike],
                [tensor.numel() for _, tensor in alike],
                dtype_of(dtype),
                limit,
            )
            if place >= 0:
                return alike[place]
        elsewhere = [gradient for gradient in gradients if not gradient.tensor.is_cpu]
        if not elsewhere:
            return None
        # One wait for the GPU for all of them.
        fine = torch.stack([_is_fine(tensor, limit).all() for _, tensor in elsewhere])
        return next((gradient for gradient, is_fine in zip(elsewhere, fine.tolist(), strict=True) if not is_fine), None)

    def _note(self, found: _Gradient) -> None:
        """Once for steps in a row; of those that a GradScaler skips, once there are too many."""
        if self._last < self._step - 1:
            self._first, self._was_told = self._step, False
        self._last = self._step
        if self._was_told:
            return
        self._knows_scaler = self._knows_scaler or _has_scaler()
        overflows = self._step - self._first + 1 if self._knows_scaler else 0
        if 0 < overflows <= _OVERFLOWS_IN_A_ROW:
            _LOG.info("%s: the GradScaler skips this step", self._described(found))
            return
        self._was_told = True
        text = f"{self._described(found)}. HVDLITE_CHECK_NUMERICS has found it before it was reduced. "
        if overflows:
            text += f"The GradScaler has skipped {overflows} steps in a row, so it is no overflow: no scale helps."
        else:
            text += "Look at the batch, the loss and the learning rate of this step."
        if self._raises:
            raise NumericsError(text)
        _LOG.warning("%s", text)

    def _described(self, found: _Gradient) -> str:
        values = found.tensor.detach()
        nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
        counts = [f"{count:,} {what}" for count, what in ((nans, "NaN"), (infs, "Inf")) if count]
        has = " and ".join(counts) or f"values up to {values.abs().max().item():g}, which are Inf in float16,"
        return (
            f"step {self._step}: the gradient of '{found.name}' on rank {self._rank} has {has} among its "
            f"{values.numel():,} elements"
        )


def _is_fine(tensor: torch.Tensor, limit: float) -> torch.Tensor:
    return tensor.isfinite() if math.isinf(limit) else tensor.abs() <= limit


def _memory_of(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers that ``gradient`` has, without gaps, in whatever order."""
    if gradient.layout is torch.sparse_coo:
        gradient = gradient._values()
    elif gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    is_gapless = gradient.is_contiguous() or gradient.stride() == torch.empty_like(gradient, device="meta").stride()
    return gradient if is_gapless else gradient.contiguous()


def _has_scaler() -> bool:
    """Whether the program has a GradScaler: it expects overflows, and skips the steps that have them.

    Nothing else tells before the first step, since a scaler is told of an optimizer after the gradients are there.
    """
    return any(issubclass(type(thing), torch.amp.GradScaler) and thing.is_enabled() for thing in gc.get_objects())
