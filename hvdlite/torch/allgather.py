"""hvd.allgather, its asynchronous and its grouped form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.torch.allreduce import grouped_allreduce
from hvdlite.torch.arrays import takes_arrays, takes_groups_of_arrays
from hvdlite.torch.differentiated import DifferentiableOperation, applied, applied_to_tangents, is_differentiated
from hvdlite.torch.handle import Handle, only
from hvdlite.torch.process_set import ProcessSet, global_process_set
from hvdlite.torch.reduce_options import Average
from hvdlite.torch.repeated_rows import gathered_at_once
from hvdlite.torch.start import start_allgather


class _Allgather(DifferentiableOperation):
    """The gradient of an allgather is this rank's rows of the average of the gradients."""

    @staticmethod
    def forward(
        name: str | None, grouped: bool, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(start_allgather(tensors, name, process_set, grouped=grouped, background=False).synchronize())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.grouped, ctx.process_set, *tensors = inputs
        ctx.shapes = [tensor.shape for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        averages = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        rows = [shape[0] if shape else 1 for shape in ctx.shapes]
        everywhere = allgather(torch.tensor([rows], device="cpu"), process_set=ctx.process_set)
        before = everywhere[: ctx.process_set.rank()].sum(0).tolist()
        own = [
            average.narrow(0, start, count).reshape(shape)
            for average, start, count, shape in zip(averages, before, rows, ctx.shapes, strict=True)
        ]
        return None, None, None, *own

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return applied_to_tangents(_Allgather, (None, ctx.grouped, ctx.process_set), tangents[3:])


@takes_arrays()
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, one after the other along dimension 0, in the order of ranks; differentiable.

    Args:
        tensor: of the same dtype on every rank, bool as well; dimension 0 may differ between ranks, the others may not.
            A scalar counts as one row.

    Returns:
        (rows of all ranks, ...), new.
    """
    if not is_differentiated(tensor):
        done = gathered_at_once(tensor, name, process_set)
        if done is not None:
            return done
    gathered: torch.Tensor = applied(_Allgather, name, False, process_set, tensor)[0]
    return gathered


@takes_arrays()
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """`allgather` as a handle. ``tensor`` must not change before it is complete."""
    return only(start_allgather([tensor], name, process_set, grouped=False))


@takes_groups_of_arrays()
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """`allgather` of several tensors, which are gathered together or not at all."""
    return list(applied(_Allgather, name, True, process_set, *tensors))


@takes_groups_of_arrays()
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[torch.Tensor]]:
    """`grouped_allgather` as one handle."""
    return start_allgather(tensors, name, process_set, grouped=True)
