"""hvd.allreduce and its forms: short doors to one implementation.

``allreduce(tensor)`` returns a new tensor and is differentiable, ``allreduce_(tensor)`` overwrites, the ``_async``
forms return a `Handle` for `poll` and `synchronize`, and ``grouped_*`` take several tensors as one operation.
Tensors are dense, in memory of the CPU or of this rank's GPU, contiguous or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.torch.adasum import adasum_async
from hvdlite.torch.arrays import takes_arrays, takes_groups_of_arrays
from hvdlite.torch.compression import AnyCompressor, Compression, is_custom
from hvdlite.torch.differentiated import (
    DifferentiableOperation,
    applied,
    applied_to_tangents,
    has_tangents,
    is_differentiated,
)
from hvdlite.torch.handle import Handle, only
from hvdlite.torch.process_set import ProcessSet, global_process_set
from hvdlite.torch.reduce_options import Adasum, Average, ReduceOptions, Sum, reduce_options
from hvdlite.torch.repeated import again, begun_at_once, reduced_at_once
from hvdlite.torch.start import start_allreduce


def _start(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    options: ReduceOptions,
    *,
    in_place: bool,
    grouped: bool,
    background: bool = True,
) -> Handle[list[torch.Tensor]]:
    """Adasum, which is an allgather and a computation; or one allreduce."""
    if options.reduction.op is Adasum:
        return adasum_async(tensors, name, options, in_place=in_place, grouped=grouped)
    return start_allreduce(tensors, name, options, in_place=in_place, grouped=grouped, background=background)


class _Allreduce(DifferentiableOperation):
    """The gradient of an allreduce is the same allreduce of the gradient; of a sum and an average so is the tangent."""

    @staticmethod
    def forward(
        options: ReduceOptions, name: str | None, grouped: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(_start(tensors, name, options, in_place=False, grouped=grouped, background=False).synchronize())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options, _, ctx.grouped = inputs[:3]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *_Allreduce.apply(ctx.options, None, ctx.grouped, *gradients)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        op = ctx.options.reduction.op
        if op not in (Average, Sum):
            raise NotImplementedError(
                f"allreduce: op={op.label} has no derivative in forward mode; use hvd.Average, hvd.Sum, or backward()"
            )
        return applied_to_tangents(_Allreduce, (ctx.options, None, ctx.grouped), tangents[3:])


def reduce_compressed(
    function: type[torch.autograd.Function],
    tensors: Sequence[torch.Tensor],
    name: str | None,
    options: ReduceOptions,
    compression: AnyCompressor,
    *,
    grouped: bool,
) -> list[torch.Tensor]:
    """Apply ``function``, a differentiable operation; a compressor of the user's works before and after it."""
    if not is_custom(compression):
        return list(applied(function, options, name, grouped, *tensors))
    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced = applied(function, options, name, grouped, *(tensor for tensor, _ in compressed))
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, compressed, strict=True)]


@takes_arrays()
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine ``tensor`` with those of the other ranks; differentiable.

    Args:
        tensor: of the same shape and dtype on every rank; bool does not reduce.
        average: deprecated, use ``op``.
        name: the same on every rank; unnamed operations are counted, and must come in the same order on every rank.
        compression: of what travels.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`. Integers are scaled in fp64 and
            truncated; so is their average, but by a division without fp64. 16-bit floats are added in fp32.
        prescale_factor: multiplies before.
        postscale_factor: multiplies after.
        process_set: who takes part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        DuplicateNameError, ValueError: ``name`` is in flight; hvdlite cannot reduce this tensor.
        UsageError: ``op`` is none of these.
        HorovodInternalError: ranks contradict one another, or hvdlite does not run; says more.
    """
    shortcuts = getattr(process_set, "shortcuts", None)
    if shortcuts is not None and average is None and compression is Compression.none and not has_tangents():
        done: torch.Tensor | None = shortcuts[True](tensor, name, op, prescale_factor, postscale_factor, False)
        if done is not None:
            return done
    if average is None and not is_differentiated(tensor):
        reduced = reduced_at_once(
            tensor, name, op, prescale_factor, postscale_factor, process_set, compression, in_place=False
        )
        if reduced is not None:
            return reduced
    options = reduce_options(average, op, prescale_factor, postscale_factor, process_set, compression)
    return reduce_compressed(_Allreduce, [tensor], name, options, compression, grouped=False)[0]


@again(in_place=False, is_awaited=False)
@takes_arrays()
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """`allreduce` as a handle. ``tensor`` must not change before it is complete."""
    if average is None:
        handle = begun_at_once(tensor, name, op, prescale_factor, postscale_factor, process_set, in_place=False)
        if handle is not None:
            return handle
    options = reduce_options(average, op, prescale_factor, postscale_factor, process_set)
    return only(_start([tensor], name, options, in_place=False, grouped=False))


@again(in_place=True, is_awaited=True)
@takes_arrays(in_place=True)
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`allreduce` in place; returns ``tensor``."""
    if average is None:
        reduced = reduced_at_once(tensor, name, op, prescale_factor, postscale_factor, process_set, in_place=True)
        if reduced is not None:
            return reduced
    options = reduce_options(average, op, prescale_factor, postscale_factor, process_set)
    return _start([tensor], name, options, in_place=True, grouped=False, background=False).synchronize()[0]


@again(in_place=True, is_awaited=False)
@takes_arrays(in_place=True)
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """`allreduce` in place, as a handle. ``tensor`` is undefined before it is complete."""
    if average is None:
        handle = begun_at_once(tensor, name, op, prescale_factor, postscale_factor, process_set, in_place=True)
        if handle is not None:
            return handle
    options = reduce_options(average, op, prescale_factor, postscale_factor, process_set)
    return only(_start([tensor], name, options, in_place=True, grouped=False))


@takes_groups_of_arrays()
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors, which are reduced together or not at all; their dtypes may differ."""
    options = reduce_options(average, op, prescale_factor, postscale_factor, process_set, compression)
    return reduce_compressed(_Allreduce, tensors, name, options, compression, grouped=True)


@takes_groups_of_arrays()
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """`grouped_allreduce` as one handle."""
    options = reduce_options(average, op, prescale_factor, postscale_factor, process_set)
    return _start(tensors, name, options, in_place=False, grouped=True)


@takes_groups_of_arrays(in_place=True)
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`grouped_allreduce` in place; returns ``tensors``."""
    options = reduce_options(average, op, prescale_factor, postscale_factor, process_set)
    return _start(tensors, name, options, in_place=True, grouped=True, background=False).synchronize()


@takes_groups_of_arrays(in_place=True)
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """`grouped_allreduce` in place, as one handle."""
    options = reduce_options(average, op, prescale_factor, postscale_factor, process_set)
    return _start(tensors, name, options, in_place=True, grouped=True)
