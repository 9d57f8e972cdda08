"""hvd.join."""

from __future__ import annotations

from hvdlite.operations import join as operations
from hvdlite.recorder import Lane
from hvdlite.torch import device as torch_device
from hvdlite.torch.eager import eager
from hvdlite.torch.process_set import global_process_set


@eager
def join(device: int = -1) -> int:
    """Wait until every rank has called it, and take part meanwhile in what the others reduce, sparse gradients as well.

    For ranks that run out of data before others. A rank that has joined contributes nothing: zeros to Sum and Average
    (which still divides by size()), what changes nothing to Min, Max and Product. Allgather, broadcast and alltoall are
    an error on the other ranks until all have joined, as in Horovod.

    Args:
        device: on which GPU this rank takes part, if it has reduced nothing on one yet and torch has not begun to work
            with one; -1: the one of its place on the node.

    Returns:
        The last rank that joined, the same on every rank.
    """
    group = global_process_set.group()
    gpus = torch_device.gpus
    known = (gpus.chosen, gpus.current(), device if device >= 0 else None)
    with group.recorder.span(Lane.WAIT, "join"):
        last = operations.join(group, next((ordinal for ordinal in known if ordinal is not None), None))
    engine = group.world.executor.device
    if engine is not None:
        gpus.choose(engine.memory.ordinal)
    return last
