"""Tensors of every type that any rank can compute for any rank, and hvdlite running for a module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hvdlite.torch as hvd

REDUCING = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def rank_input(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small integers: sums and products of a few ranks are exact in every dtype."""
    numel = int(torch.Size(shape).numel())
    return (torch.arange(numel) % 3 + rank % 2 + 1).reshape(shape).to(dtype)
