"""hvd.allgather and its asynchronous form."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.memory import TensorView
from hvdlite.torch.allreduce import Average, allreduce
from hvdlite.torch.handle import Handle
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set
from hvdlite.torch.tensor_view import contiguous_block, view_of


class _Allgather(torch.autograd.Function):
    """The gradient of an allgather is this rank's rows of the average of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.shape, ctx.process_set = tensor.shape, process_set
        return allgather_async(tensor, name, process_set).synchronize()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reduced = allreduce(gradient, op=Average, process_set=ctx.process_set)
        rows = ctx.shape[0] if ctx.shape else 1
        rows_before = allgather(torch.tensor([rows]), process_set=ctx.process_set)[: ctx.process_set.rank()].sum()
        return reduced.narrow(0, int(rows_before), rows).reshape(ctx.shape), None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, one after the other along dimension 0, in the order of ranks; differentiable.

    Args:
        tensor: of any dtype; dimension 0 may differ between ranks, the others may not. A scalar counts as one row.

    Returns:
        (rows of all ranks, ...), new.
    """
    gathered: torch.Tensor = _Allgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]
    return gathered


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """`allgather` as a handle. ``tensor`` must not change before it is complete."""
    label = "allgather" if name is None else f"allgather '{name}'"
    source = contiguous_block(tensor, label)
    if source.dim() == 0:
        source = source.reshape(1)
    results: list[torch.Tensor] = []

    def allocate(_: int, shape: tuple[int, ...]) -> TensorView:
        results.append(torch.empty(shape, dtype=source.dtype))
        return view_of(results[0])

    runtime = check_process_set(process_set).runtime()
    pending = runtime.allgather_async([view_of(source)], allocate, name=name)
    return Handle(pending, runtime.recorder, label, lambda: results[0])
