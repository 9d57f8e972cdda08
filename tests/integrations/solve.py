"""What one process that has the whole batch comes to, with torch alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from small_problem import ROWS, Rows, flat, loss_of, network

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(size: int, epochs: int, *, shuffle: bool = True) -> Iterator[Batch]:
    """What all ranks together have in each step; shuffled as DistributedSampler does."""
    rows = Rows()
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(ROWS, generator=generator) if shuffle else torch.arange(ROWS)
        for part in order.split(size):
            yield rows.x[part], rows.y[part]


def solve(
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    size: int = 8,
    epochs: int = 2,
    clip: float | None = None,
    skip: int | None = None,
    batch_norm: bool = False,
    shuffle: bool = True,
) -> list[float]:
    """The state of the model after one step per batch of ``size``; step ``skip`` is not taken."""
    model = network(batch_norm=batch_norm)
    optimizer = make(model.parameters())
    for step, batch in enumerate(batches(size, epochs, shuffle=shuffle)):

        def closure(batch: Batch = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        if step != skip:
            optimizer.step(closure)
    return flat(model)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def results_of(stdout: str) -> Any:
    """What a job has printed."""
    lines = [line.removeprefix("RESULTS ") for line in stdout.splitlines() if line.startswith("RESULTS ")]
    assert len(lines) == 1, stdout
    return json.loads(lines[0])
