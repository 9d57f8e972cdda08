"""Whether all ranks have the same tensors, by checksums; and that of parameters, compared once, with the first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdlite import _native
from hvdlite.group import Group
from hvdlite.torch.allreduce import allreduce_
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.reduce_options import Max

_LOG = logging.getLogger("hvdlite")
_NAMED = 5  # of what differs
_LOWEST = torch.iinfo(torch.int64).min  # of Max, what a rank contributes that has joined


@dataclass(frozen=True)
class Differences:
    """What is not the same on all ranks.

    Attributes:
        places: of the first few, among all that were compared.
        count: of all.
        values: of each of ``places``, by rank; without ranks that have joined.
    """

    places: list[int]
    count: int
    values: list[dict[int, int]]


def find_differences(own: torch.Tensor, label: str, group: Group, process_set: ProcessSet) -> Differences | None:
    """Where ``own`` differs between ranks; None: nowhere. Collective over ``process_set``.

    One allreduce of 16 bytes per element; where ranks differ, a second one finds out who.

    Args:
        own: (n,) of int64 on the CPU; n is the same on all ranks.
        label: of the operations.
        group: that of ``process_set``.
    """
    highest, lowest = bounds = torch.stack([own, ~own])
    allreduce_(bounds, name=f"{label}.checksums", op=Max, process_set=process_set)
    differing = (highest != ~lowest).nonzero().flatten()
    if not differing.numel():
        return None
    named = differing[:_NAMED]
    table = torch.full((group.size, named.numel()), _LOWEST, device="cpu")
    table[group.rank] = own[named]
    allreduce_(table, name=f"{label}.ranks", op=Max, process_set=process_set)
    values = [
        {rank: value for rank, value in zip(group.ranks, column, strict=True) if value != _LOWEST}
        for column in table.T.tolist()
    ]
    return Differences(named.tolist(), differing.numel(), values)


def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(tensors,) of int64 on the CPU: of each the sum of its bits, which is the fastest there is."""
    blocks = [tensor.detach().contiguous() for tensor in tensors]
    on_host = [block for block in blocks if block.is_cpu]
    of_host = iter(_native.bit_sums([b.data_ptr() for b in on_host], [b.numel() * b.element_size() for b in on_host]))
    elsewhere = [block for block in blocks if not block.is_cpu]
    of_device = iter(torch.stack([_bit_sum(block) for block in elsewhere]).tolist() if elsewhere else [])
    return torch.tensor([next(of_host if b.is_cpu else of_device) for b in blocks], dtype=torch.int64, device="cpu")


def _bit_sum(block: torch.Tensor) -> torch.Tensor:
    """As `_native.bit_sums` has it, by torch."""
    data = block.flatten()
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()
    content = data.view(torch.uint8)
    whole = content.numel() // 8 * 8
    return content[:whole].view(torch.int64).sum() + content[whole:].sum(dtype=torch.int64)


def compare_parameters(
    named: Sequence[tuple[str, torch.Tensor]], label: str, group: Group, process_set: ProcessSet
) -> None:
    """Have the first rank warn where parameters differ between ranks. Collective over ``process_set``.

    That is no error, for a program may mean it.

    Args:
        label: of the operations.
        group: that of ``process_set``.
    """
    own = checksums([parameter for _, parameter in named])
    found = find_differences(own, label, group, process_set)
    if found is not None and group.rank == 0:
        _LOG.warning("%s", _message([named[place][0] for place in found.places], found, group.ranks[0]))


def _message(names: Sequence[str], found: Differences, first: int) -> str:
    """Which parameters differ from those of rank ``first``, and on which ranks."""
    parts = []
    for name, values in zip(names, found.values, strict=True):
        others = [rank for rank, value in values.items() if value != values.get(first)]
        parts.append(f"'{name}' of rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}")
    more = f" and {found.count - len(names)} more parameters" * (found.count > len(names))
    return (
        f"ranks begin to train with different parameters: {'; '.join(parts)}{more}, unlike rank {first}'s. Call "
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step, after loading checkpoints; "
        "and if there are several optimizers, step them in the same order on every rank."
    )
