"""What users pass to an operation that reduces, checked: op, scales, compression, process set."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch

from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.errors import UsageError
from hvdlite.torch.compression import AnyCompressor, Compression, check_compression, wire_dtype
from hvdlite.torch.process_set import ProcessSet, check_process_set
from hvdlite.tracebacks import stacklevel

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_OF_TORCH_DISTRIBUTED = {"SUM": Sum, "AVG": Average, "MIN": Min, "MAX": Max, "PRODUCT": Product}


class ReduceOptions(NamedTuple):
    """All arguments of an operation that reduces, but for the tensors and the name.

    Attributes:
        wire_dtype: floats are cast to it on the way.
    """

    reduction: Reduction
    wire_dtype: DType | None
    process_set: ProcessSet


def reduce_options(
    average: bool | ReduceOp | None,
    op: object,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: AnyCompressor = Compression.none,
) -> ReduceOptions:
    """The arguments of an operation.

    Raises:
        UsageError: ``op`` is none of ours.
        ValueError: another argument makes no sense; names it and the way out.
    """
    if average is not None:
        if op is not None:
            raise ValueError("op supersedes average; pass op=hvd.Average or op=hvd.Sum, and no average")
        if isinstance(average, ReduceOp):  # whose truth would say the contrary of what is meant
            name = f"hvd.{average.name.capitalize()}"
            raise UsageError(
                f"{name} was passed as the second argument, which is average, and deprecated: pass op={name}"
            )
        warnings.warn(
            "average is deprecated; pass op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=stacklevel()
        )
        op = Average if average else Sum
    reduction = Reduction(check_op(Average if op is None else op), float(prescale), float(postscale))
    for argument, factor in (("prescale_factor", reduction.prescale), ("postscale_factor", reduction.postscale)):
        if math.isnan(factor):  # which differs from that of every other rank
            raise ValueError(f"{argument} is nan; pass a number, the same on every rank")
    return ReduceOptions(reduction, wire_dtype(check_compression(compression)), check_process_set(process_set))


def check_op(op: object) -> ReduceOp:
    """``op`` as one of ours. Horovod's numbers are ours; ops of torch.distributed are taken by their names.

    Numbers of other enums mean other ops: torch.distributed's SUM is 0, which is Average here.

    Raises:
        UsageError: ``op`` is none of these.
    """
    if type(op) is ReduceOp:
        return op
    if type(op) is int and op in ReduceOp.__members__.values():
        return ReduceOp(op)
    theirs = getattr(torch.distributed, "ReduceOp", None)  # not in every build of torch
    if theirs is not None and isinstance(op, theirs | type(theirs.SUM)):
        for name, ours in _OF_TORCH_DISTRIBUTED.items():
            if op == getattr(theirs, name):
                return ours
    names = "hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product"
    raise UsageError(f"op is {op!r}; pass {names}")
