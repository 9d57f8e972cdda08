"""torch.compile leaves alone what C++ calls while a compiled program runs, as that of DistributedDataParallel does."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

Class = TypeVar("Class", bound=type)


def untraced(kind: Class) -> Class:
    """A class whose methods, and what they call, are run as they are; for nothing where no program is compiled."""
    if hasattr(eval_frame, "set_code_exec_strategy"):  # from torch 2.7 on
        skip = eval_frame._FrameAction.SKIP
        for member in vars(kind).values():
            if isinstance(member, FunctionType):
                eval_frame.set_code_exec_strategy(member.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return kind
