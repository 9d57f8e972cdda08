"""torch.distributed on tensors of a simulated GPU, over hvdlite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from cuda_distributed import on_gpu
from cuda_torch import TorchOnGpu
from distributed_lab import RANK, SIZES, of_rank, process_group, total

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]


@pytest.fixture
def gpu() -> Iterator[TorchOnGpu]:
    with on_gpu(seed=RANK, late=0.1) as found:
        yield found


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with process_group() as group:
        yield group


def test_all_reduce(gpu: TorchOnGpu, group: dist.ProcessGroup) -> None:
    for numel in SIZES:
        tensor = of_rank(RANK, numel).cuda()
        dist.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), total(numel)), numel
