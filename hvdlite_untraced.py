"""What torch.compile leaves alone: it runs as it is, and so does what it calls.

A module of its own beside hvdlite, since hvdlite_torch_backend needs it in every process that imports torch.
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def run_as_it_is(function: Any) -> Any:
    """``function``: where a compiled program calls it, torch.compile leaves it alone, and what it calls."""
    eval_frame = import_module("torch._C._dynamo.eval_frame")
    if hasattr(eval_frame, "set_code_exec_strategy"):  # from torch 2.7 on
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def untraced(kind: Class) -> Class:
    """A class whose methods are such functions: C++ calls them while a compiled program runs, as that of
    DistributedDataParallel does. For nothing where no program is compiled.

    A call in the program ends a graph, as one of torch's own C++ does. Traced along with the program, what another
    thread changes would be a constant: a loop until a work is done would never end.
    """
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            run_as_it_is(member)
            member._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable says it
    return kind
