"""From the parts of a model to the checkpoint of the unsplit one, and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hvdlite.tensor_parallel.moves import gather_shares
from hvdlite.tensor_parallel.split_module import split_parameters


def unsplit_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state_dict that the unsplit model would have, new, on every rank. Collective over the teams of its layers.

    Raises:
        MismatchError, CollectiveError: as `all_gather_matmul`.
    """
    splits = split_parameters(model)
    state = model.state_dict()  # with the versions of its modules, which torch keeps beside the tensors
    for name, value in state.items():
        if name in splits:
            team, part = splits[name]
            state[name] = part.join(gather_shares(team.carrier_for(value), f"state_dict of {name}", value))
        else:
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return state


def load_unsplit_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """Load this rank's parts of ``state``, a state_dict of the unsplit model. Nothing is communicated.

    Args:
        strict: see `torch.nn.Module.load_state_dict`, whose result is returned.

    Raises:
        ValueError: a tensor cannot be divided among the ranks.
        RuntimeError: as of `torch.nn.Module.load_state_dict`.
    """
    splits = split_parameters(model)
    parts = OrderedDict(state)
    if (versions := getattr(state, "_metadata", None)) is not None:
        parts._metadata = versions  # type: ignore[attr-defined]
    for name in splits.keys() & state.keys():
        team, part = splits[name]
        parts[name] = part.of(state[name], team.rank, team.size)
    return model.load_state_dict(parts, strict)
