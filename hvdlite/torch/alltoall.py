"""hvd.alltoall and its asynchronous form."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.memory import TensorView
from hvdlite.torch.handle import Handle
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set
from hvdlite.torch.tensor_view import contiguous_block, view_of


class _Alltoall(torch.autograd.Function):
    """The gradient of an alltoall is the alltoall that sends the rows back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: torch.Tensor | None, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = _start_alltoall(tensor, splits, name, process_set).synchronize()
        ctx.shape, ctx.received, ctx.process_set = tensor.shape, received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        returned, _ = alltoall(gradient, ctx.received, process_set=ctx.process_set)
        if returned.shape[0] < ctx.shape[0]:  # rows beyond the splits went nowhere
            rest = returned.new_zeros((ctx.shape[0] - returned.shape[0], *ctx.shape[1:]))
            returned = torch.cat([returned, rest])
        return returned, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send some rows of ``tensor`` to each rank, and receive some from each; differentiable.

    Args:
        tensor: (rows, ...) of any dtype; dimension 0 may differ between ranks, the others may not.
        splits: (size of the process set,) integers: how many rows go to each rank, in the order of rows and of ranks;
            together at most the rows there are. By default equal parts.

    Returns:
        (rows received, ...), in the order of ranks; with ``splits`` also how many came from each: (size,) int32.

    Raises:
        ValueError: ``splits`` makes no sense, or the rows do not divide into equal parts.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor] | Handle[tuple[torch.Tensor, torch.Tensor]]:
    """`alltoall` as a handle. ``tensor`` must not change before it is complete."""
    handle = _start_alltoall(tensor, splits, name, process_set)
    return handle.map(lambda pair: pair[0]) if splits is None else handle


def _start_alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | None, name: str | None, process_set: ProcessSet
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    label = "alltoall" if name is None else f"alltoall '{name}'"
    source = contiguous_block(tensor, label)
    group = check_process_set(process_set).group()
    counts = _checked_splits(source, splits, group.size, label)
    results: list[torch.Tensor] = []

    def allocate(_: int, shape: tuple[int, ...]) -> TensorView:
        results.append(torch.empty(shape, dtype=source.dtype))
        return view_of(results[0])

    pending = group.alltoall_async(view_of(source), counts, allocate, name=name)
    return Handle(pending, group.recorder, label, lambda: (results[0], torch.tensor(pending.wait(), dtype=torch.int32)))


def _checked_splits(source: torch.Tensor, splits: torch.Tensor | None, size: int, label: str) -> list[int]:
    if source.dim() == 0:
        raise ValueError(f"{label}: the tensor is a scalar; it needs a dimension to split")
    rows = source.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"{label}: {rows} rows do not divide into {size} equal parts; pass splits")
        return [rows // size] * size
    counts = torch.as_tensor(splits)
    if counts.dim() != 1 or counts.dtype.is_floating_point or counts.dtype in (torch.bool, torch.complex64):
        raise ValueError(f"{label}: splits must be a tensor of one dimension of integers, got {splits!r}")
    listed: list[int] = counts.tolist()
    if len(listed) != size:
        raise ValueError(f"{label}: splits has {len(listed)} numbers for {size} ranks; pass one per rank")
    if min(listed) < 0 or sum(listed) > rows:
        raise ValueError(f"{label}: splits are {listed}, but the tensor has {rows} rows; pass parts of these")
    return listed
