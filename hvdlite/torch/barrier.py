"""hvd.barrier."""

from __future__ import annotations

from hvdlite.operations.barrier import barrier_async
from hvdlite.recorder import Lane
from hvdlite.torch.eager import eager
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set
from hvdlite.torch.repeated_rows import met_at_once


@eager
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank has called it."""
    if met_at_once(process_set):
        return
    group = check_process_set(process_set).group()
    with group.recorder.span(Lane.WAIT, "barrier"):
        barrier_async(group, background=False).wait()
