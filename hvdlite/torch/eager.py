"""Functions that a compiled graph cannot hold, since they communicate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, between two graphs where `torch.compile` comes upon it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # To disable the compiler imports it, for which only those wait who compile.
        run = function
        if torch.compiler.is_compiling():
            run = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return run(*args, **kwargs)

    return call
