"""Where activations go from one form to another, each with its gradient.

Between layers an activation is either whole and equal on every rank, or in shards: of rows (dimension 0; sequence
parallelism) or of columns (the last dimension; inside a split layer). The gradient of an activation that is whole is
whole and equal, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hvdlite.tensor_parallel.carrier import Carrier
from hvdlite.tensor_parallel.moves import gather_shares, objection, scatter_sum, sum_over_ranks
from hvdlite.tensor_parallel.part import Part
from hvdlite.tensor_parallel.team import Team
from hvdlite.torch.eager import eager

Move = Callable[[torch.Tensor], torch.Tensor]


class _Moved(torch.autograd.Function):
    """One move forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
        ctx.backward_move = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.backward_move(grad), None, None


@eager
def gather_rows(shard: torch.Tensor, team: Team) -> torch.Tensor:
    """The whole of an activation of which each rank has rows, (rows / size, ...) to (rows, ...); differentiable.

    Raises:
        UsageError, MismatchError, CollectiveError: as `all_gather_matmul`.
    """
    return _gathered("gather_rows", shard, Part(0), team)


@eager
def split_rows(whole: torch.Tensor, team: Team) -> torch.Tensor:
    """This rank's rows, (rows, ...) to (rows / size, ...); the mirror of `gather_rows`. Backward communicates.

    Raises:
        ValueError: the rows do not divide among the ranks.
    """
    return _split("split_rows", whole, Part(0), team)


@eager
def gather_columns(shard: torch.Tensor, team: Team, blocks: int = 1) -> torch.Tensor:
    """The whole of an activation of which each rank has columns, (..., n / size) to (..., n); differentiable.

    Args:
        blocks: each rank has columns of each of so many blocks, see `ColumnParallelLinear`.

    Raises:
        UsageError, MismatchError, CollectiveError: as `all_gather_matmul`.
    """
    return _gathered("gather_columns", shard, Part(shard.dim() - 1, blocks), team)


@eager
def split_columns(whole: torch.Tensor, team: Team) -> torch.Tensor:
    """This rank's columns, (..., n) to (..., n / size); the mirror of `gather_columns`. Backward communicates.

    Raises:
        ValueError: the columns do not divide among the ranks.
    """
    return _split("split_columns", whole, Part(whole.dim() - 1), team)


@eager
def reduce_shares(share: torch.Tensor, team: Team, *, scatters: bool) -> torch.Tensor:
    """The sum over ranks of ``share``, (rows, ...), or this rank's rows of it; differentiable."""
    carrier = team.carrier_for(share)
    if scatters:
        forward = _over(scatter_sum, carrier, "reduce_shares")
        return _moved(share, forward, lambda grad: _joined(carrier, "backward of reduce_shares", grad, Part(0)))
    return _moved(share, _over(sum_over_ranks, carrier, "reduce_shares"), lambda grad: grad)


def sum_gradients(module: nn.Module, team: Team) -> None:
    """Let backward add up the gradients of ``module`` over ranks, for good.

    For modules without split layers that work on shards of rows, such as the norms of a transformer with sequence
    parallelism: their parameters are equal on every rank, and each rank's gradient is that of its rows. To be called
    once for each parameter; `copy.deepcopy` does not copy it.
    """
    for parameter in module.parameters():
        parameter.register_hook(  # type: ignore[no-untyped-call]
            lambda grad: sum_over_ranks(team.carrier_for(grad), "sum_gradients", grad)
        )


def _over(move: Callable[[Carrier, str, torch.Tensor], torch.Tensor], carrier: Carrier, purpose: str) -> Move:
    return lambda tensor: move(carrier, purpose, tensor)


def _moved(x: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
    moved: torch.Tensor = _Moved.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return moved


def _joined(carrier: Carrier, purpose: str, share: torch.Tensor, part: Part) -> torch.Tensor:
    return part.join(gather_shares(carrier, purpose, share))


def _gathered(name: str, shard: torch.Tensor, part: Part, team: Team) -> torch.Tensor:
    why = objection(name, shard)
    if why:
        team.meeting.refuse(why)
    carrier = team.carrier_for(shard)
    return _moved(
        shard, lambda x: _joined(carrier, name, x, part), lambda grad: part.of(grad, carrier.rank, carrier.size)
    )


def _split(name: str, whole: torch.Tensor, part: Part, team: Team) -> torch.Tensor:
    carrier = team.carrier_for(whole)
    return _moved(
        whole,
        lambda x: part.of(x, carrier.rank, carrier.size),
        lambda grad: _joined(carrier, f"backward of {name}", grad, part),
    )
