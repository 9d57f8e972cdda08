"""What an operation of torch does to its arguments, by its schema; see cuda_torch.py."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_UNMARKED_VIEWS = {_aten._unsafe_view.default, _aten._reshape_alias.default}


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def tensors_of(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves((args, kwargs)) if is_tensor(value)]


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
