"""n ranks with batch b train the model that one process trains with batch n * b, and all ranks hold the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.not_with_one_rank,  # its optimizer leaves gradients to torch
    pytest.mark.up_to_three_ranks,
    pytest.mark.usefixtures("running"),
]

STEPS = 20
BATCH = 4  # per rank and pass


class Net(torch.nn.Module):
    """Convolution, attention, an embedding, layers that share a weight, one that is used in odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.embedding = torch.nn.Embedding(11, 8)
        self.wide = torch.nn.Linear(8, 4000)
        self.narrow = torch.nn.Linear(4000, 11)
        self.odd = torch.nn.Linear(8, 8)
        self.tied = torch.nn.Linear(8, 11, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, words: torch.Tensor, step: int) -> torch.Tensor:
        tokens = self.conv(x).flatten(2).transpose(1, 2) + self.embedding(words).mean(1, keepdim=True)
        tokens, _ = self.attention(tokens, tokens, tokens)
        pooled = tokens.mean(1)
        if step % 2:
            pooled = pooled + self.odd(pooled)
        result: torch.Tensor = self.narrow(torch.tanh(self.wide(pooled))) + self.tied(pooled)
        return result


def data(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The batch of a rank in a pass; any rank can build it."""
    generator = torch.Generator().manual_seed(step * 1000 + micro * 100 + rank)
    x = torch.randn(BATCH, 3, 5, 5, generator=generator, dtype=torch.float64)
    words = torch.randint(11, (BATCH, 6), generator=generator)
    return x, words, torch.randint(11, (BATCH,), generator=generator)


def loss(model: Net, step: int, batches: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    x, words, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return torch.nn.functional.cross_entropy(model(x.to(model.conv.weight.dtype), words, step), y)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=2e-3, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
}
ACCUMULATION = ["none", "passes", "no_sync", "in place"]


def train_alone(make: Callable[[Any], torch.optim.Optimizer], clip: bool, passes: int, dtype: torch.dtype) -> Net:
    torch.manual_seed(1)
    model = Net().to(dtype)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)  # unused parameters step with zeros, as in the distributed run
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for micro in range(passes):
            batches = [data(step, micro, rank) for rank in range(hvd.size())]
            (loss(model, step, batches) / passes).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        scheduler.step()
    return model


def train_together(
    make: Callable[[Any], torch.optim.Optimizer], clip: bool, accumulation: str, dtype: torch.dtype, **arguments: Any
) -> Net:
    torch.manual_seed(1 + hvd.rank())
    model = Net().to(dtype)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    passes = 1 if accumulation == "none" else 3
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes if accumulation in ("passes", "in place") else 1,
        **arguments,
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=accumulation != "in place")
        for micro in range(passes):
            value = loss(model, step, [data(step, micro, hvd.rank())]) / passes
            if accumulation == "no_sync" and micro < passes - 1:
                with optimizer.no_sync():
                    value.backward()
            else:
                value.backward()
        if hvd.size() == 1:
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if clip:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        scheduler.step()
        assert_same_bits(model)
    return model


def assert_same_bits(model: Net) -> None:
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = hvd.allgather(mine.unsqueeze(0))
    assert torch.equal(others, mine.expand_as(others))


def assert_close(a: Net, b: Net, rtol: float) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        difference = (p - q).abs().max().item()
        assert math.isfinite(difference)
        assert difference <= rtol * q.abs().max().item(), (name, difference)


@pytest.mark.parametrize(
    ("name", "clip", "accumulation"),
    [
        (name, bool((i + j) % 2), accumulation)  # so that any two of them come together
        for i, name in enumerate(OPTIMIZERS)
        for j, accumulation in enumerate(ACCUMULATION)
    ],
)
def test_equivalence(name: str, clip: bool, accumulation: str) -> None:
    """In fp64, where rounding is far below what a wrong gradient would do."""
    together = train_together(OPTIMIZERS[name], clip, accumulation, torch.float64)
    alone = train_alone(OPTIMIZERS[name], clip, 1 if accumulation == "none" else 3, torch.float64)
    assert_close(together, alone, 1e-9)


@pytest.mark.not_with_three_ranks
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_predivide_factor": 2.0},
        {"groups": 3},
        {"compression": hvd.Compression.bf16},
        {"compression": hvd.Compression.fp16},
    ],
    ids=["plain", "predivide", "groups", "bf16", "fp16"],
)
def test_equivalence_in_fp32(arguments: dict[str, Any]) -> None:
    make = OPTIMIZERS["SGD with momentum"]
    together = train_together(make, True, "none", torch.float32, **arguments)
    alone = train_alone(make, True, 1, torch.float32)
    assert_close(together, alone, 5e-2 if "compression" in arguments else 1e-3)
