"""What `hvd.statistics` counts, in TensorBoard: a scalar for every count, by step."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import hvdlite.torch as hvd
from hvdlite.default_runtime import counted_before


class ScalarWriter(Protocol):
    """A `torch.utils.tensorboard.SummaryWriter`, for example."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one point."""


class StatisticsWriter:
    """Writes how much each count has grown since the last time::

        statistics = StatisticsWriter(SummaryWriter(f"runs/rank{hvd.rank()}"))
        for step, batch in enumerate(loader):
            ...
            if step % 100 == 0:
                statistics.write(step)

    Each rank counts for itself, and needs a writer of its own.

    Args:
        writer: takes the scalars, under tags such as "hvdlite/reduced_bytes".
        process_set: as of `hvd.statistics`.
    """

    def __init__(self, writer: ScalarWriter, process_set: hvd.ProcessSet | None = None) -> None:
        self._writer = writer
        self._process_set = process_set
        self._began = self._beginning()
        self._before = hvd.statistics(process_set)

    def write(self, step: int) -> None:
        """Write what was counted since the last call, or since this object was made."""
        now = hvd.statistics(self._process_set)
        began = self._beginning()
        if began is not self._began:  # counts have, by hvd.init()
            self._began, self._before = began, {} if self._process_set is not None else dict(counted_before())
        for name, value in now.items():
            self._writer.add_scalar(f"hvdlite/{name}", float(value - self._before.get(name, 0)), step)
        self._before = now

    def _beginning(self) -> object:
        """Another object each time that counts have begun anew."""
        if self._process_set is None:
            return counted_before()
        return weakref.ref(self._process_set.group())  # the same one for the same group; it does not keep the world
