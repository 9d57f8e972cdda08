"""Whether all ranks have built the same model, by names, shapes and dtypes of its parameters.

Whoever finds that they have not, as models of more or fewer layers, asks all ranks for these, and names the first that
differs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from hvdlite.dtypes import ReduceOp, Reduction
from hvdlite.errors import MismatchError
from hvdlite.group import Group
from hvdlite.operations.prepared_allreduce import allreduce_now
from hvdlite.rank_list import rank_list
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.start import start_allgather
from hvdlite.torch.tensor_view import views_of


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
        found = first_difference(named, f"{label}.parameters", process_set)
        raise MismatchError(f"the optimizers of the ranks have different parameters: {found or error}") from None


class Kind(NamedTuple):
    """What of a tensor programs build alike on every rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool  # has requires_grad, where that is asked for


def _kind_of(name: str, tensor: torch.Tensor, *, in_training: bool = False) -> Kind:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Kind(name, tuple(tensor.shape), dtype, in_training and tensor.requires_grad)


def identity_of(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """The same for tensors of the same names, shapes and dtypes, in the same order."""
    kinds = [_kind_of(name, tensor) for name, tensor in named]
    return f"{zlib.crc32(repr(kinds).encode(errors='replace')):08x}"


def first_difference(
    named: Sequence[tuple[str, torch.Tensor]], name: str, process_set: ProcessSet, *, in_training: bool = False
) -> str | None:
    """In which of ``named`` ranks differ first, and what to do, in a sentence; None: in none. Collective.

    Args:
        name: of the operation.
        in_training: that some are frozen on some ranks only is a difference as well.
    """
    kinds = [_kind_of(*entry, in_training=in_training) for entry in named]
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
