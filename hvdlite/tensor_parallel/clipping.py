"""Gradient clipping by the norm that the unsplit model would have."""

from __future__ import annotations

import torch
from torch import nn

from hvdlite.tensor_parallel.moves import sum_over_ranks
from hvdlite.tensor_parallel.split_module import split_parameters
from hvdlite.tensor_parallel.team import Team


def clip_grad_norm_(model: nn.Module, max_norm: float, team: Team) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` of a model with split layers; after backward, or ``optimizer.synchronize()``.

    Gradients of split parameters count on every rank, the others, which are equal on every rank, once.

    Returns:
        The 2-norm of all gradients of the unsplit model, before clipping; equal on every rank.

    Raises:
        MismatchError, CollectiveError: as `all_gather_matmul`.
    """
    splits = split_parameters(model)
    split = {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in splits}
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    own, common = (torch.zeros(1, dtype=torch.float64, device=device) for _ in range(2))
    with_gradient = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in with_gradient:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        square = torch.linalg.vector_norm(parameter.grad, dtype=wide).double().square()
        (own if id(parameter) in split else common).add_(square)
    norm = (sum_over_ranks(team.carrier_for(own), "clip_grad_norm_", own) + common).sqrt().squeeze(0)
    factor = max_norm / (norm + 1e-6)  # as torch does
    if not factor >= 1:  # also where it is NaN, which all gradients then are, as torch's
        for parameter in with_gradient:
            assert parameter.grad is not None
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return norm
