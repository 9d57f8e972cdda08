"""hvd.broadcast and its forms: new tensor or in place, at once or as a handle."""

from __future__ import annotations

from typing import Any

import torch

import hvdlite
from hvdlite.torch.allreduce import allreduce
from hvdlite.torch.arrays import takes_arrays
from hvdlite.torch.differentiated import DifferentiableOperation, applied, is_differentiated
from hvdlite.torch.handle import Handle, label_of, only
from hvdlite.torch.process_set import ProcessSet, global_process_set
from hvdlite.torch.reduce_options import Average
from hvdlite.torch.repeated import broadcast_at_once
from hvdlite.torch.start import start_broadcast
from hvdlite.torch.tensor_view import check_tensor


class _Broadcast(DifferentiableOperation):
    """The gradient of a broadcast is the average of the gradients at the root and zero elsewhere."""

    @staticmethod
    def forward(tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        return _start_on_copy(tensor, root_rank, name, process_set, background=False).synchronize()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.root_rank, _, ctx.process_set = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reduced = allreduce(gradient, op=Average, process_set=ctx.process_set)
        if hvdlite.rank() != ctx.root_rank:
            # Zeros with the history of the others': a second backward pass is an allreduce, in which all take part.
            reduced = reduced.masked_fill(torch.ones_like(reduced, dtype=torch.bool), 0)
        return reduced, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return broadcast(tangent, ctx.root_rank, process_set=ctx.process_set)


@takes_arrays()
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of rank ``root_rank``, on every rank; differentiable.

    Args:
        tensor: of the same shape and dtype on every rank; bool as well.
        root_rank: the global rank.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: there is no such rank.
    """
    if not is_differentiated(tensor):
        done = broadcast_at_once(tensor, root_rank, name, process_set, in_place=False)
        if done is not None:
            return done
    received: torch.Tensor = applied(_Broadcast, tensor, root_rank, name, process_set)
    return received


@takes_arrays()
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """`broadcast` as a handle."""
    return _start_on_copy(tensor, root_rank, name, process_set, background=True)


@takes_arrays(in_place=True)
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`broadcast` in place; returns ``tensor``."""
    done = broadcast_at_once(tensor, root_rank, name, process_set, in_place=True)
    return done if done is not None else _start(tensor, root_rank, name, process_set, background=False).synchronize()


@takes_arrays(in_place=True)
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """`broadcast` in place, as a handle. ``tensor`` is undefined before it is complete."""
    return _start(tensor, root_rank, name, process_set, background=True)


def _start_on_copy(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, background: bool
) -> Handle[torch.Tensor]:
    result = check_tensor(tensor, label_of("broadcast", name)).detach().clone(memory_format=torch.contiguous_format)
    return _start(result, root_rank, name, process_set, background=background)


def _start(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, background: bool
) -> Handle[torch.Tensor]:
    return only(start_broadcast([tensor], root_rank, name, None, process_set, background=background))
