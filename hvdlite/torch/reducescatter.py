"""hvd.reducescatter, its asynchronous and its grouped form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.errors import UsageError
from hvdlite.torch.allgather import grouped_allgather
from hvdlite.torch.allreduce import reduce_compressed
from hvdlite.torch.arrays import takes_arrays, takes_groups_of_arrays
from hvdlite.torch.compression import AnyCompressor, Compression
from hvdlite.torch.differentiated import DifferentiableOperation, applied_to_tangents, has_tangents, is_differentiated
from hvdlite.torch.handle import Handle, only
from hvdlite.torch.process_set import ProcessSet, global_process_set
from hvdlite.torch.reduce_options import Average, ReduceOptions, Sum, check_op, reduce_options
from hvdlite.torch.repeated_rows import scattered_at_once
from hvdlite.torch.start import start_reducescatter


class _Reducescatter(DifferentiableOperation):
    """The gradient of a reducescatter is the allgather of the gradients, times what scaled the sum."""

    @staticmethod
    def forward(
        options: ReduceOptions, name: str | None, grouped: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(start_reducescatter(tensors, name, options, grouped=grouped, background=False).synchronize())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options, _, ctx.grouped = inputs[:3]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op, prescale, postscale = ctx.options.reduction
        process_set = ctx.options.process_set
        # Horovod's convention: what allreduce's gradient does, so that Average of the ranks' losses comes out.
        factor = prescale * postscale
        if op is Sum:
            factor *= process_set.size()
        gathered = grouped_allgather(gradients, process_set=process_set)
        return None, None, None, *(gradient if factor == 1.0 else gradient * factor for gradient in gathered)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return applied_to_tangents(_Reducescatter, (ctx.options, None, ctx.grouped), tangents[3:])


@takes_arrays()
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
        UsageError: ``op`` is another.
        ValueError: ``tensor`` is a scalar.
        HorovodInternalError: ranks contradict one another, or hvdlite does not run; says more.
    """
    shortcuts = getattr(process_set, "shortcuts", None)
    if shortcuts is not None and compression is Compression.none and not has_tangents():
        done: torch.Tensor | None = shortcuts.reducescatter(tensor, name, op, prescale_factor, postscale_factor, False)
        if done is not None:
            return done
    options = _checked(op, prescale_factor, postscale_factor, process_set, compression)
    if not is_differentiated(tensor):
        done = scattered_at_once(tensor, name, op, prescale_factor, postscale_factor, options, compression)
        if done is not None:
            return done
    return reduce_compressed(_Reducescatter, [tensor], name, options, compression, grouped=False)[0]


@takes_arrays()
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """`reducescatter` as a handle. ``tensor`` must not change before it is complete."""
    options = _checked(op, prescale_factor, postscale_factor, process_set)
    return only(start_reducescatter([tensor], name, options, grouped=False))


@takes_groups_of_arrays()
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
    options = _checked(op, prescale_factor, postscale_factor, process_set, compression)
    return reduce_compressed(_Reducescatter, tensors, name, options, compression, grouped=True)


@takes_groups_of_arrays()
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """`grouped_reducescatter` as one handle."""
    options = _checked(op, prescale_factor, postscale_factor, process_set)
    return start_reducescatter(tensors, name, options, grouped=True)


def _checked(
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: AnyCompressor = Compression.none,
) -> ReduceOptions:
    checked = check_op(op)
    if checked not in (Average, Sum):
        raise UsageError(f"reducescatter: op is {checked.label}; pass hvd.Average or hvd.Sum")
    return reduce_options(None, checked, prescale, postscale, process_set, compression)
