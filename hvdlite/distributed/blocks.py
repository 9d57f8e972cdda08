"""Tensors of torch.distributed's calls as contiguous memory, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from hvdlite.distributed.carrier import Part
from hvdlite.dtypes import DType
from hvdlite.memory.layout import Layout
from hvdlite.torch.tensor_view import check_memory


def block_of(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its history, where it lies contiguously on the host; else a contiguous copy.

    The result of a functional collective is waited for.

    Raises:
        ValueError: it is sparse or quantized, or has no memory.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"this call takes dense tensors, not {tensor.layout}; pass tensor.to_dense()")
    if tensor.is_quantized:  # only its integers would arrive, to be read by another scale
        raise ValueError("this call takes no quantized tensors; pass tensor.int_repr(), and its scales on their own")
    if type(tensor) is not torch.Tensor:
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        check_memory(tensor, "process group hvdlite")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg().contiguous()


def blocks_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`block_of` each."""
    return [block_of(tensor) for tensor in tensors]


def put_back(tensors: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]) -> None:
    """Give ``tensors`` the contents of their ``blocks``, which share their memory where they are contiguous."""
    for tensor, block in zip(tensors, blocks, strict=True):
        if tensor.data_ptr() != block.data_ptr():
            tensor.detach().copy_(block)


def part_of(block: torch.Tensor) -> Part:
    """All of it."""
    return block.data_ptr(), block.numel() * block.element_size()


def shares_of(block: torch.Tensor, sizes: Sequence[int]) -> list[Part]:
    """``block`` cut into parts of ``sizes`` bytes, in order."""
    address = block.data_ptr()
    parts = []
    for nbytes in sizes:
        parts.append((address, nbytes))
        address += nbytes
    return parts


def overlap(one: Part, other: Part) -> bool:
    """Whether they share memory."""
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


def is_in_the_way(part: Part, others: Sequence[Part], own: int) -> bool:
    """Whether ``part`` shares memory with one of ``others``; it may lie where number ``own`` does, as in place."""
    return any(
        overlap(part, other) and (place != own or other[0] != part[0]) for place, other in enumerate(others) if other[1]
    )


@lru_cache(maxsize=1024)
def layout_of(numels: tuple[int, ...], dtype: DType) -> Layout:
    """Of blocks of so many elements."""
    return Layout.of(list(numels), dtype, dtype)


def numel_of(block: torch.Tensor) -> int:
    """Elements as they are reduced: a complex one is two."""
    return 2 * block.numel() if block.is_complex() else block.numel()
