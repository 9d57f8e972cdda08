"""What only torch's CUDA build can show: training, amp, its allocator, graphs, and arrays of CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import hvdlite.torch as hvd
from gpu_lab import Gpu, of_rank, oracle

BATCH, STEPS = 48, 6  # 48 rows divide by 1, 2, 3 and 4 ranks


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Products in float32, so that the sums of fewer rows are what they are among more."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def new_model(where: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 512), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(512, 10)).to(where)


def batches(where: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(BATCH, 64, generator=generator).to(where),
            torch.randint(10, (BATCH,), generator=generator).to(where),
        )
        for _ in range(STEPS)
    ]


def same_parameters(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for parameter, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-3, atol=1e-5)


def same_on_all_ranks(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        rows = hvd.allgather(parameter.detach().flatten()[None])
        assert bool((rows == rows[0]).all())


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.bf16], ids=["none", "bf16"])
def test_training_is_that_of_one_process(cuda: Gpu, passes: int, compression: Any) -> None:
    alone, model = new_model(cuda.where), new_model(cuda.where)
    plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for x, y in batches(cuda.where):
        plain.zero_grad()
        cross_entropy(alone(x), y).backward()
        plain.step()
        optimizer.zero_grad()
        own_x, own_y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
        for part_x, part_y in zip(own_x.chunk(passes), own_y.chunk(passes), strict=True):
            (cross_entropy(model(part_x), part_y) / passes).backward()
        optimizer.step()
    same_on_all_ranks(model)
    if compression is hvd.Compression.none:
        same_parameters(model, alone)


def test_amp(cuda: Gpu) -> None:
    """The scale begins too high, so that the first steps overflow and are skipped."""
    model = new_model(cuda.where)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    losses = []
    for x, y in batches(cuda.where) * 8:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = cross_entropy(model(x[hvd.rank() :: hvd.size()]), y[hvd.rank() :: hvd.size()])
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    same_on_all_ranks(model)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert scaler.get_scale() < 2.0**30
    assert sum(losses[-STEPS:]) < sum(losses[:STEPS])


def test_memory_that_torch_hands_out_again(cuda: Gpu) -> None:
    """Tensors die while operations on them are under way, and their memory is somebody else's at once."""
    handles = []
    for i in range(50):
        handles.append(hvd.allreduce_async(cuda.late(of_rank(hvd.rank(), (100_000,))), op=hvd.Sum, name=f"dies {i}"))
        torch.full((100_000,), float("nan"), device=cuda.where)
    for handle in handles:
        assert torch.equal(hvd.synchronize(handle).cpu(), oracle(hvd.Sum, (100_000,), torch.float32))


def test_tensors_that_torch_has_to_copy(cuda: Gpu) -> None:
    """To make them contiguous, or to leave what came in as it is; the copies come late as well."""
    tensor = cuda.late(of_rank(hvd.rank(), (30, 20))).t()
    expected = oracle(hvd.Sum, (30, 20), torch.float32).t()
    assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum).cpu(), expected)
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert torch.equal(tensor.cpu(), expected)
    tensor = cuda.late(of_rank(hvd.rank(), (1001,)))
    assert torch.equal(hvd.broadcast(tensor, 0).cpu(), of_rank(0, (1001,)))
    assert torch.equal(tensor.cpu(), of_rank(hvd.rank(), (1001,)))


def test_splits_on_the_gpu(cuda: Gpu) -> None:
    """So is what was received."""
    splits = torch.full((hvd.size(),), 2, device=cuda.where)
    result, received = hvd.alltoall(torch.ones(2 * hvd.size(), device=cuda.where), splits)
    assert result.tolist() == [1.0] * 2 * hvd.size()
    assert (received.device, received.tolist()) == (cuda.where, [2] * hvd.size())


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_stream_that_is_captured(cuda: Gpu) -> None:
    tensor = torch.ones(10, device=cuda.where)
    hvd.allreduce_(tensor, op=hvd.Sum)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"), torch.cuda.graph(graph):
        hvd.allreduce_(tensor, op=hvd.Sum)
    assert bool((hvd.allreduce(torch.ones(10, device=cuda.where), op=hvd.Sum) == hvd.size()).all())


def test_arrays_of_cupy(cuda: Gpu) -> None:
    import cupy

    values, total = of_rank(hvd.rank(), (6, 50)), oracle(hvd.Sum, (6, 50), torch.float32).numpy()
    with cupy.cuda.Device(cuda.where.index), cupy.cuda.Stream(non_blocking=True):
        array = cupy.asarray(values.numpy())
        result = hvd.allreduce(array, op=hvd.Sum)
        assert type(result) is cupy.ndarray
        assert (cupy.asnumpy(result) == total).all()
        assert hvd.allreduce_(array, op=hvd.Sum) is array
        assert (cupy.asnumpy(array * 2) == 2 * total).all()
        assert hvd.broadcast_(array, 0) is array
        gathered = hvd.allgather(array)
        assert gathered.shape == (6 * hvd.size(), 50)
