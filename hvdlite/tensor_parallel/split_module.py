"""Layers whose parameters are parts of another layer's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hvdlite.tensor_parallel.part import Part
from hvdlite.tensor_parallel.team import Team


class SplitModule(nn.Module):
    """A layer of which every rank of ``team`` holds a part.

    Attributes:
        parts: of the parameters that are split, by name; the others are equal on every rank.
    """

    def __init__(self, team: Team, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self.team = team
        self.parts = dict(parts)

    def take_part_of(self, whole: nn.Module) -> None:
        """Hold this rank's part of the parameters of ``whole``, as copies.

        Raises:
            ValueError: they cannot be divided among the ranks; or ``whole`` has others than this layer, as one whose
                weight is parametrized.
        """
        own_names = {name for name, _ in self.named_parameters()}  # none in a layer that is being made
        names = {name for name, _ in (*whole.named_parameters(), *whole.named_buffers())}
        if own_names and names != own_names:
            raise ValueError(
                f"a {type(whole).__name__} with {', '.join(sorted(names))} cannot be split: a {type(self).__name__} "
                f"has {', '.join(sorted(own_names))}. Remove parametrizations, pruning and adapters before."
            )
        for name, parameter in whole.named_parameters(recurse=False):
            part = self.parts.get(name)
            own = parameter.detach().clone() if part is None else part.of(parameter, self.team.rank, self.team.size)
            self.register_parameter(name, nn.Parameter(own, requires_grad=parameter.requires_grad))


def split_parameters(model: nn.Module) -> dict[str, tuple[Team, Part]]:
    """Who holds which part of every parameter of ``model`` that is split, by its name; all names of a shared one."""
    return {
        f"{prefix}.{name}".lstrip("."): (module.team, part)
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SplitModule)
        for name, part in module.parts.items()
    }
