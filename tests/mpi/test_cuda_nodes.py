"""GPUs of several nodes: reduce-scatter in each, by way of pinned memory to the ring across, and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from runtime_lab import LAYOUTS, machines
from test_cuda_training import *  # noqa: F403
from test_cuda_training import TorchOnGpu, wanted

pytestmark = [pytest.mark.any_mpi, pytest.mark.thorough]


@pytest.fixture(scope="module", params=[layout for layout in LAYOUTS if len(set(layout)) > 1], ids=str, autouse=True)
def layout(request: pytest.FixtureRequest) -> Iterator[tuple[int, ...]]:
    with machines(request.param):
        hvd.init()
        yield request.param
        hvd.shutdown()


def test_many_under_way(gpu: TorchOnGpu) -> None:
    """More than there is pinned memory for, of several parts each; every rank's kernels come at other times."""
    numels = [300_001, 70_000, 9, 1_000_003] * 3
    tensors = [torch.full((numel,), hvd.rank() + 1.0, device="cuda") for numel in numels]
    handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"{i}") for i, tensor in enumerate(tensors)]
    for handle, numel in zip(handles, numels, strict=True):
        result = hvd.synchronize(handle)
        assert result.min().item() == result.max().item() == wanted(1)[0], numel


def test_a_gpu_between_small_allreduces_of_the_host(gpu: TorchOnGpu) -> None:
    """Their plan runs free; before the GPU's operation, which the coordinator enqueues, ranks meet."""
    free = []
    for number in range(60):
        for small in range(3):
            value = torch.full((2,), float(hvd.rank() + number))
            hvd.allreduce_(value, op=hvd.Sum, name=f"small {small}")
            assert (value == sum(range(hvd.size())) + hvd.size() * number).all()
        tensor = torch.full((5_000,), hvd.rank() + 1.0, device="cuda")
        result = hvd.allreduce(tensor, op=hvd.Sum, name="on the GPU")
        assert result.min().item() == result.max().item() == wanted(1)[0]
        free.append(hvdlite.runtime().group.world.coordinator.runs_free)
    assert all(free[-20:])
