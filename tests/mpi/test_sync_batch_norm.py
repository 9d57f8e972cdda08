"""SyncBatchNorm on n ranks is batch normalization in one process with all batches. Any rank can build any batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from torch_lab import finite_differences

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]

CHANNELS = 3


def last_rank() -> int:
    return hvd.size() - 1


ROWS: dict[str, Callable[[int], int]] = {
    "even": lambda rank: 4,
    "uneven": lambda rank: 2 + 3 * rank,
    "one is empty": lambda rank: 0 if rank and rank == last_rank() else 4,
    "one has all": lambda rank: 5 if rank == last_rank() else 0,
}


def part(rank: int, rows: Callable[[int], int], rest: tuple[int, ...], dtype: torch.dtype, step: int) -> torch.Tensor:
    """The batch of a rank; channels differ in mean and spread."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    noise = torch.randn(rows(rank), CHANNELS, *rest, generator=generator, dtype=torch.float64)
    channel = torch.arange(1.0, CHANNELS + 1, dtype=torch.float64).reshape(1, -1, *[1] * len(rest))
    return (noise * channel + 5 * channel).to(dtype)


def mine(parts: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows of ``whole``, the concatenation of ``parts``."""
    return torch.split(whole, [len(rows) for rows in parts])[hvd.rank()]


def close(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> None:
    assert actual is not None
    assert expected is not None
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def compare(
    rows: Callable[[int], int],
    rest: tuple[int, ...],
    dtype: torch.dtype,
    tolerance: float,
    memory_format: torch.memory_format = torch.contiguous_format,
    device: str = "cpu",
    **arguments: Any,
) -> None:
    """Three steps of a layer on all ranks, on ``device``, against one process on the CPU."""
    torch.manual_seed(7)
    parameters_dtype = dtype if dtype is torch.float64 else torch.float32
    kind = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}
    alone = kind[len(rest)](CHANNELS, **arguments, dtype=parameters_dtype)
    together = hvd.SyncBatchNorm(CHANNELS, **arguments, dtype=parameters_dtype)
    for parameter in alone.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 2.0)
    together.load_state_dict(alone.state_dict())
    together.to(device)
    for step in range(3):
        parts = [part(rank, rows, rest, dtype, step) for rank in range(hvd.size())]
        weights = [part(rank, rows, rest, dtype, step + 50) for rank in range(hvd.size())]
        whole = torch.cat(parts).requires_grad_()
        own = parts[hvd.rank()].clone(memory_format=memory_format).requires_grad_()
        expected, output = alone(whole), together(own.to(device))
        assert (output.device.type, output.is_contiguous(memory_format=memory_format)) == (device, True)
        output = output.cpu()
        close(output, mine(parts, expected), tolerance)
        (expected * torch.cat(weights)).sum().backward()
        (output * weights[hvd.rank()]).sum().backward()
        assert whole.grad is not None
        close(own.grad, mine(parts, whole.grad), tolerance)
    together.cpu()
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        scale = b.grad.abs().max().clamp(min=1)
        close(hvd.allreduce(a.grad, op=hvd.Sum) / scale, b.grad / scale, tolerance)
    for (name, a), (_, b) in zip(together.named_buffers(), alone.named_buffers(), strict=True):
        close(a, b, 0.0 if name == "num_batches_tracked" else min(tolerance, 1e-5))


@pytest.mark.parametrize("rest", [(), (5,), (3, 4), (2, 3, 2)], ids=["2D", "3D", "4D", "5D"])
@pytest.mark.parametrize("rows", ROWS)
def test_is_batch_normalization_of_the_whole_batch(rows: str, rest: tuple[int, ...]) -> None:
    compare(ROWS[rows], rest, torch.float64, 1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", ROWS)
def test_on_a_gpu(rows: str) -> None:
    compare(ROWS[rows], (3, 4), torch.float32, 1e-4, device="cuda")


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": None},
        {"momentum": 0.0},
        {"momentum": 1.0, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_arguments(arguments: dict[str, Any]) -> None:
    compare(ROWS["uneven"], (3, 4), torch.float64, 1e-12, **arguments)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)], ids=str
)
@pytest.mark.parametrize("affine", [True, False])
def test_narrow_inputs(dtype: torch.dtype, tolerance: float, affine: bool) -> None:
    """Parameters and statistics are fp32."""
    compare(ROWS["uneven"], (3, 4), dtype, tolerance, affine=affine)
    compare(ROWS["one has all"], (), dtype, tolerance, affine=affine)


def test_a_narrow_layer() -> None:
    """Of fp16 parameters too; statistics are computed in fp32 and rounded where they are kept."""
    layer = hvd.SyncBatchNorm(CHANNELS, dtype=torch.float16)
    own = part(hvd.rank(), ROWS["uneven"], (4,), torch.float16, 0).requires_grad_()
    layer(own).sum().backward()
    whole = torch.cat([part(rank, ROWS["uneven"], (4,), torch.float16, 0) for rank in range(hvd.size())])
    close(layer.running_mean, (0.1 * whole.float().mean((0, 2))).half(), 1e-3)
    assert own.grad is not None
    assert (own.grad.dtype, layer.weight.grad.dtype) == (torch.float16, torch.float16)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_default_dtype_is_for_tensors_of_the_program(default: torch.dtype) -> None:
    layer = hvd.SyncBatchNorm(CHANNELS, dtype=torch.float32)
    own = part(hvd.rank(), ROWS["uneven"], (4,), torch.float16, 0)
    expected, before = layer(own), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(layer(own), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("rest", [(4, 5), (2, 3, 4)], ids=["4D", "5D"])
def test_channels_last(rest: tuple[int, ...]) -> None:
    memory_format = torch.channels_last if len(rest) == 2 else torch.channels_last_3d
    compare(ROWS["uneven"], rest, torch.float64, 1e-12, memory_format)
    own = torch.randn(2, CHANNELS, *rest).to(memory_format=memory_format).requires_grad_()
    layer = hvd.SyncBatchNorm(CHANNELS)
    (gradient,) = torch.autograd.grad(layer(own).square().sum(), own)
    assert gradient.is_contiguous(memory_format=memory_format)


def test_gradient_is_that_of_finite_differences() -> None:
    """Of the sum of all ranks' losses, by every element of every rank's input."""
    torch.manual_seed(hvd.rank())
    layer = hvd.SyncBatchNorm(2, dtype=torch.float64, track_running_stats=False)
    own = torch.randn(1 + hvd.rank(), 2, 2, dtype=torch.float64).requires_grad_()
    weights = torch.randn_like(own)

    def loss() -> torch.Tensor:
        return (layer(own) ** 3 * weights).sum()

    loss().backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad, finite_differences(loss, own), rtol=1e-6, atol=1e-7)


def test_a_large_mean_leaves_the_variance() -> None:
    """In fp32 the sum of squares of these has no digit of the variance."""
    generator = torch.Generator().manual_seed(hvd.rank())
    own = 4096 + torch.randint(-1, 2, (200, 2), generator=generator).float()
    whole = hvd.allgather(own).double()
    layer = hvd.SyncBatchNorm(2, momentum=1.0)
    layer(own)
    close(layer.running_mean, whole.mean(0).float(), 1e-6)
    close(layer.running_var, whole.var(0).float(), 1e-5)


def test_eval_is_this_ranks_own_affair() -> None:
    """Rank 0 alone would wait for the others if it communicated."""
    layer = hvd.SyncBatchNorm(CHANNELS, dtype=torch.float64)
    layer(part(hvd.rank(), ROWS["uneven"], (4,), torch.float64, 0))
    layer.eval()
    alone = torch.nn.BatchNorm1d(CHANNELS, dtype=torch.float64).eval()
    alone.load_state_dict(layer.state_dict())
    if hvd.rank() == 0:
        own = torch.randn(2, CHANNELS, 4, dtype=torch.float64, requires_grad=True)
        assert torch.equal(layer(own), alone(own))
        layer(own).sum().backward()
        without = hvd.SyncBatchNorm(CHANNELS, track_running_stats=False, dtype=torch.float64).eval()
        close(without(own).mean((0, 2)), torch.zeros(CHANNELS, dtype=torch.float64), 1e-12)
    hvd.barrier()


def test_an_input_without_gradient_costs_no_communication_in_backward() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    output = layer(torch.randn(3, CHANNELS) + 1)
    if hvd.rank() == 0:
        output.square().sum().backward()
        assert layer.weight.grad is not None
    hvd.barrier()


def test_one_value_per_channel_is_refused_on_every_rank() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match=r"more than 1 value|more than one value per channel"):
        layer(torch.ones(1 if hvd.rank() == 0 else 0, CHANNELS))
    layer(torch.randn(2, CHANNELS))


def test_no_value_at_all() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    own = torch.empty(0, CHANNELS, 4, requires_grad=True)
    output = layer(own)
    output.sum().backward()
    assert output.shape == (0, CHANNELS, 4)
    assert own.grad is not None
    assert own.grad.shape == (0, CHANNELS, 4)
    assert torch.equal(layer.running_mean, torch.zeros(CHANNELS))
    assert torch.equal(layer.running_var, torch.ones(CHANNELS))


def test_copies_work_on() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    layer(torch.randn(2, CHANNELS))
    own = torch.full((4, CHANNELS), float(hvd.rank()))
    own[::2] += 2
    outputs = [other(own) for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)))]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_after_a_restart_beside_a_layer_that_is_new() -> None:
    """As of a rank that comes to an elastic job; the others have their layers from before."""

    class Trained:
        def __init__(self) -> None:
            torch.manual_seed(0)
            layers = hvd.SyncBatchNorm(CHANNELS), torch.nn.Linear(CHANNELS, 2), hvd.SyncBatchNorm(2)
            self.model = torch.nn.Sequential(*layers)
            inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.optimizer = hvd.DistributedOptimizer(inner, self.model.named_parameters())

        def step(self) -> None:
            self.optimizer.zero_grad()
            self.model(torch.randn(4, CHANNELS)).square().mean().backward()
            self.optimizer.step()

    hvd.SyncBatchNorm(CHANNELS)(torch.randn(4, CHANNELS))
    hvd.join()
    trained = Trained()
    trained.step()
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == last_rank():
        trained = Trained()
    hvd.broadcast_parameters(trained.model.state_dict(), root_rank=0)
    for _ in range(2):
        trained.step()
    for parameter in trained.model.parameters():
        assert hvd.broadcast(parameter.detach(), 0).equal(parameter)


def test_several_layers_in_one_graph() -> None:
    """Each layer's operations have names of their own."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(hvd.SyncBatchNorm(CHANNELS, dtype=torch.float64) for _ in range(3))
    parts = [part(rank, ROWS["uneven"], (), torch.float64, 0) for rank in range(hvd.size())]
    own, whole = parts[hvd.rank()].clone().requires_grad_(), torch.cat(parts).requires_grad_()
    alone = [torch.nn.BatchNorm1d(CHANNELS, dtype=torch.float64) for _ in range(3)]
    (layers[0](own) * layers[1](own.exp()) + layers[2](own)).square().sum().backward()
    (alone[0](whole) * alone[1](whole.exp()) + alone[2](whole)).square().sum().backward()
    assert whole.grad is not None
    scale = whole.grad.abs().max()
    assert own.grad is not None
    close(own.grad / scale, mine(parts, whole.grad) / scale, 1e-12)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3)
        )
        self.shared = torch.nn.BatchNorm2d(4, momentum=None)
        self.head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3), torch.nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.shared(self.shared(self.features(x)).relu()))
        return result


def test_a_converted_model_trains_like_one_process() -> None:
    torch.manual_seed(3)
    alone = Net().double()
    together = hvd.convert_sync_batchnorm(copy.deepcopy(alone))
    assert sum(isinstance(layer, hvd.SyncBatchNorm) for layer in together.modules()) == 3
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (alone, together)]
    optimizers[1] = hvd.DistributedOptimizer(optimizers[1], named_parameters=together.named_parameters())
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        whole = torch.randn(hvd.size(), 3, 2, 6, 6, generator=generator, dtype=torch.float64)
        batches = (whole.flatten(0, 1), whole[hvd.rank()])
        for model, optimizer, x in zip((alone, together), optimizers, batches, strict=True):
            optimizer.zero_grad()
            model(x).cos().mean().backward()
            optimizer.step()
    for name, value in together.state_dict().items():
        close(value, alone.state_dict()[name], 1e-9)
