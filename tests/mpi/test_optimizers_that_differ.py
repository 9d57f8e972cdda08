"""DistributedOptimizers that are not the same on all ranks: ranks are told what differs, or it does no harm."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.errors import MismatchError
from scales_lab import Scales, check, needs_two, total, wrap

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]


def test_ranks_with_weights_in_another_order_are_told() -> None:
    needs_two()
    conv = torch.nn.Conv2d(3, 4, 2)
    if hvd.rank() == 1:
        conv = conv.to(memory_format=torch.channels_last)
    optimizer = wrap(conv)
    conv(torch.ones(1, 3, 2, 2)).sum().backward()
    with pytest.raises(MismatchError, match=r"'weight': shape is \(4, 3, 2, 2\).*\(4, 2, 2, 3\) on rank 1"):
        optimizer.step()


def test_ranks_with_more_parameters_are_told() -> None:
    needs_two()
    model = Scales([(3,)] * (2 + hvd.rank()))
    optimizer = wrap(model)
    model.loss(1.0).backward()
    with pytest.raises(MismatchError, match=r"number 3 of them is missing \(there are 2\) on rank 0 but 'p\.2' on"):
        optimizer.step()


@pytest.mark.parametrize("arguments", [{}, {"sparse_as_dense": True}, {"op": hvd.Max}], ids=str)
def test_ranks_that_freeze_other_parameters_are_told(arguments: dict[str, Any]) -> None:
    needs_two()
    model = Scales([(3,)] * 3)
    model.p[0].requires_grad_(hvd.rank() == 0)
    optimizer = wrap(model, **arguments)
    model.loss(1.0).backward()
    with pytest.raises(MismatchError, match=r"'p\.0' is trained on rank 0 but frozen on ranks? 1.* requires_grad_\(\)"):
        optimizer.step()


def test_ranks_that_freeze_another_parameter_later_are_told_in_the_next_step() -> None:
    needs_two()
    model = Scales([(3,)] * 3)
    optimizer = wrap(model)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(1.0).backward()
        optimizer.step()

    for _ in range(3):
        step()
    model.p[0].requires_grad_(hvd.rank() == 0)
    step()
    with pytest.raises(MismatchError, match=r"'p\.0' is trained on rank 0 but frozen on ranks? 1.* requires_grad_\(\)"):
        step()


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_ranks_that_alone_convert_their_model_are_told_and_can_go_on(steps: int) -> None:
    needs_two()
    model = Scales([(3,), (30000,)])
    optimizer = wrap(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(1.0).backward()
        optimizer.step()
    if hvd.rank() == 1:
        model.double()
    optimizer.zero_grad()
    with pytest.raises(
        MismatchError, match=r"'p\.0' is of float32 on .* but float64 on rank 1. Convert it to the same"
    ):
        _backward_and_step(model, optimizer)
    if hvd.rank() != 1:
        model.double()
    for _ in range(3):
        optimizer.zero_grad()
        _backward_and_step(model, optimizer)
        check(model, lambda _: 1.0)


def _backward_and_step(model: Scales, optimizer: Any) -> None:
    model.loss(1.0).backward()
    optimizer.step()


def test_a_gradient_that_only_one_rank_makes_dense() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    model = torch.nn.Sequential(table, torch.nn.Linear(2, 1))
    optimizer = wrap(model, op=hvd.Sum, sparse_as_dense=hvd.rank() == 0)
    for step in range(3):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank() % 4])).sum().backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the gradient of '0.weight' is sparse")
            optimizer.synchronize()
        assert table.weight.grad is not None
        expected = torch.zeros(4, 2)
        for rank in range(hvd.size()):
            expected[rank % 4] += 1
        assert torch.equal(table.weight.grad.to_dense(), expected), step


def test_ranks_with_other_models_are_told_and_can_go_on() -> None:
    needs_two()
    model = Scales([(3,), (5 + hvd.rank() % 2,)])
    optimizer = wrap(model)
    model.loss(1.0).backward()
    with pytest.raises(MismatchError, match=r"'p\.1' has shape \(5,\) on .* but \(6,\) on ranks? 1.* same model"):
        optimizer.step()
    optimizer.zero_grad()
    healthy = Scales()
    optimizer = wrap(healthy)
    for _ in range(2):
        healthy.loss(1.0).backward()
        optimizer.step()
        check(healthy, lambda _: 1.0)
        optimizer.zero_grad()


def test_an_unnamed_optimizer_made_by_one_rank_only() -> None:
    """Names count optimizers that are used, so that a copy for a checkpoint does no harm."""
    model = Scales()
    optimizer = wrap(model, op=hvd.Sum)
    if hvd.rank() == 0:
        copy.deepcopy((model, optimizer))
    other = Scales()
    second = wrap(other, op=hvd.Sum)
    for m, o in ((model, optimizer), (other, second)):
        m.loss(hvd.rank() + 1).backward()
        o.step()
        check(m, lambda _: total())


def test_an_optimizer_that_is_gone_is_no_twin() -> None:
    """Though garbage was not collected since: here an earlier one, there a later one, and as many in all."""

    def leave() -> None:
        gone = wrap(Scales(), op=hvd.Sum)
        gone.itself = gone  # type: ignore[attr-defined]

    model = Scales()
    gc.disable()
    try:
        if hvd.rank() == 0:
            leave()
        optimizer = wrap(model, op=hvd.Sum)
        if hvd.rank() != 0:
            leave()
        model.loss(hvd.rank() + 1).backward()
        optimizer.step()
    finally:
        gc.enable()
    check(model, lambda _: total())
