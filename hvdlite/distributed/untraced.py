"""torch.compile leaves alone what C++ calls while a compiled program runs, as that of DistributedDataParallel does."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from hvdlite_torch_backend import run_as_it_is

Class = TypeVar("Class", bound=type)


def untraced(kind: Class) -> Class:
    """A class whose methods, and what they call, are run as they are; for nothing where no program is compiled."""
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            run_as_it_is(member)
    return kind
