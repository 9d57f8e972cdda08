"""sparse_allreduce_async between real ranks. Any rank can build any rank's input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.errors import DuplicateNameError, MismatchError

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]


def coo(indices: Any, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def rows(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """(7, 2) of which rank r has r + 2 rows, some twice; small integers."""
    count = rank + 2
    values = (torch.arange(2 * count).reshape(count, 2) % 3 + rank + 1).to(dtype)
    return coo([[(3 * i) % 7 if i else 1 for i in range(count)]], values, (7, 2))


def points(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """(5, 4, 2) with three sparse dimensions; only odd ranks have any entries."""
    if rank % 2 == 0:
        return coo(torch.zeros(3, 0, dtype=torch.int64), torch.zeros(0, dtype=dtype), (5, 4, 2))
    return coo([[rank % 5, 4], [0, 3], [1, 1]], torch.tensor([rank, 2], dtype=dtype), (5, 4, 2))


def nothing(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return coo(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 3, dtype=dtype), (6, 3))


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]


@pytest.mark.parametrize("make", [rows, points, nothing])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, make: Callable[[int, torch.dtype], torch.Tensor]) -> None:
    total = torch.stack([make(rank, torch.float64).to_dense() for rank in range(hvd.size())]).sum(0)
    for op, expected in ((hvd.Sum, total), (hvd.Average, total / hvd.size())):
        finish = hvd.sparse_allreduce_async(make(hvd.rank(), dtype), "t", op)
        result = finish()
        assert finish() is result
        assert result.layout is torch.sparse_coo
        assert result.is_coalesced()
        assert result.dtype is dtype
        assert torch.equal(
            result.to_dense(),
            expected.trunc().to(dtype) if dtype.is_signed and not dtype.is_floating_point else expected.to(dtype),
        )


def test_sixteen_bits_are_added_in_32() -> None:
    """2048 and then ones: in fp16 each of them would be rounded away."""
    mine = coo([[0]], torch.tensor([2048.0 if hvd.rank() == 0 else 1.0], dtype=torch.float16), (1,))
    result = hvd.sparse_allreduce_async(mine, None, hvd.Sum)().to_dense()
    assert result.item() == torch.tensor(2048.0 + hvd.size() - 1).half().item()


def test_many_in_any_order() -> None:
    names = [f"s{i}" for i in range(20)]
    start = 7 * hvd.rank() % len(names)
    finishes = {}
    for name in names[start:] + names[:start]:
        finishes[name] = hvd.sparse_allreduce_async(
            coo([[int(name[1:])]], torch.tensor([hvd.rank() + 1.0]), (20,)), name, hvd.Sum
        )
    for i, name in enumerate(names):
        assert finishes[name]()._values().tolist() == [hvd.size() * (hvd.size() + 1) / 2], i
        assert finishes[name]()._indices().tolist() == [[i]]


def test_requires_grad_and_the_input_stays() -> None:
    mine = coo([[1, 1]], torch.ones(2), (3,)).requires_grad_()
    result = hvd.sparse_allreduce_async(mine, None, hvd.Average)()
    assert not result.requires_grad
    assert result.to_dense().tolist() == [0.0, 2.0, 0.0]
    assert mine._nnz() == 2


def other_op(rank: int) -> Any:
    return hvd.sparse_allreduce_async(rows(rank, torch.float32), "m", hvd.Average if rank == 1 else hvd.Sum)


def other_shape(rank: int) -> Any:
    return hvd.sparse_allreduce_async(coo([[0]], torch.ones(1, 2), (9 if rank == 1 else 8, 2)), "m", hvd.Sum)


def other_row(rank: int) -> Any:
    return hvd.sparse_allreduce_async(
        coo([[0]], torch.ones(1, 3 if rank == 1 else 2), (8, 3 if rank == 1 else 2)), "m", hvd.Sum
    )


def other_dtype(rank: int) -> Any:
    return hvd.sparse_allreduce_async(rows(rank, torch.float64 if rank == 1 else torch.float32), "m", hvd.Sum)


@pytest.mark.parametrize(
    ("submit", "text"),
    [
        (other_op, r"op is Sum on .* but Average on rank 1"),
        (other_shape, r"shape is \(8, 2\) on .* but \(9, 2\) on rank 1"),
        (other_row, r"\(2,\) on .* but \(3,\) on rank 1"),
        (other_dtype, r"dtype is float32 on .* but float64 on rank 1"),
    ],
)
def test_ranks_that_contradict_each_other(submit: Callable[[int], Any], text: str) -> None:
    if hvd.size() == 1:
        pytest.skip("alone nobody contradicts")
    finish = submit(hvd.rank())
    for _ in range(2):
        with pytest.raises(MismatchError, match=f"'m.*{text}"):
            finish()
    assert hvd.sparse_allreduce_async(rows(hvd.rank(), torch.float32), "m", hvd.Sum)().is_sparse  # the job goes on


@pytest.mark.parametrize(
    ("tensor", "op", "text"),
    [
        (torch.ones(2), hvd.Sum, "to_sparse"),
        (torch.ones(2, 2).to_sparse(), hvd.Max, "hvd.Average or hvd.Sum"),
        (torch.ones(2).to_sparse(), hvd.Adasum, "hvd.Average or hvd.Sum"),
        (torch.ones(2, dtype=torch.bool).to_sparse(), hvd.Sum, "bool"),
        (torch.ones(2, dtype=torch.complex64).to_sparse(), hvd.Sum, "complex64"),
        ([1.0], hvd.Sum, "list"),
    ],
    ids=["dense", "Max", "Adasum", "bool", "complex", "list"],
)
def test_what_it_refuses(tensor: Any, op: int, text: str) -> None:
    with pytest.raises(ValueError, match=f"sparse allreduce 'no'.*{text}"):
        hvd.sparse_allreduce_async(tensor, "no", op)


def test_a_name_in_flight() -> None:
    """A rank that waits keeps the name in flight on the others."""
    if hvd.size() == 1:
        pytest.skip("alone nothing stays in flight")
    mine = rows(hvd.rank(), torch.float32)
    if hvd.rank() == 0:
        finish = hvd.sparse_allreduce_async(mine, "twice", hvd.Sum)
        with pytest.raises(DuplicateNameError, match="twice"):
            hvd.sparse_allreduce_async(mine, "twice", hvd.Sum)
        hvd.barrier()
    else:
        hvd.barrier()
        finish = hvd.sparse_allreduce_async(mine, "twice", hvd.Sum)
    assert finish().is_sparse
