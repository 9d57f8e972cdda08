"""torch on a simulated GPU (tests/cuda_torch.py): later, in order, and wrong where nobody waits."""

from __future__ import annotations

import copy
import ctypes
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cuda_lab import simulated
from cuda_torch import TorchOnGpu


@pytest.fixture
def gpu() -> Iterator[TorchOnGpu]:
    found = TorchOnGpu(simulated(), late=0.0)
    with found.in_hvdlite():
        yield found


@contextmanager
def held(gpu: TorchOnGpu) -> Iterator[None]:
    """The current stream goes on when this ends."""
    go_on = threading.Event()
    gpu.cuda.launch(gpu.stream, lambda: go_on.wait(20))
    try:
        yield
    finally:
        go_on.set()


def seen(tensor: torch.Tensor) -> torch.Tensor:
    """What its memory has now, whatever streams do: as a reader that waits for nobody."""
    nbytes = tensor.numel() * tensor.element_size()
    return torch.frombuffer(bytearray(ctypes.string_at(tensor.data_ptr(), nbytes)), dtype=tensor.dtype)


def test_operations_return_before_they_are_done(gpu: TorchOnGpu) -> None:
    x = gpu.to_device(torch.ones(3))
    gpu.synchronize()
    with held(gpu):
        y = (x + x).mul_(3)
        x.zero_()
        assert seen(y).isnan().all()
        assert seen(x).tolist() == [1.0] * 3
    assert y.tolist() == [6.0] * 3
    assert x.tolist() == [0.0] * 3


def test_a_stream_keeps_the_order_and_another_one_does_not_wait(gpu: TorchOnGpu) -> None:
    x = gpu.to_device(torch.ones(3))
    other = gpu.cuda.stream()
    with held(gpu):
        x.add_(1)
        with gpu.on(other):
            assert 2.0 not in (x * 1).tolist()
            gpu.wait_stream(gpu.default)
            after = x * 1
    with gpu.on(other):
        assert after.tolist() == [2.0] * 3


def test_views_are_made_at_once(gpu: TorchOnGpu) -> None:
    x = gpu.to_device(torch.zeros(4))
    with held(gpu):
        x.view(2, 2)[1].fill_(5)
        assert x[2:].data_ptr() == x.data_ptr() + 8
    assert x.tolist() == [0.0, 0.0, 5.0, 5.0]


def test_tensors_of_the_host_are_read_when_the_kernel_is_enqueued(gpu: TorchOnGpu) -> None:
    on_host = torch.ones(3)
    x = gpu.empty((3,))
    with held(gpu):
        x.copy_(on_host)
        on_host.zero_()
    assert x.cpu().tolist() == [1.0] * 3
    on_host.copy_(x)
    assert on_host.tolist() == [1.0] * 3


def test_memory_that_was_freed_is_another_tensors_at_once(gpu: TorchOnGpu) -> None:
    x = gpu.to_device(torch.ones(3))
    gpu.synchronize()
    late_reader, address = x.data_ptr(), x.data_ptr()
    del x
    gpu.synchronize()
    assert ctypes.string_at(late_reader, 12) == b"\xff" * 12
    y = gpu.empty((3,))
    assert y.data_ptr() == address
    with gpu.on(gpu.cuda.stream()):
        del y
        assert gpu.empty((3,)).data_ptr() != address  # it is the other stream's


def test_what_the_same_stream_still_reads_may_be_freed(gpu: TorchOnGpu) -> None:
    with held(gpu):
        x = gpu.to_device(torch.ones(3))
        y = x + 1
        address = x.data_ptr()
        del x
        z = gpu.to_device(torch.zeros(3))
        assert z.data_ptr() == address
    assert y.tolist() == [2.0] * 3
    assert z.tolist() == [0.0] * 3


def test_devices_are_told_apart(gpu: TorchOnGpu) -> None:
    x = torch.ones(3, device="cuda")
    assert x.device == torch.device("cuda", 0)
    assert x.is_cuda
    assert not x.is_cpu
    assert torch.zeros_like(x).is_cuda
    assert x.new_empty(2).is_cuda
    assert x.cpu().is_cpu
    assert torch.empty_like(x, device="meta").is_meta
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3).add_(x)
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        x.numpy()


def test_numbers_for_the_host_wait(gpu: TorchOnGpu) -> None:
    x = gpu.to_device(torch.arange(4.0))
    gpu.cuda.launch(gpu.stream, lambda: None, delay_s=0.02)
    x.add_(1)
    assert x.sum().item() == 10.0
    assert torch.equal(x, gpu.to_device(torch.arange(1.0, 5.0)))
    assert x[x > 2].tolist() == [3.0, 4.0]
    assert x.nonzero().shape == (4, 1)


def test_copies_and_pickles_stay_on_the_device(gpu: TorchOnGpu) -> None:
    layer = torch.nn.Linear(2, 2).cuda()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.weight.is_cuda
        assert other.weight.requires_grad
        assert torch.equal(other.weight, layer.weight)


def test_training_is_that_of_the_host() -> None:
    """With kernels that come late; hooks are called with tensors on the device that say so."""
    torch.manual_seed(0)
    host = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5)
    )
    device = copy.deepcopy(host)
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 3, 1, 1])
    gpu = TorchOnGpu(simulated(), late=0.3)
    told = []

    def train(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    train(host, x, y)
    with gpu.active():
        device.cuda()
        device[4].bias.register_hook(lambda gradient: told.append(gradient.is_cuda))
        train(device, x.cuda(), y.cuda())
        for p, q in zip(host.parameters(), device.parameters(), strict=True):
            assert torch.allclose(p, q.detach().cpu(), rtol=1e-4, atol=1e-6)
    assert told == [True] * 3


def test_a_kernel_that_fails_is_an_error_where_the_host_waits(gpu: TorchOnGpu) -> None:
    x = gpu.to_device(torch.ones(3))
    x.index_fill_(0, gpu.to_device(torch.tensor([7])), 0.0)
    with pytest.raises(IndexError):
        gpu.synchronize()
