"""What several test modules need: tensors that any rank can compute for any rank, gradients without autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch

import hvdlite.torch as hvd

REDUCING = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def rank_input(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small integers: sums and products of a few ranks are exact in every dtype."""
    numel = int(torch.Size(shape).numel())
    return (torch.arange(numel) % 3 + rank % 2 + 1).reshape(shape).to(dtype)


def finite_differences(loss: Callable[[], torch.Tensor], own: torch.Tensor, step: float = 1e-5) -> torch.Tensor:
    """Of the sum of all ranks' losses, by every element of this rank's ``own``: fp64, of any shape on any rank.

    Collective: ``loss`` is computed twice for every element of every rank.
    """
    gradient = torch.zeros_like(own, requires_grad=False)

    def total() -> float:
        return hvd.allreduce(loss().detach(), op=hvd.Sum).item()

    for rank, numel in enumerate(hvd.allgather(torch.tensor([own.numel()])).tolist()):
        for i in range(numel):
            shift = torch.zeros_like(own, requires_grad=False)
            if rank == hvd.rank():
                shift.view(-1)[i] = step
            with torch.no_grad():
                own += shift
                above = total()
                own -= 2 * shift
                below = total()
                own += shift
            if rank == hvd.rank():
                gradient.view(-1)[i] = (above - below) / (2 * step)
    return gradient


LINEAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "allreduce": hvd.allreduce,
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([torch.arange(3), x], op=hvd.Sum)[1],
    "allgather": hvd.allgather,
    "grouped_allgather": lambda x: hvd.grouped_allgather([torch.arange(3), x])[1],
    "broadcast": lambda x: hvd.broadcast(x, hvd.size() - 1),
    "alltoall": hvd.alltoall,
    "alltoall with splits": lambda x: hvd.alltoall(x, torch.ones(hvd.size(), dtype=torch.int32))[0],
    "alltoall with a list of splits": lambda x: hvd.alltoall(x, [1] * hvd.size())[0],  # type: ignore[call-overload, no-any-return]
    "reducescatter": hvd.reducescatter,
    "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([torch.arange(3), x], op=hvd.Sum)[1],
}
"""Operations whose result is a linear function of the tensors of all ranks, of (a multiple of size(),)."""
