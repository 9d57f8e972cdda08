"""hvd.alltoall: row r of rank s to rank r, with splits of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hvdlite.torch as hvd
from harness_ranks import are_without_mpi
from machines_lab import machines
from torch_lab import REDUCING

pytestmark = pytest.mark.usefixtures("running")


ONE, SEVERAL = (0,) * 64, tuple(range(64))


@pytest.fixture(
    scope="module", params=[ONE] if are_without_mpi() else [ONE, SEVERAL], ids=lambda of: f"{of[1] + 1} nodes"
)
def running(request: pytest.FixtureRequest) -> Iterator[None]:
    """The ranks of one node exchange through shared memory, those of several by MPI."""
    with machines(request.param):
        hvd.init()
    yield
    hvd.shutdown()


def splits_of(sender: int, size: int) -> list[int]:
    """Different for every pair, some of them zero."""
    return [(sender + 2 * receiver) % 3 for receiver in range(size)]


def rows_of(sender: int, receiver: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count, *shape), 10 * (sender % 4) + receiver % 4 + 1).to(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*(((3,), dtype) for dtype in (*REDUCING, torch.bool)), *((shape, torch.float32) for shape in [(), (0,), (2, 5)])],
    ids=str,
)
def test_splits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size, me = hvd.size(), hvd.rank()
    splits = splits_of(me, size)
    tensor = torch.cat([rows_of(me, r, count, shape, dtype) for r, count in enumerate(splits)])
    output, received = hvd.alltoall(tensor, torch.tensor(splits, dtype=torch.int32), name=f"a{shape}{dtype}")
    assert received.tolist() == [splits_of(sender, size)[me] for sender in range(size)]
    assert received.dtype == torch.int32
    expected = [rows_of(sender, me, splits_of(sender, size)[me], shape, dtype) for sender in range(size)]
    assert torch.equal(output, torch.cat(expected))


def test_equal_parts_by_default() -> None:
    size, me = hvd.size(), hvd.rank()
    output = hvd.alltoall(torch.arange(2 * size) + 100 * me)
    assert output.tolist() == [100 * sender + 2 * me + i for sender in range(size) for i in range(2)]


@pytest.mark.parametrize("splits", [None, 1])
def test_asynchronous_one_returns_a_pair(splits: int | None) -> None:
    size, me = hvd.size(), hvd.rank()
    counts = None if splits is None else torch.full((size,), splits)
    output, received = hvd.synchronize(hvd.alltoall_async(torch.arange(size) + 100 * me, counts))
    assert output.tolist() == [100 * sender + me for sender in range(size)]
    assert received.tolist() == [1] * size


@pytest.mark.parametrize("numel", [1, 511, 300_001])
def test_many_elements(numel: int) -> None:
    size, me = hvd.size(), hvd.rank()
    output = hvd.alltoall((torch.arange(size * numel) % 251 + me).reshape(size, numel))
    for sender in range(size):
        assert torch.equal(output[sender], torch.arange(me * numel, (me + 1) * numel) % 251 + sender)


def test_more_rows_than_int32_counts() -> None:
    rows = 2**31 + hvd.rank()  # of nothing, so that they take no memory
    splits = torch.tensor([rows] + [0] * (hvd.size() - 1))
    received, counts = hvd.alltoall(torch.empty(rows, 0), splits)
    expected = [2**31 + rank if hvd.rank() == 0 else 0 for rank in range(hvd.size())]
    assert counts.tolist() == expected
    assert counts.dtype is (torch.int64 if hvd.rank() == 0 else torch.int32)
    assert received.shape == (sum(expected), 0)


def test_gradient_goes_back_the_way_it_came() -> None:
    size, me = hvd.size(), hvd.rank()
    splits = splits_of(me, size)
    tensor = torch.zeros(sum(splits) + 2, 3, dtype=torch.float64, requires_grad=True)  # two rows that go nowhere
    output, received = hvd.alltoall(tensor, torch.tensor(splits))
    weights = torch.cat([torch.full((n, 3), 1.0 + 10 * me + s).double() for s, n in enumerate(received.tolist())])
    (output * weights).sum().backward()
    expected = [torch.full((n, 3), 1.0 + 10 * receiver + me).double() for receiver, n in enumerate(splits)]
    assert torch.equal(tensor.grad, torch.cat([*expected, torch.zeros(2, 3).double()]))
