"""Sparse gradients through DistributedOptimizer; every rank gathers what this one sends (fake_world.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from fake_world import FakeWorld, Universe

SIZE = 3


@pytest.fixture(autouse=True)
def world(universe: Universe) -> FakeWorld:
    return universe.start(SIZE)


class Words(torch.nn.Module):
    """An embedding whose gradient is sparse, used sparsely or as a matrix, and a dense weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(10, 3))
        self.weight = torch.nn.Parameter(torch.ones(3))

    def loss(self, *words: int, factor: float = 1.0) -> torch.Tensor:
        rows = torch.nn.functional.embedding(torch.tensor(words, dtype=torch.int64), self.table, sparse=True)
        return factor * (rows @ self.weight).sum()


def wrap(model: torch.nn.Module, **arguments: Any) -> Any:
    arguments.setdefault("op", hvd.Sum)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **arguments)


def gradient(model: Words) -> torch.Tensor:
    assert model.table.grad is not None
    return model.table.grad


def rows(model: Words) -> list[float]:
    dense = gradient(model).to_dense()
    assert (dense == dense[:, :1]).all()
    return dense[:, 0].tolist()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_stay_sparse(world: FakeWorld, set_to_none: bool) -> None:
    model = Words()
    optimizer = wrap(model)
    for step in range(4):
        world.submitted.clear()
        model.loss(1, 1, 2).backward()
        optimizer.synchronize()
        assert gradient(model).layout is torch.sparse_coo
        assert gradient(model).is_coalesced()
        assert rows(model)[:4] == [0.0, 2.0 * SIZE, 1.0 * SIZE, 0.0]
        # Only the rows travel, and from the second step on the dense weight has a home.
        assert [(2, 3)] in [each.shapes for each in world.of_kind("allgather")]
        assert [each.has_home for each in world.buckets] == [step > 0]
        optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("sparse_as_dense", [True, False])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average, hvd.Max])
def test_layouts(world: FakeWorld, op: int, sparse_as_dense: bool) -> None:
    """Max knows no sparse tensors: a row that a rank lacks is one of zeros."""
    model = Words()
    optimizer = wrap(model, op=op, sparse_as_dense=sparse_as_dense)
    for _ in range(2):
        model.loss(4).backward()
        optimizer.step()
        assert gradient(model).is_sparse == (op != hvd.Max and not sparse_as_dense)
        optimizer.zero_grad()


def test_a_step_without_rows(world: FakeWorld) -> None:
    model = Words()
    optimizer = wrap(model)
    for words in [(3,), (), (5,)]:
        if words:
            model.loss(*words).backward()
        optimizer.step()
        assert gradient(model).is_sparse
        assert rows(model) == [float(SIZE) if row in words else 0.0 for row in range(10)]
        optimizer.zero_grad()


def test_a_dense_gradient_of_a_sparse_parameter(world: FakeWorld) -> None:
    model = Words()
    optimizer = wrap(model)
    model.loss(3).backward()
    optimizer.step()
    optimizer.zero_grad()
    (model.loss(3) + model.table.sum()).backward()
    optimizer.step()
    assert gradient(model).is_sparse
    assert rows(model) == [2.0 * SIZE if row == 3 else 1.0 * SIZE for row in range(10)]


def test_a_sparse_gradient_of_a_dense_parameter(world: FakeWorld) -> None:
    model = Words()
    optimizer = wrap(model)
    model.table.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="'table' is sparse.*in the first step it was dense") as raised:
        model.loss(2).backward()
    assert raised[0].filename == __file__
    optimizer.step()
    assert not gradient(model).is_sparse
    assert gradient(model)[:4, 0].tolist() == [
        0.0,
        0.0,
        6.0,
        0.0,
    ]  # of dense ones rank r of 3 sends r + 1 times as much
    optimizer.zero_grad()
    model.loss(2).backward()  # told once
    optimizer.step()


def test_both_in_one_step(world: FakeWorld) -> None:
    """Autograd adds a sparse and a dense part up to a dense gradient."""
    model = Words()
    optimizer = wrap(model)
    for _ in range(2):
        (model.loss(3) + model.table.sum()).backward()
        optimizer.step()
        assert not gradient(model).is_sparse
        optimizer.zero_grad()


def test_accumulated(world: FakeWorld) -> None:
    model = Words()
    optimizer = wrap(model, backward_passes_per_step=2)
    for _ in range(3):
        model.loss(1, factor=1.0).backward()
        model.loss(1, 2, factor=10.0).backward()
        optimizer.synchronize()
        assert rows(model)[:3] == [0.0, 11.0 * SIZE, 10.0 * SIZE]
        optimizer.zero_grad()


def test_scales_and_compression(world: FakeWorld) -> None:
    for arguments in ({"gradient_predivide_factor": 4.0}, {"compression": hvd.Compression.fp16}):
        model = Words()
        optimizer = wrap(model, op=hvd.Average, **arguments)
        for _ in range(2):
            model.loss(1).backward()
            optimizer.synchronize()
            assert gradient(model).dtype is torch.float32
            assert rows(model)[:2] == [0.0, 1.0]
            optimizer.zero_grad()


def test_groups_leave_it_to_itself(world: FakeWorld) -> None:
    model = Words()
    optimizer = wrap(model, groups=[[model.table, model.weight]])
    for _ in range(2):
        model.loss(1).backward()
        optimizer.synchronize()
        assert rows(model)[:2] == [0.0, 1.0 * SIZE]
        optimizer.zero_grad()


@pytest.mark.parametrize("added", [True, False])
def test_switched_on_or_added_later(world: FakeWorld, added: bool) -> None:
    model = Words()
    model.table.requires_grad_(False)
    parameters = [model.weight] if added else [model.weight, model.table]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), model.named_parameters(), op=hvd.Sum)
    model.loss(1).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.table.requires_grad_(True)
    if added:
        optimizer.add_param_group({"params": [model.table]})
    for _ in range(3):
        model.loss(1).backward()
        optimizer.step()
        assert gradient(model).is_sparse
        assert rows(model)[:2] == [0.0, 1.0 * SIZE]
        optimizer.zero_grad()


def test_a_change_on_the_way_is_noticed(world: FakeWorld) -> None:
    model = Words()
    optimizer = wrap(model)
    model.loss(1).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.loss(1).backward()
    gradient(model).mul_(2.0)
    with pytest.warns(UserWarning, match="'table' was changed"):
        optimizer.step()


def test_a_gradient_sparse_in_all_dimensions(world: FakeWorld) -> None:
    p = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum)
    with pytest.warns(UserWarning, match="several sparse dimensions"):
        torch.gather(p, 1, torch.tensor([[1], [2]]), sparse_grad=True).sum().backward()
    optimizer.step()
    assert p.grad is not None
    assert p.grad.tolist() == [[0.0, 6.0, 0.0], [0.0, 0.0, 6.0]]


def test_converted_after_the_first_step(world: FakeWorld) -> None:
    model = Words()
    optimizer = wrap(model)
    model.loss(1).backward()
    optimizer.step()
    model.double()
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(1).backward()
        optimizer.step()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float64}


def test_sparse_as_dense_for_an_optimizer_that_takes_sparse_gradients_only() -> None:
    table = torch.nn.Parameter(torch.zeros(10, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam([table], lr=1.0), sparse_as_dense=True)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.embedding(torch.tensor([1, 4, 4]), table, sparse=True).sum().backward()
        optimizer.step()
    assert table.ne(0).any(dim=1).nonzero().flatten().tolist() == [1, 4]


@pytest.mark.filterwarnings("ignore:the gradient of 'table' is sparse")
def test_a_table_of_sparse_adam_that_no_rank_uses_at_first() -> None:
    """Ranks do not know yet that its gradient will be sparse; that no row is stepped is the same."""
    table = torch.nn.Parameter(torch.zeros(10, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam([table], lr=1.0), [("table", table)])
    optimizer.step()
    assert not table.any()
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.embedding(torch.tensor([1, 4, 4]), table, sparse=True).sum().backward()
        optimizer.step()
    assert table.ne(0).any(dim=1).nonzero().flatten().tolist() == [1, 4]
