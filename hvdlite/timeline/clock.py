"""How far another machine's clock is from ours, from messages to and fro."""

from __future__ import annotations

from collections.abc import Sequence


def estimate_offset(round_trips: Sequence[tuple[int, int, int]]) -> int:
    """Nanoseconds to add to the local clock for the remote one.

    The remote clock was read at some time between sending and receiving; the middle is wrong by half the round trip at
    most. Delays only ever lengthen a round trip, so the shortest tells best (Cristian 1989, doi:10.1007/BF01784024).

    Args:
        round_trips: at least one (sent, remote time, received), ns, first and last by the local clock.
    """
    sent, remote, received = min(round_trips, key=lambda trip: trip[2] - trip[0])
    return remote - (sent + received) // 2
