"""Training on GPUs: the same as in one process on the CPU, on whichever streams, and with part of it on the CPU.

torch works as in tests/cuda_torch.py: a wait that is missing, or memory that is freed too early, is NaN.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from cuda_lab import simulated
from cuda_torch import TorchOnGpu
from hvdlite.memory.device import DeviceMemory
from hvdlite.torch import arrival
from hvdlite.torch.gradients import Slot

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.not_with_three_ranks,
    pytest.mark.usefixtures("running"),
]
alone_is_torch = pytest.mark.not_with_one_rank  # an optimizer of one rank leaves gradients to torch


@pytest.fixture(params=[0, 1])
def gpu(request: pytest.FixtureRequest) -> Iterator[TorchOnGpu]:
    """Two orders in which kernels come late, another one on each rank."""
    with TorchOnGpu(simulated(), seed=2 * hvd.rank() + request.param, late=0.1).in_hvdlite() as found:
        yield found


def small_model() -> torch.nn.Module:
    """With a layer of each kind, tied weights, and gradients small and large."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(50, 200)
    head = torch.nn.Linear(200, 50, bias=False)
    head.weight = embedding.weight
    hidden = torch.nn.Linear(200, 200)
    return torch.nn.Sequential(embedding, hidden, torch.nn.LayerNorm(200), torch.nn.ReLU(), head)


def batch(rank: int, step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randint(50, (4,), generator=generator).to(device) for _ in range(2))  # type: ignore[return-value]


def loss_of(model: torch.nn.Module, rank: int, step: int, device: str) -> torch.Tensor:
    words, following = batch(rank, step, device)
    return torch.nn.functional.cross_entropy(model(words), following)


def trained_alone(model: torch.nn.Module, steps: int, make: Callable[..., torch.optim.Optimizer], norm: float) -> None:
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rank, step, "cpu") for rank in range(hvd.size())]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)  # type: ignore[arg-type]


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def assert_close(device: torch.nn.Module, host: torch.nn.Module, tolerance: float = 1e-4) -> None:
    for (name, p), q in zip(device.named_parameters(), host.parameters(), strict=True):
        difference = (p.detach().cpu() - q.detach()).abs().max().item()
        assert difference <= tolerance, (name, difference)


@alone_is_torch
def test_a_model_that_moves_between_steps(gpu: TorchOnGpu) -> None:
    """To a GPU, back, and there again."""
    model = small_model()
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    trained_alone(alone, 8, lambda parameters: torch.optim.SGD(parameters, lr=0.1), 1e9)
    for step in range(8):
        device = ("cpu", "cuda")[step // 2 % 2]
        model.to(device)
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step, device).backward()
        optimizer.step()
    assert_close(model, alone)


@alone_is_torch
@pytest.mark.parametrize(("compression", "tolerance"), [("none", 1e-4), ("bf16", 2e-2)])
@pytest.mark.parametrize("passes", [1, 2])
def test_training_is_that_of_one_process(gpu: TorchOnGpu, passes: int, compression: str, tolerance: float) -> None:
    """Through guess, order and settled buckets; gradients are clipped between synchronize() and step()."""
    host = small_model()
    device = copy.deepcopy(host).cuda()
    hvd.broadcast_parameters(device.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        sgd(device.parameters()),
        device.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        backward_passes_per_step=passes,
    )
    for step in range(5):
        for _ in range(passes):
            (loss_of(device, hvd.rank(), step, "cuda") / passes).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(device.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    trained_alone(host, 5, sgd, 1.0)
    assert_close(device, host, tolerance)


def test_resumed_from_a_checkpoint_of_one_rank(gpu: TorchOnGpu) -> None:
    """The others have neither weights nor state; each makes the tensors on its GPU that the first has on its own."""
    host = small_model()
    device = copy.deepcopy(host).cuda()
    optimizer = hvd.DistributedOptimizer(adam(device.parameters()), device.named_parameters())
    for step in range(2):
        loss_of(device, hvd.rank(), step, "cuda").backward()
        optimizer.step()
        optimizer.zero_grad()
    again = copy.deepcopy(device)
    if hvd.rank() != 0:
        for parameter in again.parameters():
            parameter.data.fill_(7.0)
    plain = adam(again.parameters())
    if hvd.rank() == 0:
        plain.load_state_dict(optimizer.state_dict())
    hvd.broadcast_parameters(again.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(plain, root_rank=0)
    for state in plain.state.values():
        assert state["exp_avg"].is_cuda
        assert not state["step"].is_cuda
    resumed = hvd.DistributedOptimizer(plain, again.named_parameters())
    for step in range(2, 4):
        loss_of(again, hvd.rank(), step, "cuda").backward()
        resumed.step()
        resumed.zero_grad()
    trained_alone(host, 4, adam, 1e9)
    assert_close(again, host)


def test_parameters_on_both(gpu: TorchOnGpu) -> None:
    """A table on the CPU before layers on the GPU, in one optimizer."""
    torch.manual_seed(0)
    table, layer = torch.nn.Embedding(1000, 40), torch.nn.Linear(40, 50)
    host = torch.nn.Sequential(table, layer)
    device = copy.deepcopy(host)
    device[1].cuda()
    optimizer = hvd.DistributedOptimizer(sgd(device.parameters()), device.named_parameters())
    for step in range(4):
        words, following = batch(hvd.rank(), step, "cpu")
        out = device[1](gpu.to_device(device[0](words)))
        torch.nn.functional.cross_entropy(out, following.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained_alone(host, 4, sgd, 1e9)
    assert_close(device, host)
    assert device[0].weight.is_cpu
    assert device[1].weight.is_cuda


def test_gradients_of_another_layout(gpu: TorchOnGpu) -> None:
    """What autograd leaves is not how the parameter lies: a copy on the GPU, which lives until it is packed."""
    weights = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in ((3, 5), (200, 300))]
    slot = Slot(0, "weight", torch.nn.Parameter(weights[0].detach()), sparse_as_dense=False, changed=[])
    slot.active, slot.param.grad = True, torch.zeros(5, 3, device="cuda").t()
    copied = slot.contribution()
    assert copied is not None
    assert copied.is_cuda
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Sum)
    total = hvd.size() * (hvd.size() + 1) / 2
    for step in range(4):
        for weight in weights:
            weight.grad = torch.full(weight.shape[::-1], hvd.rank() + 1.0, device="cuda").t()
        optimizer.step()
        for weight in weights:
            assert weight.tolist() == torch.full(weight.shape, -(step + 1) * total).tolist()
            weight.grad = None


def test_gradients_that_are_packed_late(gpu: TorchOnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other stream waits for what packs the small ones, not only for what made them."""
    pack_on = DeviceMemory.pack_on

    def pack_late(memory: DeviceMemory, stream: int, *rest: object) -> None:
        gpu.cuda.launch(gpu.stream, lambda: None, delay_s=0.02)
        pack_on(memory, stream, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceMemory, "pack_on", pack_late)
    weights = [torch.nn.Parameter(torch.zeros(numel, device="cuda")) for numel in (3, 50)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Sum)
    for step in range(4):
        for weight in weights:
            weight.grad = torch.full(weight.shape, (step + 1) * (hvd.rank() + 1.0), device="cuda")
        optimizer.step()
        optimizer.zero_grad()
    for weight in weights:
        assert weight.tolist() == [-10 * hvd.size() * (hvd.size() + 1) / 2] * len(weight)


class _OnStream(torch.autograd.Function):
    """Its gradient is ``value``, made late on a stream of its own, where autograd goes on: that of the forward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gpu: TorchOnGpu, stream: Any, value: float) -> torch.Tensor:
        ctx.made = tensor.shape, gpu, stream, value
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        shape, gpu, gpu.stream, value = ctx.made
        if gpu.stream is not gpu.default:
            gpu.hold(0.02)
        return torch.full(shape, value, device="cuda"), None, None, None


@alone_is_torch
@pytest.mark.parametrize("numels", [(3, 50), (20_000, 30_000)], ids=["small", "large"])
@pytest.mark.parametrize("buckets", [1, 2])
@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_backward_on_several_streams(
    gpu: TorchOnGpu, numels: tuple[int, ...], buckets: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the last gradient of a bucket has come, streams have yet to make others."""
    monkeypatch.setattr(arrival, "_ORDERLY_STEPS", 1)
    side = gpu.cuda.stream()
    weights = [torch.nn.Parameter(torch.zeros(numel, device="cuda")) for numel in numels * (2 * buckets)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=1.0), op=hvd.Sum, groups=buckets, backward_passes_per_step=passes
    )
    gradients: list[Any] = []  # none goes before the stream to which its memory belongs has met the others
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad))  # type: ignore[no-untyped-call]
    for step in range(4):
        for _ in range(passes):
            value = (step + 1) * (hvd.rank() + 1.0)
            streams = [gpu.default, side, side, gpu.default] * buckets
            parts = [_OnStream.apply(p, gpu, s, value) for p, s in zip(weights, streams, strict=True)]  # type: ignore[no-untyped-call]
            torch.autograd.backward(parts)
            gpu.stream = gpu.default
            gpu.wait_stream(side)  # as autograd does at the end
        optimizer.step()
        with gpu.on(side):
            gpu.wait_stream(gpu.default)
        gradients.clear()
        optimizer.zero_grad()
    for weight in weights:
        assert weight.tolist() == [-10 * passes * hvd.size() * (hvd.size() + 1) / 2] * len(weight)


def wanted(numel: int) -> list[float]:
    return [hvd.size() * (hvd.size() + 1) / 2] * numel


def test_dropped_right_after_submission(gpu: TorchOnGpu) -> None:
    """Its memory is the next tensor's at once, which is written on the same stream."""
    for numel in (10, 5000, 100_000):
        handles = []
        for i in range(8):
            tensor = torch.full((numel,), hvd.rank() + 1.0, device="cuda")
            handles.append(hvd.allreduce_async(tensor, op=hvd.Sum, name=f"dropped {numel} {i}"))
            del tensor
            torch.full((numel,), 1e9, device="cuda")
        for handle in handles:
            assert hvd.synchronize(handle).tolist() == wanted(numel)


def enqueue(tensor: torch.Tensor, name: str) -> hvd.Handle[torch.Tensor]:
    """A sum that the ranks' streams have been given."""
    handle = hvd.allreduce_async(tensor, op=hvd.Sum, name=name)
    while not hvd.poll(handle):
        time.sleep(1e-4)
    return handle


@pytest.mark.parametrize("how", ["dropped", "awaited on another stream"])
def test_memory_of_what_is_enqueued_is_kept(gpu: TorchOnGpu, how: str) -> None:
    """On rank 0, whose stream waits for those of the others, nobody else keeps the tensors."""
    is_first, side = hvd.rank() == 0, gpu.cuda.stream()
    if not is_first:
        gpu.cuda.launch(gpu.stream, lambda: None, delay_s=0.2)
    handles = [enqueue(torch.full((5000,), hvd.rank() + 1.0, device="cuda"), f"{how} first")]
    for i in range(4):
        tensor = torch.full((5000,), hvd.rank() + 1.0, device="cuda")
        handle = enqueue(tensor, f"{how} {i}")
        if is_first and how == "awaited on another stream":
            with gpu.on(side):
                handle.synchronize()
        if not is_first:
            handles.append(handle)
        del tensor, handle
        torch.full((5000,), 1e9, device="cuda")
    for handle in handles:
        assert handle.synchronize().tolist() == wanted(5000)


def test_submitted_on_one_stream_and_awaited_on_another(gpu: TorchOnGpu) -> None:
    side = gpu.cuda.stream()
    for i in range(8):
        submitter, waiter = (side, gpu.default) if i % 2 else (gpu.default, side)
        with gpu.on(submitter):
            tensor = torch.full((5000,), 0.0, device="cuda")
            gpu.cuda.launch(submitter, lambda: None, delay_s=0.01)
            tensor.add_(hvd.rank() + 1.0)
            handle = hvd.allreduce_async(tensor, op=hvd.Sum, name=f"across streams {i}")
        with gpu.on(waiter):
            result = hvd.synchronize(handle)
            assert (result * 1).tolist() == wanted(5000)
            gpu.synchronize()
        with gpu.on(submitter):
            gpu.synchronize()
            del tensor, result, handle


def test_a_training_loop_on_a_side_stream(gpu: TorchOnGpu) -> None:
    host = small_model()
    side = gpu.cuda.stream()
    with gpu.on(side):
        device = copy.deepcopy(host).cuda()
        optimizer = hvd.DistributedOptimizer(sgd(device.parameters()), device.named_parameters())
        for step in range(3):
            loss_of(device, hvd.rank(), step, "cuda").backward()
            optimizer.step()
            optimizer.zero_grad()
        trained_alone(host, 3, sgd, 1e9)
        assert_close(device, host)


def test_many_operations_at_once_of_any_kind(gpu: TorchOnGpu) -> None:
    together = random.Random(1)
    rank, size = hvd.rank(), hvd.size()
    for round_ in range(3):
        waits: list[Callable[[], bool]] = []
        for i in range(12):
            kind, numel = (
                together.choice(["allreduce", "allgather", "broadcast", "alltoall"]),
                together.choice([1, 999]),
            )
            name = f"{round_}.{i}"
            mine = torch.full((numel * size,), rank + 1.0, device="cuda")
            if kind == "allreduce":
                handle = hvd.allreduce_async(mine, op=hvd.Sum, name=name)
                waits.append(lambda h=handle, n=numel: h.synchronize().tolist() == wanted(n * size))  # type: ignore[misc]
            elif kind == "allgather":
                handle = hvd.allgather_async(mine[: numel * (rank + 1)], name=name)
                rows = [r + 1.0 for r in range(size) for _ in range(numel * (r + 1))]
                waits.append(lambda h=handle, rows=rows: h.synchronize().tolist() == rows)  # type: ignore[misc]
            elif kind == "broadcast":
                handle = hvd.broadcast_async(mine, i % size, name=name)
                rows = [i % size + 1.0] * numel * size
                waits.append(lambda h=handle, rows=rows: h.synchronize().tolist() == rows)  # type: ignore[misc]
            else:
                both = hvd.alltoall_async(mine, name=name)
                rows = [r + 1.0 for r in range(size) for _ in range(numel)]
                waits.append(lambda h=both, rows=rows: h.synchronize()[0].tolist() == rows)  # type: ignore[misc]
            del mine
        together.shuffle(waits)
        assert all(wait() for wait in waits)


def test_adasum_is_that_of_the_host(gpu: TorchOnGpu) -> None:
    if hvd.size() == 3:
        pytest.skip("Adasum needs a power of two of ranks")
    mine = torch.arange(300.0).sin() * (hvd.rank() + 1) + hvd.rank()
    expected = hvd.allreduce(mine, op=hvd.Adasum)
    assert torch.allclose(hvd.allreduce(mine.cuda(), op=hvd.Adasum).cpu(), expected, rtol=1e-6)
    host = small_model()
    device = copy.deepcopy(host).cuda()
    for model, kind in ((host, "cpu"), (device, "cuda")):
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Adasum)
        for step in range(2):
            loss_of(model, hvd.rank(), step, kind).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(device, host)


def test_process_sets(gpu: TorchOnGpu) -> None:
    """Each has memory and a stream of its own."""
    if hvd.size() < 3:
        pytest.skip("one set besides that of all ranks needs three")
    first = hvd.add_process_set([0, 1])
    if first.included():
        mine = torch.full((5000,), hvd.rank() + 1.0, device="cuda")
        assert hvd.allreduce(mine, op=hvd.Sum, process_set=first).tolist() == [3.0] * 5000
    everybody = torch.full((100,), hvd.rank() + 1.0, device="cuda")
    assert hvd.allreduce(everybody, op=hvd.Sum).tolist() == wanted(100)
    hvd.remove_process_set(first)


def test_a_second_gpu_is_refused(gpu: TorchOnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
    ordinal_of = gpu.ordinal_of
    monkeypatch.setattr(gpu, "ordinal_of", lambda tensor: 1 if tensor is second else ordinal_of(tensor))
    hvd.allreduce(first)
    with pytest.raises(ValueError, match=r"on cuda:1, but .* cuda:0, .*set_device\(hvd\.local_rank\(\)\)"):
        hvd.allreduce_(second)
    assert hvd.allreduce(first, op=hvd.Sum).tolist() == [float(hvd.size())] * 3
