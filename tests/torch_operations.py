"""What an operation of torch does to its arguments, by its schema; see cuda_torch.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

_aten = torch.ops.aten
_UNMARKED_VIEWS = {_aten._unsafe_view.default, _aten._reshape_alias.default}


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """As torch's tree_map, for the containers of schemas alone: torch's took a quarter of an operation's time."""
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(function, part) for part in value])
    if isinstance(value, dict):
        return {key: mapped(function, part) for key, part in value.items()}
    return function(value)


def leaves_of(value: Any) -> Iterator[Any]:
    """What `mapped` calls its function for."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from leaves_of(part)
    elif isinstance(value, dict):
        yield from leaves_of(tuple(value.values()))
    else:
        yield value


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if is_tensor(leaf)]


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which it does not keep alive."""
    storage = tensor.untyped_storage()
    memory = (ctypes.c_char * max(storage.nbytes(), 1)).from_address(storage.data_ptr())
    bytes_there = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    with torch.no_grad():
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(bytes_there, *place)


def as_meta(value: Any) -> Any:
    if not is_tensor(value):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@cache
def is_view(operation: Any) -> bool:
    made = operation._schema.returns
    return (
        operation in _UNMARKED_VIEWS
        or torch.Tag.inplace_view in operation.tags
        or (bool(made) and all(x.alias_info is not None and not x.alias_info.is_write for x in made))
    )


def written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation returns that writes to its arguments."""
    named = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | kwargs
    targets = tuple(
        named[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return None if not schema.returns else targets[0] if len(schema.returns) == 1 else targets
