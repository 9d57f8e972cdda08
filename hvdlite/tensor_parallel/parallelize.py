"""Replace layers of a model by their parallel forms, by the names of their modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from hvdlite.tensor_parallel.team import Team

M = TypeVar("M", bound=nn.Module)

Split = Callable[[Any, Team], nn.Module]
"""This rank's part of a module, such as `ColumnParallelLinear.split`, perhaps with options by `functools.partial`."""


def parallelize(model: M, plan: Mapping[str, Split], team: Team) -> M:
    """Replace layers of ``model`` in place; every rank of ``team`` has the same model, with the same weights::

        tp.parallelize(model, {
            "layers.*.fc1": tp.ColumnParallelLinear.split,
            "layers.*.fc2": tp.RowParallelLinear.split,
            "layers.*.qkv": functools.partial(tp.ColumnParallelLinear.split, blocks=3),
        }, team)

    Args:
        plan: patterns of names of modules, as in shells (``*`` matches dots as well), and what makes a part of such a
            module.

    Returns:
        ``model``. Parameters that several modules share, such as those of an embedding and a head, stay shared.

    Raises:
        ValueError: a pattern matches no module, or several match the same one; a layer cannot be divided; or of modules
            that share a parameter only some are split. The model is as it was.
    """
    chosen: dict[str, tuple[str, Split]] = {}
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern, split in plan.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(f"no module of the model matches {pattern!r}; there are {', '.join(names) or 'none'}")
        for name in matching:
            if name in chosen:
                raise ValueError(f"module {name!r} matches both {chosen[name][0]!r} and {pattern!r}; let one match")
            chosen[name] = pattern, split
    made: dict[tuple[int, Split], nn.Module] = {}  # one part of a module that has several names
    parts: dict[str, nn.Module] = {}
    for name, (_, split) in chosen.items():
        module = model.get_submodule(name)
        if (id(module), split) not in made:
            made[id(module), split] = split(module, team)
        parts[name] = made[id(module), split]
    _keep_ties(model, parts)
    for name, part in parts.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, part)
    return model


def _keep_ties(model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Let ``parts`` share parameters where the modules whose place they take do."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        places = [(module, own) for module, _, own in (name.rpartition(".") for name in names) if module in parts]
        if len(names) == 1 or not places:
            continue
        shared = [parts[module].get_parameter(own) for module, own in places]
        if len(shared) < len(names) or any(not torch.equal(other, shared[0]) for other in shared):
            raise ValueError(f"{' and '.join(names)} are one parameter; split all of their modules alike, or none")
        for module, own in places:
            parts[module].register_parameter(own, shared[0])
