"""Gradients of the differentiable operations: in fp64, against finite differences of the sum of all ranks' losses.

Horovod's conventions differ by a constant: allgather and broadcast give the gradient of the ranks' mean loss,
reducescatter that of their sum times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hvdlite.torch as hvd
from torch_lab import finite_differences

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]

Operation = Callable[[torch.Tensor], torch.Tensor]


def alltoall(x: torch.Tensor) -> torch.Tensor:
    """Rank r sends r % 2 + 1 rows to the first rank, and one to each other."""
    splits = torch.tensor([hvd.rank() % 2 + 1] + [1] * (hvd.size() - 1), dtype=torch.int32)
    return hvd.alltoall(x, splits)[0]


def reducescatter(op: int) -> Operation:
    return lambda x: hvd.reducescatter(x, op=op, prescale_factor=0.5, postscale_factor=3.0)


def allreduce(op: int) -> Operation:
    return lambda x: hvd.allreduce(x, op=op, prescale_factor=0.5, postscale_factor=3.0)


def grouped(x: torch.Tensor) -> torch.Tensor:
    first, second = hvd.grouped_allreduce([x**2, x.sin()], op=hvd.Sum)
    return first * second


def same_rows() -> int:
    return hvd.size() + 1


OPERATIONS: dict[str, tuple[Operation, Callable[[], int], Callable[[], float]]] = {
    # what it does, rows of this rank's tensor, what Horovod's convention multiplies the gradient with
    "allreduce, sum": (allreduce(hvd.Sum), same_rows, lambda: 1.0),
    "allreduce, average": (allreduce(hvd.Average), same_rows, lambda: 1.0),
    "grouped allreduce": (grouped, same_rows, lambda: 1.0),
    "allgather": (hvd.allgather, lambda: hvd.rank(), lambda: 1.0 / hvd.size()),
    "broadcast": (lambda x: hvd.broadcast(x, hvd.size() - 1), same_rows, lambda: 1.0 / hvd.size()),
    "alltoall": (alltoall, lambda: hvd.size() + hvd.rank() % 2, lambda: 1.0),
    "reducescatter, sum": (reducescatter(hvd.Sum), same_rows, lambda: float(hvd.size())),
    "reducescatter, average": (reducescatter(hvd.Average), same_rows, lambda: float(hvd.size())),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradient_is_that_of_finite_differences(name: str) -> None:
    operation, rows, factor = OPERATIONS[name]
    torch.manual_seed(hvd.rank())
    own = torch.randn(rows(), 2, dtype=torch.float64).requires_grad_()
    weights = torch.randn_like(operation(own.detach()))

    def loss() -> torch.Tensor:
        return (operation(own) ** 3 * weights).sum()

    loss().backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad, factor() * finite_differences(loss, own), rtol=1e-6, atol=1e-6)
