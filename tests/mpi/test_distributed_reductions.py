"""Reductions of torch.distributed over hvdlite: every operation, every kind of number, any grouping of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce as fold

import pytest
import torch
import torch.distributed as dist

from distributed_lab import NODES, RANK, SIZE, SIZES, of_rank, process_group, total

pytestmark = [pytest.mark.any_mpi, pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")]
REDUCED = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
LAST = SIZE - 1


@pytest.fixture(scope="module", params=NODES, ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    with process_group(request.param) as group:
        yield group


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reductions(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    for numel in SIZES:
        tensor = of_rank(RANK, numel, dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total(numel, dtype)), numel
        everybody = torch.stack([of_rank(rank, numel) for rank in range(SIZE)])
        for op, expected in ((dist.ReduceOp.MIN, everybody.amin(0)), (dist.ReduceOp.MAX, everybody.amax(0))):
            tensor = of_rank(RANK, numel, dtype)
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, expected.to(dtype)), (numel, op)
        tensor = of_rank(RANK, numel, dtype)
        dist.reduce(tensor, LAST)
        assert RANK != LAST or torch.equal(tensor, total(numel, dtype)), numel
        whole = of_rank(RANK, numel * SIZE, dtype)
        share = torch.empty(numel, dtype=dtype)
        expected = total(numel * SIZE, dtype)[numel * RANK : numel * (RANK + 1)]
        dist.reduce_scatter_tensor(share, whole)
        assert torch.equal(share, expected), numel
        dist.reduce_scatter(share.zero_(), list(whole.split(numel)) if numel else [share] * SIZE)
        assert torch.equal(share, expected), numel


def test_other_reductions(group: dist.ProcessGroup) -> None:
    for op, combine in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        tensor = of_rank(RANK, 20, torch.int32)
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, fold(combine, [of_rank(rank, 20, torch.int32) for rank in range(SIZE)]))
        whole, share = of_rank(RANK, SIZE * 3, torch.int32), torch.empty(3, dtype=torch.int32)
        dist.reduce_scatter_tensor(share, whole, op)
        parts = [of_rank(rank, SIZE * 3, torch.int32)[RANK * 3 : RANK * 3 + 3] for rank in range(SIZE)]
        assert torch.equal(share, fold(combine, parts))
        tensor = of_rank(RANK, 20, torch.int32)
        dist.reduce(tensor, LAST, op)
        expected = fold(combine, [of_rank(rank, 20, torch.int32) for rank in range(SIZE)])
        assert torch.equal(tensor, expected if RANK == LAST else of_rank(RANK, 20, torch.int32))
    tensor = torch.full((3,), RANK + 1.0)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))
    assert torch.equal(tensor, torch.full((3,), float(SIZE * (SIZE + 1))))
    tensor = torch.full((3,), RANK + 1.0)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.equal(tensor, torch.full((3,), (SIZE + 1) / 2))
    tensor = torch.full((3,), 2.0)
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    assert torch.equal(tensor, torch.full((3,), 2.0**SIZE))


def mixed(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Three elements for each rank, of bool or of complex numbers that have both parts."""
    real = of_rank(rank, 3 * SIZE)
    return torch.complex(real, 1 + real) if dtype.is_complex else real < 4


def added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one + other


WAYS_OF_BOOL = {
    "SUM": torch.logical_or,
    "PRODUCT": torch.logical_and,
    "MIN": torch.logical_and,
    "MAX": torch.logical_or,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@pytest.mark.parametrize(
    ("dtype", "op", "combine", "factor"),
    [
        *((torch.bool, getattr(dist.ReduceOp, name), combine, None) for name, combine in WAYS_OF_BOOL.items()),
        (torch.complex64, dist.ReduceOp.SUM, added, None),
        (torch.complex64, dist.ReduceOp.AVG, added, 1 / SIZE),
        (torch.complex64, dist._make_nccl_premul_sum(2.0), added, 2.0),
    ],
)
def test_bool_and_complex_in_every_reduction(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    op: dist.ReduceOp,
    combine: Callable[..., torch.Tensor],
    factor: float | None,
) -> None:
    expected = fold(combine, [mixed(rank, dtype) for rank in range(SIZE)])
    if factor is not None:
        expected = expected * factor
    own = expected[3 * RANK : 3 * RANK + 3]
    tensor = mixed(RANK, dtype)
    dist.all_reduce(tensor, op)
    torch.testing.assert_close(tensor, expected)
    tensor = mixed(RANK, dtype)
    dist.reduce(tensor, LAST, op)
    torch.testing.assert_close(tensor, expected if RANK == LAST else mixed(RANK, dtype))
    share = torch.zeros(3, dtype=dtype)
    dist.reduce_scatter_tensor(share, mixed(RANK, dtype), op)
    torch.testing.assert_close(share, own)
    share.zero_()
    dist.reduce_scatter(share, list(mixed(RANK, dtype).split(3)), op)
    torch.testing.assert_close(share, own)
