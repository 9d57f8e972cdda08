"""A model whose gradients are known, for the tests of DistributedOptimizer in the worlds of fake_world.py."""

from __future__ import annotations

from typing import Any

import torch

import hvdlite.torch as hvd

FACTOR = 2.0  # of the average of 3 ranks
SHAPES = ((3, 5), (5,), (40, 400), (7,), (), (0, 2), (33, 3))


class Scales(torch.nn.Module):
    """``sum_i i * sum(p_i)`` of parameters of given shapes: the gradient of parameter i is i everywhere."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = torch.nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def loss(self, factor: float = 1.0, leave_out: tuple[int, ...] = ()) -> torch.Tensor:
        terms = [(i + 1) * p.sum() for i, p in enumerate(self.p) if i not in leave_out]
        return factor * torch.stack([term.double() for term in terms]).sum()


def wrap(model: torch.nn.Module, **arguments: Any) -> Any:
    arguments.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **arguments)


def reduced(model: Scales) -> list[float | None]:
    """The value of every gradient, which is the same in all its elements."""
    values: list[float | None] = []
    for p in model.p:
        if p.grad is not None and p.numel():
            assert (p.grad == p.grad.flatten()[0]).all()
        values.append(None if p.grad is None else p.grad.flatten()[0].item() if p.numel() else 0.0)
    return values


def expected(model: Scales, factor: float, leave_out: tuple[int, ...] = ()) -> list[float]:
    return [(i + 1) * factor if p.numel() and i not in leave_out else 0.0 for i, p in enumerate(model.p)]
