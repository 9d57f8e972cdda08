"""hvd.barrier."""

from __future__ import annotations

from hvdlite.timeline.recorder import Lane
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank has called it."""
    runtime = check_process_set(process_set).runtime()
    with runtime.recorder.span(Lane.WAIT, "barrier"):
        runtime.barrier_async().wait()
