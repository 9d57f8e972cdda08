"""A model whose gradients are known, and what ranks check of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd

SHAPES = [(3, 5), (5,), (400, 300), (7,), (), (0, 2), (33, 3), (1000, 1001), (2, 3, 4, 5)]


class Scales(torch.nn.Module):
    """The gradient of parameter i is ``i + 1`` times the factor of the loss, in every element."""

    def __init__(self, shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = torch.nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def loss(self, factor: float, leave_out: tuple[int, ...] = ()) -> torch.Tensor:
        terms = [(i + 1) * p.sum() for i, p in enumerate(self.p) if i not in leave_out]
        return factor * torch.stack([term.double() for term in terms]).sum()


def wrap(model: torch.nn.Module, **arguments: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **arguments)


def check(model: Scales, factors: Callable[[int], float]) -> None:
    """Every gradient is its parameter's number times ``factors(i)``, everywhere."""
    for i, p in enumerate(model.p):
        assert p.grad is not None
        assert p.grad.shape == p.shape
        assert torch.equal(p.grad, torch.full_like(p, (i + 1) * factors(i))), (i, p.grad, (i + 1) * factors(i))


def same_everywhere(model: torch.nn.Module) -> bool:
    return all(
        torch.equal(gathered[0], other)
        for p in model.parameters()
        for gathered in [hvd.allgather(p.detach().unsqueeze(0))]
        for other in gathered
    )


def total() -> float:
    """Sum of rank + 1."""
    return hvd.size() * (hvd.size() + 1) / 2


def needs_two() -> None:
    if hvd.size() == 1:
        pytest.skip("alone a parameter without gradient keeps none")
