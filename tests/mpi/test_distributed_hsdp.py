"""FSDP2 inside a node and hvd.DistributedOptimizer across nodes train what torch's own hybrid sharding trains."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvdlite.torch as hvd
from distributed_lab import NODES, RANK, SIZE, process_group
from machines_lab import machines

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="fully_shard is public from torch 2.6 on"),
    pytest.mark.skipif(SIZE % 2 != 0, reason="two nodes of as many ranks"),
]
STEPS = 3


def sharded(mesh: dist.DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))  # 5 and 3: not all shards are of one size
    for layer in (model[0], model[2], model):
        fsdp.fully_shard(layer, mesh=mesh)
    return model


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + RANK))
    model.zero_grad()
    model(x).square().mean().backward()


def train_by_torch(mesh: dist.DeviceMesh) -> nn.Module:
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
    return model


def train_by_both(mesh: dist.DeviceMesh) -> nn.Module:
    across = hvd.ProcessSet.from_group(mesh.get_group("across"))
    assert across is not None
    model = sharded(mesh["inside"])
    shards = {name: nn.Parameter(whole.detach().to_local()) for name, whole in model.named_parameters()}
    optimizer = torch.optim.AdamW(shards.values(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=shards.items(), process_set=across)
    for step in range(STEPS):
        backward(model, step)
        for name, whole in model.named_parameters():
            shards[name].grad = whole.grad.to_local()
        optimizer.step()
    return model


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_hsdp(nodes: tuple[int, ...]) -> None:
    with process_group(nodes):
        with machines(nodes):
            hvd.init()
        try:
            names = ("across", "inside")
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=names)
            reference, model = train_by_torch(mesh), train_by_both(mesh)
            for expected, found in zip(reference.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(found.full_tensor(), expected.full_tensor())
        finally:
            hvd.shutdown()
