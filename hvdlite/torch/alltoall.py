"""hvd.alltoall and its asynchronous form."""

from __future__ import annotations

from typing import Any, overload

import torch

from hvdlite.torch.arrays import takes_arrays
from hvdlite.torch.differentiated import DifferentiableOperation, applied, is_differentiated
from hvdlite.torch.handle import Handle
from hvdlite.torch.process_set import ProcessSet, global_process_set
from hvdlite.torch.repeated_rows import exchanged_at_once
from hvdlite.torch.start import start_alltoall


class _Alltoall(DifferentiableOperation):
    """The gradient of an alltoall is the alltoall that sends the rows back."""

    @staticmethod
    def forward(
        tensor: torch.Tensor, splits: torch.Tensor | None, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return start_alltoall(tensor, splits, name, process_set, background=False).synchronize()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        tensor, splits, _, ctx.process_set = inputs
        _, received = output
        ctx.shape = tensor.shape
        ctx.save_for_backward(received)
        ctx.array = None if isinstance(splits, torch.Tensor) else splits  # of NumPy, or a list
        ctx.save_for_forward(None if splits is ctx.array else splits)
        ctx.mark_non_differentiable(received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (received,) = ctx.saved_tensors
        returned, _ = alltoall(gradient, received, process_set=ctx.process_set)
        if returned.shape[0] < ctx.shape[0]:  # rows beyond the splits went nowhere
            rest = returned.new_zeros((ctx.shape[0] - returned.shape[0], *ctx.shape[1:]))
            returned = torch.cat([returned, rest])
        return returned, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        (splits,) = ctx.saved_tensors
        output, _ = _Alltoall.apply(  # type: ignore[no-untyped-call]
            tangent, ctx.array if splits is None else splits, None, ctx.process_set
        )
        return output, None


@overload
def alltoall(
    tensor: torch.Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor: ...


@overload
def alltoall(
    tensor: torch.Tensor, splits: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, torch.Tensor]: ...


@takes_arrays()
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send some rows of ``tensor`` to each rank, and receive some from each; differentiable.

    Args:
        tensor: (rows, ...), of the same dtype on every rank, bool as well; dimension 0 may differ between ranks, the
            others may not.
        splits: (size of the process set,) integers: how many rows go to each rank, in the order of rows and of ranks;
            together at most the rows there are. By default equal parts.

    Returns:
        (rows received, ...), in the order of ranks; with ``splits`` also how many came from each: (size,) int32,
        or int64 where one is 2^31 or more.

    Raises:
        ValueError: ``splits`` makes no sense, or the rows do not divide into equal parts.
    """
    if splits is None and not is_differentiated(tensor):
        done = exchanged_at_once(tensor, name, process_set)
        if done is not None:
            return done
    output, received = applied(_Alltoall, tensor, splits, name, process_set)
    return output if splits is None else (output, received)


@takes_arrays()
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """`alltoall` as a handle, whose result is a pair without ``splits`` too. ``tensor`` must not change meanwhile."""
    return start_alltoall(tensor, splits, name, process_set)
