"""How far this node's monotonic clock is from the root's, measured down the tree of leaders at the start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlite.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

_ROUND_TRIPS = 8
_TAG = 2


def measure_offset(leaders: MPI.Comm | None, topology: Topology, fanout: int) -> int:
    """Nanoseconds to add to this node's monotonic clock for the root's; 0 on the root, and on ranks that lead no node.

    A collective call of the leaders. Every leader asks its parent, then answers its children.
    """
    if leaders is None:
        return 0
    offset_ns = 0
    parent = topology.parent(fanout)
    if parent is not None:
        trips = []
        for _ in range(_ROUND_TRIPS):
            sent_ns = time.monotonic_ns()
            remote_ns = leaders.sendrecv(None, parent, _TAG, source=parent, recvtag=_TAG)
            trips.append((sent_ns, remote_ns, time.monotonic_ns()))
        offset_ns = estimate_offset(trips) + leaders.recv(source=parent, tag=_TAG)
    for child in topology.children(fanout):
        for _ in range(_ROUND_TRIPS):
            leaders.recv(source=child, tag=_TAG)
            leaders.send(time.monotonic_ns(), child, _TAG)
        leaders.send(offset_ns, child, _TAG)
    return offset_ns


def estimate_offset(round_trips: Sequence[tuple[int, int, int]]) -> int:
    """Nanoseconds to add to the local clock for the remote one.

    The remote clock was read at some time between sending and receiving; the middle is wrong by half the round trip at
    most. Delays only ever lengthen a round trip, so the shortest tells best (Cristian 1989, doi:10.1007/BF01784024).

    Args:
        round_trips: at least one (sent, remote time, received), ns, first and last by the local clock.
    """
    sent, remote, received = min(round_trips, key=lambda trip: trip[2] - trip[0])
    return remote - (sent + received) // 2
