"""Shared memory of a node's ranks: how long they take to meet, and how fast one reads what another has written."""

from __future__ import annotations

import statistics
import time

import numpy as np

from hvdlite import _native
from hvdlite.collectives.select import spin_us
from hvdlite.config import Config
from hvdlite.errors import CollectiveError
from hvdlite.node import Node

_BYTES = 8 << 20
_MEETINGS = 200
_COPIES = 5
_WAIT_S = 10.0


def measure(node: Node) -> dict[str, float] | None:
    """Of the ranks of ``node``, all of which call it; None where there is one.

    Raises:
        CollectiveError: one of them did not come.
        StartupError: there is no memory.
    """
    if node.local_size == 1:
        return None
    words = _native.Barrier.bytes_needed(node.local_size)
    meeting, places = node.share(words), node.share(_BYTES * node.local_size)
    barrier = _native.Barrier(
        meeting.address, node.local_rank, node.local_size, node.abort_address, spin_us(Config(), node)
    )

    def meet() -> None:
        if barrier.wait(_WAIT_S) != _native.Barrier.OK:
            raise CollectiveError(f"a rank of this node did not come to a barrier in shared memory in {_WAIT_S:.0f} s")

    meet()
    start = time.perf_counter()
    for _ in range(_MEETINGS):
        meet()
    latency_us = (time.perf_counter() - start) / _MEETINGS * 1e6
    own, neighbour = (places.address + _BYTES * (node.local_rank + i) % (_BYTES * node.local_size) for i in (0, 1))
    private = np.ones(_BYTES, np.uint8)
    seconds = []
    for _ in range(_COPIES):
        _native.copy(own, private.ctypes.data, _BYTES)
        meet()
        start = time.perf_counter()
        _native.copy(private.ctypes.data, neighbour, _BYTES)
        seconds.append(time.perf_counter() - start)
        meet()
    return {"barrier us": latency_us, "GB/s": _BYTES / statistics.median(seconds) / 1e9}
