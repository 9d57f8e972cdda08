"""hvd.join: ranks that run out of data take part with nothing until all have."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.errors import MismatchError

pytestmark = [pytest.mark.any_mpi, pytest.mark.usefixtures("running")]


def test_everybody_at_once() -> None:
    for _ in range(5):
        last = hvd.join()
        assert 0 <= last < hvd.size()
        assert hvd.broadcast_object(last, 0) == last


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.float32], ids=str)
def test_what_joined_ranks_contribute(dtype: torch.dtype) -> None:
    """Rank r does r rounds; in round k the ranks above k are there."""
    size, me = hvd.size(), hvd.rank()
    identities = {hvd.Sum: sum, hvd.Min: min, hvd.Max: max}
    for k in range(me):
        there = [1 + rank for rank in range(k + 1, size)]
        mine = torch.full((70,), 1 + me).to(dtype)
        for op, combine in identities.items():
            assert hvd.allreduce(mine, op=op, name=f"{op}").tolist() == [float(combine(there))] * 70
        product = torch.tensor(there).prod()
        assert hvd.allreduce(mine, op=hvd.Product).tolist() == [float(product)] * 70
        entries = torch.sparse_coo_tensor([[me]], [1 + me], (size,), check_invariants=True).to(dtype)
        rows = hvd.sparse_allreduce_async(entries, "sparse", hvd.Sum)()
        assert rows.to_dense().tolist() == [float(1 + rank) if rank > k else 0.0 for rank in range(size)]
        part = hvd.reducescatter(torch.full((size,), 1 + me).to(dtype), op=hvd.Sum)
        assert part.tolist() == [float(sum(there))]
    assert hvd.join() == size - 1


@pytest.mark.parametrize("prescale", [0.0, 0.3, 0.5, 1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float32], ids=str)
def test_scales_and_ranks_that_are_gone(dtype: torch.dtype, prescale: float) -> None:
    """Whatever the factor, who has joined does not count; integers are truncated once they are prescaled."""
    size, me = hvd.size(), hvd.rank()
    if me:
        mine = torch.full((5,), 1 + me).to(dtype)
        there = [torch.tensor((1 + rank) * prescale) for rank in range(1, size)]
        scaled = torch.stack(there if dtype.is_floating_point else [value.trunc() for value in there])
        for op, expected in [(hvd.Product, scaled.prod()), (hvd.Min, scaled.min()), (hvd.Max, scaled.max())]:
            result = hvd.allreduce(mine, op=op, prescale_factor=prescale)
            assert torch.allclose(result, expected.to(dtype).expand(5)), op
    hvd.join()


def test_a_product_of_integers_that_no_rank_may_leave() -> None:
    """No integer times 2 is 1."""
    size, me = hvd.size(), hvd.rank()
    if me:
        for dtype, prescale in [(torch.int32, 2.0), (torch.uint8, -1.0)]:
            with pytest.raises(
                MismatchError, match=rf"'p': rank 0 called join\(\), and no integer .* {prescale} leaves"
            ):
                hvd.allreduce(torch.ones(3, dtype=dtype), op=hvd.Product, prescale_factor=prescale, name="p")
        result = hvd.allreduce(torch.full((3,), 3.0), op=hvd.Product, prescale_factor=2.0)
        assert torch.allclose(result, torch.full((3,), 6.0 ** (size - 1)))
    hvd.join()


def test_average_divides_by_all() -> None:
    size, me = hvd.size(), hvd.rank()
    if me:
        result = hvd.allreduce(torch.ones(3, dtype=torch.float64))
        assert torch.allclose(result, torch.full((3,), (size - 1) / size).double())
    hvd.join()


def test_gradients_in_their_slots() -> None:
    """A DistributedOptimizer goes on where others have none left, with zeros in their place."""
    size, me = hvd.size(), hvd.rank()
    parameter = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Sum)

    def step() -> None:
        optimizer.zero_grad()
        (parameter * (1 + me)).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    everybody = 3 * sum(range(1, size + 1))
    for k in range(me):
        step()
        there = sum(1 + rank for rank in range(k + 1, size))
        everybody += there
        assert parameter[0].item() == -everybody
    hvd.join()
    hvd.broadcast_parameters([("p", parameter)], root_rank=size - 1)
    assert parameter.tolist() == [-3 * sum(range(1, size + 1)) - sum(r * (1 + r) for r in range(size))] * 50


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("short", [0, -1])
def test_who_has_joined_hears_of_no_agreement_about_gradients(short: int, steps: int, sparse: bool) -> None:
    """Others put it off: the order of gradients, their homes, and which are sparse, are settled by the first steps."""
    size, me = hvd.size(), hvd.rank()
    table = torch.nn.Embedding.from_pretrained(torch.zeros(3, 2), freeze=False, sparse=sparse)
    large = torch.nn.Parameter(torch.zeros(200_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, large], lr=0.0), op=hvd.Sum)
    for k in range(steps if me == short % size else 4):
        there = [rank for rank in range(size) if rank != short % size or k < steps]
        step_of_all(optimizer, table, large, there)
    hvd.join()
    for _ in range(3):
        step_of_all(optimizer, table, large, list(range(size)))
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse is sparse or size == 1
    hvd.join()


def step_of_all(optimizer: Any, table: torch.nn.Embedding, large: torch.nn.Parameter, there: list[int]) -> None:
    optimizer.zero_grad()
    ((table(torch.tensor([1])).sum() + large.sum()) * (1 + hvd.rank())).backward()
    optimizer.step()
    expected = float(sum(1 + rank for rank in there))
    for parameter, row in [(table.weight, 1), (large, 7)]:
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.to_dense()[row], torch.full_like(parameter[row], expected))


def test_what_needs_all() -> None:
    size, me = hvd.size(), hvd.rank()
    if size == 1:
        pytest.skip("nobody is left when one of one has joined")
    if me:
        for root in range(size):
            with pytest.raises(MismatchError, match=r"broadcast 'lost': rank 0 called join\(\)"):
                hvd.broadcast(torch.zeros(1), root_rank=root, name="lost")
        with pytest.raises(MismatchError, match=r"allgather 'rows': rank 0 called join\(\)"):
            hvd.allgather(torch.zeros(me, 2), name="rows")
        with pytest.raises(MismatchError, match=r"alltoall 'all': rank 0 called join\(\)"):
            hvd.alltoall(torch.zeros(size), name="all")
        hvd.barrier()
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def test_operations_in_flight_when_a_rank_joins() -> None:
    size, me = hvd.size(), hvd.rank()
    handles = [hvd.allreduce_async(torch.full((3,), 1 + me), name=f"early{i}", op=hvd.Sum) for i in range(20)]
    hvd.join()
    assert all(hvd.synchronize(handle).tolist() == [size * (size + 1) // 2] * 3 for handle in handles)


def test_a_rank_that_has_joined_submits_nothing() -> None:
    if hvd.size() == 1:
        pytest.skip("join returns at once")
    errors: list[str] = []

    def submit() -> None:
        time.sleep(0.2)
        try:
            hvd.allreduce(torch.ones(1), name="late")
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=submit) if hvd.rank() == 0 else None
    if thread is not None:
        thread.start()
    else:
        time.sleep(0.5)
    hvd.join()
    if thread is not None:
        thread.join()
        assert len(errors) == 1
        assert "'late': this rank has called join()" in errors[0]


def test_what_only_others_have_used_is_told_from_what_all_have_made_before() -> None:
    """Of two models, which all make, the others train the second one before the first rank has data for either."""

    class Trained:
        def __init__(self, width: int) -> None:
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(hvd.SyncBatchNorm(width), torch.nn.Linear(width, 2))
            inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.optimizer = hvd.DistributedOptimizer(inner, self.model.named_parameters())
            self.width = width

        def step(self) -> None:
            self.optimizer.zero_grad()
            self.model(torch.randn(4, self.width)).square().mean().backward()
            self.optimizer.step()

    first, second = Trained(3), Trained(5)
    if hvd.rank():
        second.step()
    hvd.join()
    hvd.broadcast_parameters(second.model.state_dict(), root_rank=hvd.size() - 1)
    for trained in (first, second, first, second):
        trained.step()
    for trained in (first, second):
        for parameter in trained.model.parameters():
            assert hvd.broadcast(parameter.detach(), 0).equal(parameter)
    hvd.join()


@pytest.mark.parametrize("kind", ["linear", "batch norm"])
def test_what_only_others_have_used_is_told_from_what_comes_later(kind: str) -> None:
    """The first rank has no data to begin with: its first step is of a second optimizer, and then comes the first."""

    class Trained:
        def __init__(self) -> None:
            torch.manual_seed(0)
            norm = hvd.SyncBatchNorm(3) if kind == "batch norm" else torch.nn.Identity()
            self.model = torch.nn.Sequential(norm, torch.nn.Linear(3, 2))
            inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.optimizer = hvd.DistributedOptimizer(inner, self.model.named_parameters())

        def step(self) -> None:
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 3)).square().mean().backward()
            self.optimizer.step()

    first = Trained()
    for _ in range(2 if hvd.rank() else 0):
        first.step()
    hvd.join()
    hvd.broadcast_parameters(first.model.state_dict(), root_rank=hvd.size() - 1)
    second = Trained()
    for trained in (second, first, second, first):
        trained.step()
    for trained in (first, second):
        for parameter in trained.model.parameters():
            assert hvd.broadcast(parameter.detach(), 0).equal(parameter)
    hvd.join()
