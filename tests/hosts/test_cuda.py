"""Tensors on GPUs of two hosts: what goes through pinned memory and the network is right, in training and in groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab import Lab

Hosts = Callable[..., Lab]

# Streams come late by up to a millisecond per task, so that a copy that somebody does not wait for is too late.
LATE = {"GPUSIM_JITTER_US": "1000", "OMP_NUM_THREADS": "1"}

SCRIPT = f"""
import copy, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch, torch.distributed as dist
import hvdlite, hvdlite.distributed, hvdlite.torch as hvd
from cuda_distributed import in_groups
from cuda_lab import simulated
from cuda_torch import TorchOnGpu

hvd.init()
rank, size = hvd.rank(), hvd.size()
total = size * (size + 1) / 2
gpu = TorchOnGpu(simulated(), seed=rank, late=0.1)

def loss_of(model, rank, step, device):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 30, generator=generator).to(device)
    return model(x).square().mean()

with gpu.in_hvdlite(), in_groups(gpu):
    for round_ in range(3):
        numels = [300_001, 70_000, 9, 1_000_003] * 2
        tensors = [torch.full((numel,), rank + 1.0, device="cuda") for numel in numels]
        handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"{{i}}") for i, tensor in enumerate(tensors)]
        for handle in handles:
            result = handle.synchronize()
            assert result.min().item() == result.max().item() == total, (result.min(), result.max())
    assert hvd.allgather(torch.full((rank + 1,), float(rank), device="cuda")).tolist() == [
        float(r) for r in range(size) for _ in range(r + 1)
    ]
    for root in range(size):
        tensor = torch.full((100_000,), float(rank), device="cuda")
        hvd.broadcast_(tensor, root)
        assert tensor.min().item() == tensor.max().item() == root
    torch.manual_seed(0)
    host = torch.nn.Sequential(torch.nn.Linear(30, 300), torch.nn.Tanh(), torch.nn.Linear(300, 200))
    device = copy.deepcopy(host).cuda()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(device.parameters(), lr=0.1), device.named_parameters())
    alone = torch.optim.SGD(host.parameters(), lr=0.1)
    for step in range(4):
        loss_of(device, rank, step, "cuda").backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.zero_grad()
        torch.stack([loss_of(host, r, step, "cpu") for r in range(size)]).mean().backward()
        alone.step()
    for p, q in zip(device.parameters(), host.parameters()):
        assert torch.allclose(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-6)
    dist.init_process_group("hvdlite")
    for numel in (9, 300_001):
        tensor = torch.full((numel,), rank + 1.0, device="cuda")
        works = [dist.all_reduce(tensor, async_op=True), dist.all_reduce(tensor, async_op=True)]
        works[1].wait()
        assert tensor.min().item() == tensor.max().item() == size * total
        found = torch.empty(size, numel, device="cuda")
        dist.all_gather_into_tensor(found, torch.full((1, numel), float(rank), device="cuda"))
        share = torch.empty(numel, device="cuda")
        dist.reduce_scatter_tensor(share, torch.full((size * numel,), rank + 1.0, device="cuda"))
        swapped = torch.empty(size, numel, device="cuda")
        dist.all_to_all_single(swapped, torch.full((size, numel), float(rank), device="cuda"))
        for r in range(size):
            assert found[r].min().item() == found[r].max().item() == r
            assert swapped[r].min().item() == swapped[r].max().item() == r
        assert share.min().item() == share.max().item() == total
        dist.send(share, (rank + 1) % size)
        dist.recv(tensor, (rank - 1) % size)
        assert tensor.min().item() == tensor.max().item() == total
    dist.destroy_process_group()
    if hvd.local_rank() == 0:  # who carries what crosses, where hosts have unlike numbers of ranks
        assert hvdlite.statistics()["ring_bytes_sent"] > 0
print("all right", flush=True)
hvd.shutdown()
"""


@pytest.mark.parametrize("ranks_per_host", [pytest.param([2, 2], marks=pytest.mark.thorough), [2, 1]], ids=str)
def test_allreduce_and_training(hosts: Hosts, ranks_per_host: list[int]) -> None:
    result = hosts(2).launch(SCRIPT, ranks_per_host=ranks_per_host, env=LATE, timeout=150).check()
    assert result.stdout.count("all right") == sum(ranks_per_host)
