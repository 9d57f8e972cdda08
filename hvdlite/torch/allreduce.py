"""hvd.allreduce and its forms: short doors to one implementation.

``allreduce(tensor)`` returns a new tensor and is differentiable, ``allreduce_(tensor)`` overwrites, the ``_async``
forms return a `Handle` for `poll` and `synchronize`, and ``grouped_*`` take several tensors as one operation.
Tensors are dense and in the CPU's memory, contiguous or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvdlite.dtypes import DType, ReduceOp
from hvdlite.torch.compression import AnyCompressor, Compression, is_custom, wire_dtype
from hvdlite.torch.handle import Handle, only
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set
from hvdlite.torch.tensor_view import contiguous_block, copied_back, dtype_of, view_of

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


class Reduction(NamedTuple):
    """How tensors are combined: everything about an operation that reduces but the tensors and the name."""

    op: ReduceOp
    prescale: float
    postscale: float
    wire: DType | None
    process_set: ProcessSet


def reduction_of(
    average: bool | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: AnyCompressor = Compression.none,
) -> Reduction:
    """The arguments of an operation, checked.

    Raises:
        ValueError: names the argument and the way out.
    """
    if average is not None:
        if op is not None:
            raise ValueError("op supersedes average; pass op=hvd.Average or op=hvd.Sum, and no average")
        warnings.warn("average is deprecated; pass op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    wire = wire_dtype(compression)
    return Reduction(
        check_op(Average if op is None else op),
        float(prescale),
        float(postscale),
        None if wire is None else dtype_of(wire),
        check_process_set(process_set),
    )


def check_op(op: int) -> ReduceOp:
    """``op`` as a ReduceOp.

    Raises:
        ValueError: it is none of Average, Sum, Adasum, Min, Max, Product.
    """
    if type(op) is ReduceOp:
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        names = "hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product"
        raise ValueError(f"op is {op!r}; pass {names}") from None


def _start_allreduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    *,
    in_place: bool,
    grouped: bool,
    background: bool = True,
) -> Handle[list[torch.Tensor]]:
    """The one implementation of all allreduces; see `Group` for ``background``."""
    names = [f"{name}.{i}" for i in range(len(tensors))] if grouped and name is not None else None
    label = "allreduce" if name is None else f"allreduce '{name}'"
    if reduction.op is ReduceOp.ADASUM:
        from hvdlite.torch.adasum import adasum_async  # built upon allgather, which is built upon this file

        return adasum_async(
            tensors,
            names or [name] * len(tensors),
            label,
            reduction.process_set,
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            wire_dtype=None if reduction.wire is None else getattr(torch, reduction.wire.label),
            in_place=in_place,
        )
    sources = [contiguous_block(tensor, label) for tensor in tensors]
    results = sources if in_place else [torch.empty_like(source) for source in sources]
    inputs = [view_of(source) for source in sources]
    group = reduction.process_set.group()
    pending = group.allreduce_async(
        inputs,
        inputs if in_place else [view_of(result) for result in results],
        name=name,
        names=names,
        op=reduction.op,
        prescale=reduction.prescale,
        postscale=reduction.postscale,
        wire_dtype=reduction.wire,
        background=background,
    )
    kept = list(tensors)
    return Handle(pending, group.recorder, label, lambda: copied_back(kept, results) if in_place else results)


class _Allreduce(torch.autograd.Function):
    """The gradient of an allreduce is the same allreduce of the gradient."""

    @staticmethod
    def forward(
        reduction: Reduction, name: str | None, grouped: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(
            _start_allreduce(tensors, name, reduction, in_place=False, grouped=grouped, background=False).synchronize()
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.reduction, _, ctx.grouped = inputs[:3]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *_Allreduce.apply(ctx.reduction, None, ctx.grouped, *gradients)  # type: ignore[no-untyped-call]


def reduce_compressed(
    function: type[torch.autograd.Function],
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    compression: AnyCompressor,
    *,
    grouped: bool,
) -> list[torch.Tensor]:
    """Apply ``function``, a differentiable reduction; a compressor of the user's works before and after it."""
    if not is_custom(compression):
        return _applied(function, reduction, name, grouped, tensors)
    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced = _applied(function, reduction, name, grouped, [tensor for tensor, _ in compressed])
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, compressed, strict=True)]


def _applied(
    function: type[torch.autograd.Function],
    reduction: Reduction,
    name: str | None,
    grouped: bool,
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """``function`` of ``tensors``; through autograd, which takes 10 us, where a gradient may be asked for."""
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        return list(function.apply(reduction, name, grouped, *tensors))  # type: ignore[no-untyped-call]
    return list(function.forward(reduction, name, grouped, *tensors))


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
            truncated, 16-bit floats are added in fp32.
        prescale_factor: multiplies before.
        postscale_factor: multiplies after.
        process_set: who takes part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        DuplicateNameError, ValueError: ``name`` is in flight; hvdlite cannot reduce this tensor.
        HorovodInternalError: ranks contradict one another, or hvdlite does not run; says more.
    """
    reduction = reduction_of(average, op, prescale_factor, postscale_factor, process_set, compression)
    return reduce_compressed(_Allreduce, [tensor], name, reduction, compression, grouped=False)[0]


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
    reduction = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    return only(_start_allreduce([tensor], name, reduction, in_place=False, grouped=False))


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
    reduction = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    return _start_allreduce([tensor], name, reduction, in_place=True, grouped=False, background=False).synchronize()[0]


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
    reduction = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    return only(_start_allreduce([tensor], name, reduction, in_place=True, grouped=False))


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
    reduction = reduction_of(average, op, prescale_factor, postscale_factor, process_set, compression)
    return reduce_compressed(_Allreduce, tensors, name, reduction, compression, grouped=True)


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
    reduction = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    return _start_allreduce(tensors, name, reduction, in_place=False, grouped=True)


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
    reduction = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    return _start_allreduce(tensors, name, reduction, in_place=True, grouped=True, background=False).synchronize()


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
    reduction = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    return _start_allreduce(tensors, name, reduction, in_place=True, grouped=True)
