"""A call of torch's ProcessGroup, in any form that torch knows; it goes to whoever has the tensors of its device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])

_OTHER_NAMES = {  # of torch before 2.13
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def torch_call(*arguments: str) -> Callable[[Method], Method]:
    """For methods of a process group whose first arguments are tensors.

    Args:
        arguments: what torch calls each of the method's, as "opts|root" where it has a form for either.
    """

    def decorated(method: Method) -> Method:
        name = method.__name__
        own = [*signature(method).parameters][1:]
        assert len(own) == len(arguments), name
        names = {theirs: ours for ours, each in zip(own, arguments, strict=True) for theirs in each.split("|")}

        @wraps(method)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            first = _first_tensor(*given[:2], *named.values())
            if first is not None and not first.is_cpu:
                group = self.other_devices.group_of(first.device, self)
                if group is not None:
                    return getattr(group, name if hasattr(group, name) else _OTHER_NAMES[name])(*given, **named)
            if named:
                named = {names.get(theirs, theirs): value for theirs, value in named.items()}
            return method(self, *given, **named)

        return cast(Method, call)

    return decorated


def _first_tensor(*arguments: Any) -> torch.Tensor | None:
    for found in arguments:
        while isinstance(found, (list, tuple)) and found:
            found = found[0]
        if isinstance(found, torch.Tensor):
            return found
    return None
