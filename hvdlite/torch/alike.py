"""Whether all ranks have the same tensors, by checksums; and that of parameters, compared once, with the first step.

What ranks have built by different programs, such as models of more or fewer layers, is told apart by names, shapes and
dtypes; whoever finds that it differs asks all ranks for these, and names the first that does.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch

from hvdlite import _native
from hvdlite.dtypes import ReduceOp, Reduction
from hvdlite.errors import MismatchError
from hvdlite.group import Group
from hvdlite.operations.prepared_allreduce import allreduce_now
from hvdlite.rank_list import rank_list
from hvdlite.torch.allreduce import allreduce_
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.reduce_options import Max
from hvdlite.torch.start import start_allgather
from hvdlite.torch.tensor_view import views_of

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


def check_same_parameters(
    named: Sequence[tuple[str, torch.Tensor]], label: str, group: Group, process_set: ProcessSet
) -> None:
    """See that names, shapes and dtypes are the same on all ranks. Collective over ``process_set``.

    Args:
        label: of the operations.
        group: that of ``process_set``.

    Raises:
        MismatchError: on every rank, if they are not; names the first that differs.
    """
    same = views_of((torch.zeros(1, dtype=torch.uint8, device="cpu"),))
    names = [f"parameters {identity_of(named)}"]
    try:
        allreduce_now(group, same, same, Reduction(ReduceOp.MAX), name=f"{label}.same", names=names).wait()
    except MismatchError as error:
        plain = [(name, tensor.detach()) for name, tensor in named]  # some may be frozen on some ranks only
        found = first_difference(plain, f"{label}.parameters", process_set)
        raise MismatchError(f"the optimizers of the ranks have different parameters: {found or error}") from None


class Kind(NamedTuple):
    """What of a tensor programs build alike on every rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool  # has requires_grad


def _kind_of(name: str, tensor: torch.Tensor) -> Kind:
    return Kind(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)


def identity_of(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """The same for tensors of the same names, shapes and dtypes, in the same order."""
    kinds = [_kind_of(name, tensor)[:-1] for name, tensor in named]
    return f"{zlib.crc32(repr(kinds).encode(errors='replace')):08x}"


def first_difference(named: Sequence[tuple[str, torch.Tensor]], name: str, process_set: ProcessSet) -> str | None:
    """In which of ``named`` ranks differ first, and what to do, in a sentence; None: in none. Collective.

    Args:
        name: of the operation.
    """
    kinds = [_kind_of(*entry) for entry in named]
    line = json.dumps([process_set.ranks[process_set.rank()], kinds]) + "\n"
    own = torch.frombuffer(bytearray(line.encode()), dtype=torch.uint8)
    gathered = start_allgather([own], name, process_set, grouped=False, needs_all=False).synchronize()[0]
    told = map(json.loads, gathered.numpy().tobytes().decode().splitlines())
    return difference_of({rank: [Kind(a, tuple(b), c, d) for a, b, c, d in kinds] for rank, kinds in told})


def difference_of(by_rank: Mapping[int, Sequence[Kind]]) -> str | None:
    """`first_difference`, of what all ranks have."""
    build = (
        "Build the same model on every rank: what decides about it (arguments, a configuration file, the classes or "
        "words in the data, a checkpoint that was found) is not the same there"
    )
    for place, kinds in enumerate(zip_longest(*by_rank.values())):
        present = [kind for kind in kinds if kind is not None]
        names = [f"'{kind.name}'" if kind else f"missing (there are {place})" for kind in kinds]
        if len(set(names)) > 1:
            order = "; and if there are several models or optimizers, use them in the same order"
            return f"number {place + 1} of them is {_by_value(by_rank, names)}. {build}{order}."
        for what, values, advice in (
            ("has shape", [str(kind.shape) for kind in present], build),
            ("is of", [kind.dtype for kind in present], "Convert it to the same dtype on every rank"),
            (
                "is",
                ["trained" if kind.is_trained else "frozen" for kind in present],
                "Call requires_grad_() on all ranks alike",
            ),
        ):
            if len(set(values)) > 1:
                return f"{names[0]} {what} {_by_value(by_rank, values)}. {advice}."
    return None


def _by_value(ranks: Iterable[int], values: Sequence[str]) -> str:
    """Which of ``ranks`` has which of ``values``: "(5,) on ranks 0 and 2 but (7,) on rank 1"."""
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        by_value.setdefault(value, []).append(rank)
    return " but ".join(f"{value} on {rank_list(which)}" for value, which in by_value.items())


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
