"""Two ways to hear that autograd has accumulated into a parameter: for good, and for now.

torch calls into Python for every parameter that has once had a hook, also when it was removed: 0.7 us, where a hook
takes 0.9. A hook of the node that accumulates, which torch makes again as soon as nobody holds it, leaves nothing
behind, and takes 1.5 us; but it is lost if the parameter is converted to another dtype or device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge


class Hook(Protocol):
    """What a parameter has."""

    def remove(self) -> None: ...


def hook_for_good(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Hook:
    """Have ``hook`` called with the parameter."""
    with _switched_on(parameter):
        handle: Hook = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle


class HookForNow:
    """Has ``hook`` called with the parameter, and leaves nothing behind once it is removed and dropped.

    Also in the middle of a backward pass, but not while another hook of this parameter runs: torch walks along them.
    """

    def __init__(self, parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        def call(*_: Any) -> None:
            hook(parameter)

        with _switched_on(parameter), torch.enable_grad():  # which a backward pass switches off
            self._node: Any = get_gradient_edge(parameter).node
        self._handle = self._node.register_hook(call)

    def remove(self) -> None:
        self._handle.remove()


@contextmanager
def _switched_on(parameter: torch.Tensor) -> Iterator[None]:
    """torch refuses hooks otherwise, and keeps them when ``requires_grad`` is switched off."""
    before = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(before)
