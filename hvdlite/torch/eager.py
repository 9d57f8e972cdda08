"""Functions that a compiled graph cannot hold, since they communicate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo import eval_frame
from torch.compiler import disable, is_dynamo_compiling

P = ParamSpec("P")
R = TypeVar("R")

_callback: Callable[[], object] = getattr(eval_frame, "get_eval_frame_callback", lambda: None)  # torch 2.6 and later
"""What compiles the functions that are called; None while nothing does."""


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, between two graphs where `torch.compile` comes upon it."""

    @functools.cache
    def disabled() -> Callable[P, R]:
        # To disable the compiler imports it, for which only those wait who compile.
        return disable(function)  # type: ignore[no-untyped-call, no-any-return]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            return disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call, no-any-return]
        # A hook that is called in a compiled program, for example, is no part of a graph, but what it calls would be.
        run = function if _callback() is None else disabled()
        return run(*args, **kwargs)

    return call
