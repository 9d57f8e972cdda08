"""hvd.reducescatter, its asynchronous and its grouped form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.coordinator.execute import row_bounds
from hvdlite.dtypes import ReduceOp
from hvdlite.errors import HorovodInternalError
from hvdlite.torch.allgather import grouped_allgather
from hvdlite.torch.allreduce import Average, Reduction, Sum, check_op, reduce_compressed, reduction_of
from hvdlite.torch.compression import AnyCompressor, Compression
from hvdlite.torch.handle import Handle, only
from hvdlite.torch.process_set import ProcessSet, global_process_set
from hvdlite.torch.tensor_view import contiguous_block, view_of


class _Reducescatter(torch.autograd.Function):
    """The gradient of a reducescatter is the allgather of the gradients, times what scaled the sum."""

    @staticmethod
    def forward(
        reduction: Reduction, name: str | None, grouped: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(_start_reducescatter(tensors, name, reduction, grouped=grouped).synchronize())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.reduction = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reduction: Reduction = ctx.reduction
        # Horovod's convention: what allreduce's gradient does, so that Average of the ranks' losses comes out.
        factor = reduction.prescale * reduction.postscale
        if reduction.op is ReduceOp.SUM:
            factor *= reduction.process_set.size()
        gathered = grouped_allgather(gradients, process_set=reduction.process_set)
        return None, None, None, *(gradient if factor == 1.0 else gradient * factor for gradient in gathered)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine ``tensor`` with those of the other ranks, and keep this rank's rows of the result; differentiable.

    Args:
        tensor: (rows, ...), of the same shape and dtype on every rank; bool does not reduce.
        op: `Average` or `Sum`.

    Returns:
        (rows of this rank, ...), new: equal parts in the order of ranks; where they do not divide, the first ranks have
        one row more.

    Raises:
        ValueError: ``tensor`` is a scalar.
        HorovodInternalError: ``op`` is another; ranks contradict one another; hvdlite does not run. Says more.
    """
    return _reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor, grouped=False
    )[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """`reducescatter` as a handle. ``tensor`` must not change before it is complete."""
    reduction = _checked(op, prescale_factor, postscale_factor, process_set)
    return only(_start_reducescatter([tensor], name, reduction, grouped=False))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors, which are reduced together or not at all."""
    return _reducescatter(tensors, name, compression, op, process_set, prescale_factor, postscale_factor, grouped=True)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """`grouped_reducescatter` as one handle."""
    reduction = _checked(op, prescale_factor, postscale_factor, process_set)
    return _start_reducescatter(tensors, name, reduction, grouped=True)


def _reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    compression: AnyCompressor,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    *,
    grouped: bool,
) -> list[torch.Tensor]:
    reduction = _checked(op, prescale, postscale, process_set, compression)
    return reduce_compressed(_Reducescatter, tensors, name, reduction, compression, grouped=grouped)


def _checked(
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: AnyCompressor = Compression.none,
) -> Reduction:
    if check_op(op) not in (Average, Sum):
        raise HorovodInternalError(f"reducescatter: op is {ReduceOp(op).label}; pass hvd.Average or hvd.Sum")
    return reduction_of(None, op, prescale, postscale, process_set, compression)


def _start_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None, reduction: Reduction, *, grouped: bool
) -> Handle[list[torch.Tensor]]:
    """The one implementation of all reducescatters."""
    names = [f"{name}.{i}" for i in range(len(tensors))] if grouped and name is not None else None
    label = "reducescatter" if name is None else f"reducescatter '{name}'"
    sources = [contiguous_block(tensor, label) for tensor in tensors]
    if any(source.dim() == 0 for source in sources):
        raise ValueError(f"{label}: the tensor is a scalar; it needs a dimension to scatter")
    group = reduction.process_set.group()
    results = []
    for source in sources:
        bounds = row_bounds(source.shape[0], group.size)
        rows = bounds[group.rank + 1] - bounds[group.rank]
        results.append(torch.empty((rows, *source.shape[1:]), dtype=source.dtype))
    pending = group.reducescatter_async(
        [view_of(source) for source in sources],
        [view_of(result) for result in results],
        name=name,
        names=names,
        op=reduction.op,
        prescale=reduction.prescale,
        postscale=reduction.postscale,
        wire_dtype=reduction.wire,
    )
    return Handle(pending, group.recorder, label, lambda: results)
