"""Replace layers of a model by their parallel forms, by the names of their modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

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
        ``model``.

    Raises:
        ValueError: a pattern matches no module, or several match the same one; or a layer cannot be divided. The model
            is as it was.
    """
    chosen: dict[str, tuple[str, Split]] = {}
    names = [name for name, _ in model.named_modules() if name]
    for pattern, split in plan.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(f"no module of the model matches {pattern!r}; there are {', '.join(names) or 'none'}")
        for name in matching:
            if name in chosen:
                raise ValueError(f"module {name!r} matches both {chosen[name][0]!r} and {pattern!r}; let one match")
            chosen[name] = pattern, split
    parts = {name: split(model.get_submodule(name), team) for name, (_, split) in chosen.items()}
    for name, part in parts.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, part)
    return model
