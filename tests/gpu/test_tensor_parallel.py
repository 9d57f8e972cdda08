"""Layers that are split between the GPUs of ranks, beside the unsplit ones on each of them: forward and backward.

By every method, on one GPU that ranks share or on several. The simulated driver runs the same, with torch on it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
from gpu_lab import IS_SIMULATED, Gpu

# Of the thread of backward, when torch multiplies there for the first time.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
METHODS = ["auto", "ring_exchange", "pipeline", "bulk", "multicast", "unfused"]
SCALE = 1 if IS_SIMULATED else 16  # of the widths: more than a tile of a GPU's matmul
FEATURES, HIDDEN = 24 * SCALE, 48 * SCALE
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Products in float32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def where(gpu: Gpu) -> Iterator[torch.device]:
    """This rank's GPU, on which torch works."""
    if not IS_SIMULATED:
        yield gpu.where
        return
    from cuda_lab import simulated_for
    from cuda_torch import TorchOnGpu

    cuda = simulated_for(hvd.rank())
    with cuda.current(), TorchOnGpu(cuda).in_hvdlite():
        yield torch.device("cuda", hvd.rank())


@pytest.fixture(scope="module", params=METHODS)
def team(request: pytest.FixtureRequest, running: None) -> tp.Team:
    return tp.init(hvd.size(), method=request.param).tp


def late(where: torch.device) -> None:
    """What is enqueued next comes some milliseconds later, on one rank after the other."""
    if not IS_SIMULATED:  # there kernels come late anyway
        torch.cuda._sleep(5_000_000 * (1 + hvd.rank() % 2))


def close(found: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> None:
    """Compared with the largest element: what was added up in another order differs in small ones."""
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    wanted = expected.detach().float().cpu()
    atol = tolerance * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.detach().float().cpu(), wanted, rtol=tolerance, atol=atol)


def part(whole: torch.Tensor, team: tp.Team, dim: int) -> torch.Tensor:
    return whole.chunk(team.size, dim)[team.rank]


Call = Callable[[tp.Team, torch.Tensor, torch.Tensor], torch.Tensor]
# Which dimension of x, of the weight and of the result is split; -2 stands for rows, None for none.
FUNCTIONS: dict[str, tuple[Call, tuple[int | None, int | None, int | None]]] = {
    "all_gather_matmul": (lambda team, x, w: tp.all_gather_matmul(x, w, team), (0, 1, 1)),
    "matmul_reduce_scatter": (lambda team, x, w: tp.matmul_reduce_scatter(x, w, team), (1, 0, 0)),
    "replicated_matmul": (lambda team, x, w: tp.replicated_matmul(x, w, team), (None, 1, 1)),
    "matmul_all_reduce": (lambda team, x, w: tp.matmul_all_reduce(x, w, team), (1, 0, None)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(team: tp.Team, where: torch.device, function: str, dtype: torch.dtype) -> None:
    """And their gradients; several times, since windows are used in turns."""
    call, split = FUNCTIONS[function]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        shapes = (16 * team.size, FEATURES), (FEATURES, HIDDEN), (16 * team.size, HIDDEN)
        x, weight, upstream = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
        wholes = [tensor.to(where).requires_grad_() for tensor in (x, weight)]
        expected = wholes[0] @ wholes[1]
        expected.backward(upstream.to(where))
        own = [
            (whole.detach() if dim is None else part(whole.detach(), team, dim)).clone().requires_grad_()
            for whole, dim in zip(wholes, split, strict=False)
        ]
        late(where)
        found = call(team, *own)
        _, _, dim = split
        found.backward((upstream if dim is None else part(upstream, team, dim)).to(where))
        tolerance = TOLERANCE[dtype]
        close(found, expected if dim is None else part(expected, team, dim), tolerance)
        for own_part, whole, axis in zip(own, wholes, split, strict=False):
            assert whole.grad is not None
            close(own_part.grad, whole.grad if axis is None else part(whole.grad, team, axis), tolerance)


def unsplit(where: torch.device, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, FEATURES))
    return model.to(dtype).to(where)


def split(model: nn.Module, team: tp.Team, sequence_parallel: bool) -> nn.Module:
    column, row = (
        partial(kind.split, sequence_parallel=sequence_parallel)
        for kind in (tp.ColumnParallelLinear, tp.RowParallelLinear)
    )
    return tp.parallelize(copy.deepcopy(model), {"0": column, "2": row}, team)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "rows"])
@pytest.mark.parametrize(
    ("dtype", "cast"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)],
    ids=["float32", "bfloat16", "autocast"],
)
def test_layers(
    team: tp.Team, where: torch.device, dtype: torch.dtype, cast: torch.dtype | None, sequence_parallel: bool
) -> None:
    model = unsplit(where, dtype)
    parts = split(model, team, sequence_parallel)
    tolerance = TOLERANCE[cast or dtype]
    whole = torch.randn(16 * team.size, FEATURES, generator=torch.Generator().manual_seed(4)).to(dtype).to(where)
    own = part(whole, team, 0).clone() if sequence_parallel else whole.clone()
    whole.requires_grad_(), own.requires_grad_()
    with torch.autocast("cuda", dtype=cast or torch.bfloat16, enabled=cast is not None):
        expected = model(whole)
        late(where)
        found = parts(own)
    assert found.dtype is expected.dtype is (cast or dtype)
    functional.mse_loss(expected.float(), whole.detach().float(), reduction="sum").backward()
    functional.mse_loss(found.float(), own.detach().float(), reduction="sum").backward()
    close(found, part(expected, team, 0) if sequence_parallel else expected, tolerance)
    assert whole.grad is not None
    close(own.grad, part(whole.grad, team, 0) if sequence_parallel else whole.grad, tolerance)
    for name, dim in {"0.weight": 0, "0.bias": 0, "2.weight": 1}.items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        close(parts.get_parameter(name).grad, part(gradient, team, dim), tolerance)
    close(parts.get_parameter("2.bias").grad, model.get_parameter("2.bias").grad, tolerance)


def test_training(team: tp.Team, where: torch.device) -> None:
    """Losses of a few steps, each on memory that torch hands out again."""
    model = unsplit(where, torch.float32)
    parts = split(model, team, True)
    losses = []
    for network, rows in ((model, lambda x: x), (parts, lambda x: part(x, team, 0))):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05 / SCALE)
        found = []
        for step in range(4):
            x = torch.randn(16 * team.size, FEATURES, generator=torch.Generator().manual_seed(step)).to(where)
            optimizer.zero_grad()
            loss = functional.mse_loss(network(rows(x)), rows(x), reduction="sum") / len(x)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    total = losses[1] if team.size == 1 else hvd.allreduce(losses[1], op=hvd.Sum)
    close(total, losses[0], 1e-3)
    assert losses[0][-1].item() < losses[0][0].item()


def test_windows_that_grow(team: tp.Team, where: torch.device) -> None:
    """What was gathered is read at the end; memory of earlier windows goes when nobody needs it."""
    gathered = []
    for rows in (1, 300 * SCALE, 7, 3000 * SCALE, 2):
        late(where)
        own = torch.full((rows, 40), float(team.rank + rows), device=where)
        gathered.append((rows, tp.gather_rows(own, team).clone()))
    for rows, whole in gathered:
        wanted = torch.arange(team.size).repeat_interleave(rows).float() + rows
        assert torch.equal(whole[:, 0].cpu(), wanted)
        assert bool((whole == whole[:, :1]).all())


def test_multicast_that_the_gpus_have_does_what_it_says(where: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """Patterns that do not arrive are a warning; GPUs without it are none."""
    with caplog.at_level(logging.INFO, "hvdlite"):
        tp.gather_rows(torch.ones(2, 40, device=where), tp.Team())
    said = [record for record in caplog.records if "multicast" in record.message]
    assert len(said) == (hvd.size() > 1 and hvd.rank() == 0 and "do not reach" not in caplog.text)
    print(*(record.message for record in said))  # for the log of run.sh
    assert all(record.levelno == logging.INFO for record in said), caplog.text
