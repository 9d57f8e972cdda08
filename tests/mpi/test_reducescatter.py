"""hvd.reducescatter: this rank's rows of what allreduce gives. For its gradient see test_gradients.py."""

from __future__ import annotations

import pytest
import torch

import hvdlite.torch as hvd
from torch_lab import REDUCING, rank_input

pytestmark = [pytest.mark.any_mpi, pytest.mark.usefixtures("running")]

SHAPES = [(0,), (1,), (7,), (5, 3), (4, 0, 2), (2, 3, 4), (1023,), (3, 100_001)]


def own_rows(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The first ``rows % size`` ranks have one row more."""
    share, more = divmod(full.shape[0], size)
    start = rank * share + min(rank, more)
    return full[start : start + share + (rank < more)]


def total(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([rank_input(rank, shape, dtype) for rank in range(hvd.size())]).double().sum(0).to(dtype)


@pytest.mark.parametrize("dtype", REDUCING, ids=str)
def test_sum(dtype: torch.dtype) -> None:
    for shape in SHAPES if dtype is torch.float32 else [(5, 3)]:
        tensor = rank_input(hvd.rank(), shape, dtype)
        result = hvd.reducescatter(tensor, op=hvd.Sum)
        assert torch.equal(result, own_rows(total(shape, dtype), hvd.rank(), hvd.size())), shape
        assert torch.equal(tensor, rank_input(hvd.rank(), shape, dtype))


def test_average_is_the_default_and_scales_apply() -> None:
    size = hvd.size()
    tensor = torch.full((2 * size, 3), float(hvd.rank()))
    assert torch.equal(hvd.reducescatter(tensor), torch.full((2, 3), (size - 1) / 2))
    result = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    assert torch.equal(result, torch.full((2, 3), 3.0 * size * (size - 1)))
    assert hvd.reducescatter(torch.full((size,), 3), op=hvd.Sum, prescale_factor=0.5).tolist() == [size]


def test_groups_and_handles() -> None:
    tensors = [rank_input(hvd.rank(), shape, torch.float32) for shape in SHAPES]
    expected = [own_rows(total(shape, torch.float32), hvd.rank(), hvd.size()) for shape in SHAPES]
    for results in (
        hvd.grouped_reducescatter(tensors, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_reducescatter_async(tensors, name="group", op=hvd.Sum)),
        [hvd.synchronize(hvd.reducescatter_async(tensor, op=hvd.Sum)) for tensor in tensors],
    ):
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression(compression: type) -> None:
    tensor = rank_input(hvd.rank(), (9, 4), torch.float32)
    result = hvd.reducescatter(tensor, compression=compression, op=hvd.Sum)
    assert result.dtype == torch.float32
    assert torch.equal(result, own_rows(total((9, 4), torch.float32), hvd.rank(), hvd.size()))
