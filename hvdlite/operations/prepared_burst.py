"""A burst of few bytes as one native call, made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlite.collectives.base import PreparedCall
from hvdlite.engine import Executed

if TYPE_CHECKING:
    from hvdlite._native import DirectCall


class PreparedBurst:
    """What `hvdlite.coordinator.small_bursts` does; see `hvdlite.coordinator.prepared.PreparedBurst`.

    Args:
        executed: where it is counted.
        direct: of ``call``, in two phases.
        nbytes: of what is reduced.
    """

    def __init__(self, executed: Executed, call: PreparedCall, direct: DirectCall, nbytes: int) -> None:
        self.direct = direct
        self.last, self.resume = call.last, call.resume
        self._call = call
        self._executed = executed
        self._nbytes = nbytes

    def count_done(self, times: int) -> None:
        """So often it was done."""
        self._call.count_done(times)
        self._executed.buckets += times
        self._executed.reduced_bytes += times * self._nbytes
