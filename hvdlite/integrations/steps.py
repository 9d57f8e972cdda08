"""What the integrations share: models that start alike everywhere, and gradients that are averaged after backward.

A training library calls step() itself, and clips or looks at gradients before it. So its optimizers are synchronized as
soon as backward has ended; step() does so only where no backward pass came before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch

import hvdlite.torch as hvd


def broadcast_model(model: torch.nn.Module) -> None:
    """Overwrite parameters and buffers with those of rank 0. Collective."""
    named = chain(model.named_parameters(), model.named_buffers())
    hvd.broadcast_parameters([(name, tensor.detach()) for name, tensor in named], root_rank=0)


def make_distributed(optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module], **options: Any) -> Any:
    """`hvdlite.torch.DistributedOptimizer` of ``optimizer``, with names for messages, that synchronizes once per step.

    One that is a DistributedOptimizer already keeps its options.

    Args:
        models: whose parameters have names. Without names for all parameters of ``optimizer``, they are numbered.
        options: of `hvdlite.torch.DistributedOptimizer`.
    """
    if not isinstance(optimizer, hvd.DistributedOptimizer):
        optimizer = hvd.DistributedOptimizer(optimizer, _named_parameters(optimizer, models), **options)
    optimizer.synchronizes_once = True
    return optimizer


def _named_parameters(
    optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module]
) -> Iterable[tuple[str, torch.Tensor]] | None:
    names: dict[str, torch.Tensor] = {}
    for number, model in enumerate(models):
        prefix = f"model{number}" if number else ""
        names.update(model.named_parameters(prefix=prefix))
    known = {id(parameter) for parameter in names.values()}
    complete = all(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"])
    return names.items() if complete else None


def synchronize_pending(optimizers: Iterable[hvd.DistributedOptimizer]) -> None:
    """After a backward pass: wait for those optimizers of which it had gradients."""
    for optimizer in optimizers:
        optimizer.synchronize_pending()


@contextmanager
def no_sync(optimizers: Iterable[hvd.DistributedOptimizer]) -> Iterator[None]:
    """`hvdlite.torch.DistributedOptimizer.no_sync` of all ``optimizers``."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.no_sync())
        yield
