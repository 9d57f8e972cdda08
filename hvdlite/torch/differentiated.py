"""Whether autograd has to see an operation; what it need not see is done without it, which takes 10 us less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad


def has_tangents() -> bool:
    """Whether a tensor may have one: inside `torch.autograd.forward_ad.dual_level` and `torch.func.jvp`."""
    return forward_ad._current_level >= 0


def is_differentiated(tensor: object) -> bool:
    """Whether a gradient that goes through ``tensor`` may be asked for, or a tangent; or `torch.func` is at work."""
    if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
        return True
    return has_tangents() or torch._C._are_functorch_transforms_active()


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function`` of ``arguments``, through autograd only where that has to see one of them."""
    if any(map(is_differentiated, arguments)):
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    return function.forward(*arguments)


def applied_to_tangents(
    function: type[torch.autograd.Function], arguments: Sequence[Any], tangents: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """``function`` of ``arguments`` and of those ``tangents`` that there are: tensors of integers have none."""
    results = iter(function.apply(*arguments, *(tangent for tangent in tangents if tangent is not None)))  # type: ignore[no-untyped-call]
    return tuple(None if tangent is None else next(results) for tangent in tangents)
