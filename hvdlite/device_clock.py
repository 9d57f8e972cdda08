"""When a GPU has done what it was given, on the clock of the host, for the timeline; nobody waits for it."""

from __future__ import annotations

import time

from hvdlite import _native
from hvdlite.recorder import Lane, Recorder

_RENEWED_S = 1.0  # the driver's answer is a float of 24 bits: half a microsecond of some seconds


class DeviceClock:
    """Of GPU ``ordinal``, whose time is tied to that of the host by a stream that has nothing else to do.

    So spans are late by what it takes the GPU to come to that: some microseconds, on a GPU at work perhaps more.
    """

    def __init__(self, ordinal: int, recorder: Recorder) -> None:
        self._recorder = recorder
        idle = _native.DeviceStream(ordinal)
        self._origin = _native.Moment(ordinal, idle.handle, True)
        self._origin_ns = time.monotonic_ns()

    def record(self, name: str, began: _native.Moment, ended: _native.Moment) -> None:
        """Write the span between two timed moments, which are reached."""
        if not self._origin.is_reached:
            return
        start_ns, end_ns = (self._origin_ns + round(1e9 * at.seconds_since(self._origin)) for at in (began, ended))
        self._recorder.add(Lane.ON_GPU, name, start_ns, end_ns)
        if end_ns - self._origin_ns > 1e9 * _RENEWED_S:
            self._origin, self._origin_ns = ended, end_ns
