"""Whether autograd has to see an operation; what it need not see is done without it, which takes 10 us less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from hvdlite.errors import UsageError

OUTSIDE_OF_VMAP = (
    "call hvd outside of torch.func.vmap, on the whole batch; torch.func.jacrev needs no vmap with chunk_size=1"
)


class DifferentiableOperation(torch.autograd.Function):
    """An operation between ranks as autograd sees it."""

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        """Raises:
        UsageError: always, as ranks know nothing of one another's batches.
        """
        raise UsageError(f"torch maps over an operation between ranks, as vmap and jacfwd do; {OUTSIDE_OF_VMAP}")


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
