"""Optimizers of parameters with the same names and shapes: only the order in which they were made tells them apart.

Ranks number optimizers as they come to reduce for the first time. Where they step two such twins in different orders,
gradients of one model would be averaged with those of the other, and nothing about an operation would show it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from hvdlite.errors import MismatchError
from hvdlite.group import Group
from hvdlite.rank_list import rank_list
from hvdlite.torch.alike import find_differences
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.same_parameters import identity_of

Named = Sequence[tuple[str, torch.Tensor]]


def check_order_of_twins(
    own: Named, optimizers: Callable[[], Sequence[Named]], label: str, group: Group, process_set: ProcessSet
) -> None:
    """See that all ranks have come to the same one of several twins. Collective over ``process_set``.

    Args:
        own: the parameters of the optimizer that reduces for the first time.
        optimizers: returns those of each optimizer of ``process_set`` that this rank has, in the order in which they
            were made.
        label: of the operations.
        group: that of ``process_set``.

    Raises:
        MismatchError: on every rank, if ranks have equally many twins and have come to different ones.
    """
    found = _different_places(own, optimizers(), label, group, process_set)
    if found is not None:
        for _ in range(2):  # some that are gone may still be counted, as what autograd keeps is collected later
            gc.collect()
        found = _different_places(own, optimizers(), label, group, process_set)
    if found is None:
        return
    places, count = found
    by_place: dict[int, list[int]] = {}
    for rank, theirs in places.items():
        by_place.setdefault(theirs, []).append(rank)
    who = " but ".join(f"number {theirs + 1} on {rank_list(ranks)}" for theirs, ranks in sorted(by_place.items()))
    raise MismatchError(
        f"{count} DistributedOptimizers have parameters of the same names and shapes, first '{own[0][0]}'. "
        f"The one that reduces first is {who}, in the order in which they were made, so gradients of one model would "
        "be averaged with those of another. Call backward() and step() for them in the same order on every rank."
    )


def _different_places(
    own: Named, optimizers: Sequence[Named], label: str, group: Group, process_set: ProcessSet
) -> tuple[dict[int, int], int] | None:
    """The place among its twins that each rank has come to, and how many there are; None where that is no mistake."""
    identity = identity_of(own)
    twins = [named for named in optimizers if identity_of(named) == identity]
    place = next(
        place for place, named in enumerate(twins) if all(a is b for (_, a), (_, b) in zip(named, own, strict=True))
    )
    found = find_differences(torch.tensor([place, len(twins)], device="cpu"), f"{label}.twins", group, process_set)
    # A rank may have more of them than others, as a copy of an optimizer for a checkpoint: their places say nothing.
    return None if found is None or found.places != [0] else (found.values[0], len(twins))
