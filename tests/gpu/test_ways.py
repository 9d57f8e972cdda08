"""Every way between GPUs that can be here, as if the ranks were on one node or on two: results, and training.

NCCL connects ranks on one GPU from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1; HVDLITE_NCCL_LIBRARY names one as new.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import hvdlite
import hvdlite.torch as hvd
from gpu_lab import IS_HERE, IS_SIMULATED, Gpu, SimulatedGpu, of_rank, oracle
from hvdlite import _native, device_engine, nccl_library
from hvdlite.collectives.by_size import BySizeBackend
from hvdlite.collectives.direct import DirectBackend
from hvdlite.collectives.hierarchical import HierarchicalBackend
from hvdlite.collectives.nccl import NcclBackend
from one_gpu import not_at_first
from test_with_torch import batches, exact, new_model, same_on_all_ranks, same_parameters

if IS_HERE:
    from machines_lab import ONE_AND_SEVERAL, WORLD, Machines, machines

assert exact  # products in float32, here too
SIZES = [0, 1, 1001, 70_001, 5_000_001]


def reached_by_nccl() -> bool:
    """Ranks of a simulated GPU are not: tests/mpi has ways for them."""
    if IS_SIMULATED:
        return False
    return torch.cuda.device_count() >= WORLD.size or nccl_library.load().shares_gpus


def ways() -> list[tuple[str, Machines]]:
    """On memory that ranks share by descriptors of files ("direct") or by CUDA IPC ("handles"), and by NCCL alone."""
    names = ["direct", "handles", *(["nccl"] if reached_by_nccl() else [])]
    return [*itertools.product(names, ONE_AND_SEVERAL)]


def refuse(*_: object) -> None:
    raise RuntimeError("not in this test")


@pytest.fixture(scope="module", params=ways() if IS_HERE else [None], ids=str)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """hvdlite runs, and takes this way."""
    if request.param is None:
        pytest.skip("torch sees no GPU here")
    name, machine_of = request.param
    with pytest.MonkeyPatch.context() as patch:
        if name == "nccl":
            patch.setenv("HVDLITE_GPU_ALLREDUCE", "nccl")
            patch.setattr(device_engine, "_shared_memory", not_at_first(device_engine._shared_memory))
        else:
            patch.setattr(nccl_library, "load", refuse)
        if name == "handles":
            patch.setattr(_native, "FileSegment", refuse)
        with machines(machine_of):
            hvd.init()
        yield name
        hvd.shutdown()


@pytest.fixture
def gpu(way: str) -> Gpu:
    return SimulatedGpu() if IS_SIMULATED else Gpu()


def test_it_is_the_way_that_is_taken(way: str, gpu: Gpu) -> None:
    hvd.allreduce(gpu.late(torch.ones(3)))
    device = hvdlite.runtime().group.world.executor.device
    assert device is not None
    backend: Any = device.engine.backend
    across, uses_nccl = len(hvdlite.runtime().topology.nodes) > 1, way == "nccl"
    assert type(backend) is ((BySizeBackend if uses_nccl else HierarchicalBackend) if across else _in_node(way))
    if across:
        assert type(backend._large if uses_nccl else backend._node) is _in_node(way)
    assert (backend.memory._segments is _native.HandleSegment) == (way == "handles")


def _in_node(way: str) -> type:
    return NcclBackend if way == "nccl" else DirectBackend


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32], ids=str)
def test_sums_of_every_size_at_once(way: str, gpu: Gpu, dtype: torch.dtype) -> None:
    tensors = [gpu.late(of_rank(hvd.rank(), (numel,), dtype)) for numel in SIZES]
    handles = [hvd.allreduce_async(tensor, op=hvd.Sum, name=f"{dtype} {i}") for i, tensor in enumerate(tensors)]
    for handle, numel in zip(handles, SIZES, strict=True):
        assert torch.equal(gpu.read(hvd.synchronize(handle)), oracle(hvd.Sum, (numel,), dtype))


def test_sums_that_repeat_in_place(way: str, gpu: Gpu) -> None:
    tensor, total = gpu.late(of_rank(hvd.rank(), (100_003,))), oracle(hvd.Sum, (100_003,), torch.float32)
    for step in range(12):
        hvd.allreduce_(tensor, op=hvd.Sum if step == 0 else hvd.Average, name="repeats")
    assert torch.equal(gpu.read(tensor), total)


def test_blocks(way: str, gpu: Gpu) -> None:
    """Gathered, spread from each rank, and reduced into shares."""
    rank, size = hvd.rank(), hvd.size()
    rows = [of_rank(other, (other % 3 + 1, 1001)) for other in range(size)]
    assert torch.equal(gpu.read(hvd.allgather(gpu.late(rows[rank]))), torch.cat(rows))
    for root in range(size):
        tensor = gpu.late(of_rank(rank, (70_001,)))
        assert torch.equal(gpu.read(hvd.broadcast_(tensor, root)), of_rank(root, (70_001,)))
    share = hvd.reducescatter(gpu.late(of_rank(rank, (2 * size, 301))), op=hvd.Sum)
    assert torch.equal(gpu.read(share), oracle(hvd.Sum, (2 * size, 301), torch.float32)[2 * rank : 2 * rank + 2])


def test_training_is_that_of_one_process(way: str, gpu: Gpu) -> None:
    if IS_SIMULATED:
        pytest.skip("the simulated driver is not torch's")
    alone, model = new_model(gpu.where), new_model(gpu.where)
    plain, inner = (torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9) for network in (alone, model))
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    own = slice(hvd.rank(), None, hvd.size())
    for x, y in batches(gpu.where):
        for network, update, rows in ((alone, plain, slice(None)), (model, optimizer, own)):
            update.zero_grad()
            cross_entropy(network(x[rows]), y[rows]).backward()
            update.step()
    same_on_all_ranks(model)
    same_parameters(model, alone)
