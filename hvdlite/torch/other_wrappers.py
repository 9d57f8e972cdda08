"""Modules that reduce gradients themselves: parameters of theirs are none for DistributedOptimizer."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed


def check_unwrapped(parameters: Iterable[torch.Tensor]) -> None:
    """Look for torch's wrappers of ``parameters``, once torch.distributed runs; 30 ms with a million objects.

    A parameter does not know them, since they hook what comes behind it in autograd's graph.

    Raises:
        ValueError: a DistributedDataParallel or a FullyShardedDataParallel module has one; says what to leave out.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed import fsdp
    from torch.nn.parallel import DistributedDataParallel

    sharding = [getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name)]
    kinds: tuple[type, ...] = (DistributedDataParallel, *sharding)  # FSDPModule is there since torch 2.6
    wanted = {id(parameter) for parameter in parameters}
    # By type(), for isinstance() asks objects for a __class__, which some compute.
    wrappers: list[Any] = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
    for wrapper in wrappers:
        if any(id(parameter) in wanted for parameter in wrapper.parameters()):
            kind = next(kind.__name__ for kind in kinds if isinstance(wrapper, kind))
            shown = "fully_shard()" if kind == "FSDPModule" else kind
            raise ValueError(
                f"the optimizer has parameters of a model that is wrapped by torch's {shown}, which reduces their "
                f"gradients itself. Use one of the two: leave {shown} out, and pass the optimizer of the bare model to "
                f"hvd.DistributedOptimizer; or keep {shown}, and use the optimizer as it is."
            )
