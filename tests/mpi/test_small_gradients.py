"""Small gradients of a DistributedOptimizer: in which memory they are, and that it is nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.torch import arrival

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]

SIZES = [1, 5, 64, 300, 8192, 3]


def made() -> tuple[torch.nn.ParameterList, Any]:
    """Parameters, and their optimizer, which has taken the steps in which ranks agree on an order."""
    parameters = torch.nn.ParameterList(torch.ones(size) for size in SIZES)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.0), named_parameters=parameters.named_parameters(), op=hvd.Sum
    )
    for _ in range(3):
        step(parameters, optimizer)
    return parameters, optimizer


def step(parameters: torch.nn.ParameterList, optimizer: Any, *, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(parameters)
    optimizer.step()
    check(parameters)


def backward(parameters: torch.nn.ParameterList, **options: bool) -> None:
    """The gradient of parameter i, all ones, is ``(i + 1) * (rank + 1) * (1, 2, 3, ...)``."""
    terms = [(p * p * weight / 2).sum() for p, weight in zip(parameters, weights(hvd.rank() + 1), strict=True)]
    torch.stack(terms).sum().backward(**options)


def weights(factor: int) -> list[torch.Tensor]:
    return [(i + 1.0) * factor * torch.arange(1.0, size + 1) for i, size in enumerate(SIZES)]


def check(parameters: torch.nn.ParameterList) -> None:
    for p, expected in zip(parameters, weights(hvd.size() * (hvd.size() + 1) // 2), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, expected)


def grads(parameters: torch.nn.ParameterList) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def are_in_a_block(gradients: list[torch.Tensor]) -> bool:
    addresses = [gradient.data_ptr() for gradient in gradients]
    return max(addresses) - min(addresses) < 4 * sum(SIZES) + 64 * len(SIZES)


def test_a_new_gradient_stays_where_autograd_has_made_it() -> None:
    parameters, optimizer = made()
    optimizer.zero_grad()
    backward(parameters)
    before = grads(parameters)
    optimizer.step()
    assert all(now is then for now, then in zip(grads(parameters), before, strict=True))
    check(parameters)


def test_so_does_a_large_one_that_shares_its_memory_with_nobody() -> None:
    p = torch.nn.Parameter(torch.ones(300_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0))
    for _ in range(4):
        optimizer.zero_grad()
        p.sum().backward()
        before = p.grad
        optimizer.step()
        assert p.grad is before


def test_a_gradient_that_stays_becomes_a_part_of_a_block() -> None:
    if hvd.size() == 1:
        pytest.skip("alone nothing is moved")
    parameters, optimizer = made()
    for _ in range(3):
        step(parameters, optimizer, set_to_none=False)
    settled = grads(parameters)
    assert are_in_a_block(settled)
    step(parameters, optimizer, set_to_none=False)
    assert all(now is then for now, then in zip(grads(parameters), settled, strict=True))
    step(parameters, optimizer)  # made anew
    for _ in range(2):
        step(parameters, optimizer)
    before = grads(parameters)
    check(parameters)
    assert not any(now is then for now, then in zip(before, settled, strict=True))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_with_a_graph_is_left_as_it_is() -> None:
    if hvd.size() == 1:
        pytest.skip("alone nothing is reduced")
    parameters, optimizer = made()
    optimizer.zero_grad()
    backward(parameters, create_graph=True)
    local = grads(parameters)
    assert all(gradient.requires_grad for gradient in local)
    with torch.no_grad():
        optimizer.step()
    check(parameters)
    assert all(torch.equal(now, own) for now, own in zip(local, weights(hvd.rank() + 1), strict=True))


@pytest.mark.parametrize("how", ["changed", "replaced"])
@pytest.mark.parametrize("which", [0, 2, len(SIZES) - 1])
def test_a_gradient_that_the_user_changes_before_the_step_gets_the_result(which: int, how: str) -> None:
    if hvd.size() == 1:
        pytest.skip("alone nothing is reduced")
    parameters, optimizer = made()
    for _ in range(3):
        optimizer.zero_grad()
        backward(parameters)
        if how == "changed":
            grads(parameters)[which].zero_()
        else:
            parameters[which].grad = torch.zeros(SIZES[which])
        with pytest.warns(UserWarning, match=f"the gradient of '{which}' was changed between"):
            optimizer.step()
        check(parameters)


def test_those_without_hooks_are_reduced_as_they_are_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    if hvd.size() == 1:
        pytest.skip("alone nothing is reduced")
    monkeypatch.setattr(arrival, "_ORDERLY_STEPS", 1)
    parameters, optimizer = made()
    for set_to_none in (True, False, False, True, True):
        step(parameters, optimizer, set_to_none=set_to_none)
    for which, p in enumerate(parameters):
        assert bool(p._post_accumulate_grad_hooks) is (which in (0, len(SIZES) - 1))
    optimizer.zero_grad()
    backward(parameters)
    if hvd.rank() == 0:
        parameters[2].grad = None
    optimizer.step()
    assert torch.equal(grads(parameters)[2], weights(hvd.size() * (hvd.size() + 1) // 2 - 1)[2])
    step(parameters, optimizer)


@pytest.mark.parametrize("which", [0, 2, len(SIZES) - 1])
def test_another_tensor_as_often_changed_gets_the_result(which: int) -> None:
    parameters, optimizer = made()
    for _ in range(3):
        optimizer.zero_grad()
        backward(parameters)
        other = grads(parameters)[which].clone()
        while other._version < grads(parameters)[which]._version:
            other.mul_(1)
        parameters[which].grad = other
        changed = pytest.warns(UserWarning, match=f"the gradient of '{which}' was changed between")
        with nullcontext() if hvd.size() == 1 else changed:  # alone nothing is on its way
            optimizer.step()
        check(parameters)


def test_gradients_that_no_backward_has_made_may_have_gaps() -> None:
    parameters, optimizer = made()
    for _ in range(3):
        for p, weight in zip(parameters, weights(hvd.rank() + 1), strict=True):
            p.grad = torch.stack([weight, -weight], dim=1)[:, 0]
        optimizer.step()
        check(parameters)


@pytest.mark.filterwarnings("ignore:the gradient of '0' is sparse")
@pytest.mark.parametrize(
    "view_of", [lambda x: x[:1, :1].expand_as(x), lambda x: x.to_sparse().t().t()], ids=["expanded", "sparse"]
)
def test_views_without_a_place_for_every_element(view_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    p = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("0", p)], op=hvd.Sum)
    total = 0.0
    for _ in range(4):
        p.grad = view_of(torch.full((4, 3), hvd.rank() + 1.0))
        optimizer.step()
        total += hvd.size() * (hvd.size() + 1) / 2
        assert (p == -total).all()


def test_one_that_torch_has_negated_on_a_rank_counts_as_what_it_reads() -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), op=hvd.Sum)
    for step in range(4):
        optimizer.zero_grad()
        z = torch.complex(torch.zeros(1), p)
        (z.conj() * 1j if hvd.rank() == 0 else z * -1j).real.sum().backward()
        assert p.grad is not None
        assert step == 0 or p.grad.is_neg() == (hvd.rank() == 0)
        optimizer.step()
        assert p.grad.tolist() == [hvd.size()]
