"""torch's reductions, and how hvdlite does each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp as TorchOp

from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.engine import Engine
from hvdlite.torch.tensor_view import dtype_of

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# By comparison: what options hold has no usable hash.
_OPS: tuple[tuple[Any, str, ReduceOp], ...] = (
    (TorchOp.SUM, "SUM", ReduceOp.SUM),
    (TorchOp.AVG, "AVG", ReduceOp.AVERAGE),
    (TorchOp.MIN, "MIN", ReduceOp.MIN),
    (TorchOp.MAX, "MAX", ReduceOp.MAX),
    (TorchOp.PRODUCT, "PRODUCT", ReduceOp.PRODUCT),
)
_BITWISE: tuple[tuple[Any, str, Combine], ...] = (
    (TorchOp.BAND, "BAND", torch.bitwise_and),
    (TorchOp.BOR, "BOR", torch.bitwise_or),
    (TorchOp.BXOR, "BXOR", torch.bitwise_xor),
)
_OF_BOOL = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.MAX: ReduceOp.MAX,
}


class Way(NamedTuple):
    """How a reduction of tensors of one type is done.

    Attributes:
        name: torch's.
        dtype: as what elements are reduced; None where they are not, natively.
        reduction: likewise.
        combine: without a native reduction, that of two contributions.
    """

    name: str
    dtype: DType | None
    reduction: Reduction
    combine: Combine | None = None


def way_of(op: Any, dtype: torch.dtype, engine: Engine) -> Way:
    """How to reduce tensors of ``dtype`` by ``op``.

    Raises:
        ValueError: nobody can.
    """
    for theirs, name, own in _OPS:
        if op == theirs:
            return _native(name, own, dtype, engine)
    for theirs, name, combine in _BITWISE:
        if op == theirs:
            if dtype.is_floating_point or dtype.is_complex:
                raise ValueError(f"ReduceOp.{name} takes integers and bool, not {dtype}")
            return Way(name, None, Reduction(), combine)
    if op != TorchOp.PREMUL_SUM:
        raise ValueError(f"process group hvdlite knows no {op}")
    factor = _factor(op)
    if dtype is torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"ReduceOp.PREMUL_SUM takes floats, not {dtype}")
    return Way(f"PREMUL_SUM of {factor}", _real(dtype), Reduction(ReduceOp.SUM, factor, 1.0))


def _native(name: str, op: ReduceOp, dtype: torch.dtype, engine: Engine) -> Way:
    if dtype is torch.bool:
        if op not in _OF_BOOL:
            raise ValueError(f"ReduceOp.{name} does not take bool")
        return Way(name, DType.UINT8, Reduction(_OF_BOOL[op]))
    if dtype.is_complex and op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(f"ReduceOp.{name} does not take complex numbers")
    real = _real(dtype)
    return Way(name, real, engine.resolved(Reduction(op), real))


def _real(dtype: torch.dtype) -> DType:
    """The type of the real and imaginary parts, where ``dtype`` is complex."""
    return dtype_of(dtype.to_real() if dtype.is_complex else dtype)


def _factor(op: Any) -> float:
    """That of a PREMUL_SUM, which torch shows since 2.13 and lets pickle see before."""
    state = getattr(op, "factor", None)
    if state is None:
        state = op.__getstate__()
        state = state[1] if isinstance(state, tuple) else state
    return float(state)
