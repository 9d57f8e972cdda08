"""Up to how many bytes a collective takes which way: pure, from nodes and settings."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.collectives.algorithms import Algorithm

_RING_STEP = 8  # times ``small_bytes``: the shortest step of a ring in which bytes hide the latency
PART_BYTES = 2 << 20
"""A node takes longer to reduce so much than to meet."""
_MOST_PARTS = 8
_MOST_NODES_AT_ONCE = 64
"""Recursive doubling between more has more steps than a `hvdlite.collectives.bound.BoundSchedule` may have."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Up to how many bytes a collective across nodes takes each algorithm; above all of them, the ring or a chain."""

    doubling_bytes: int
    halving_bytes: int
    tree_bytes: int

    def algorithm(self, nbytes: int) -> Algorithm:
        if nbytes <= self.doubling_bytes:
            return Algorithm.DOUBLING
        return Algorithm.HALVING if nbytes <= self.halving_bytes else Algorithm.RING


def limits_of(small_bytes: int, nodes: int) -> Limits:
    """Those between ``nodes``, if recursive doubling pays up to ``small_bytes`` between four of them.

    A message that takes a, and b for each of its bytes, makes recursive doubling take d (a + bB), recursive halving and
    doubling 2 h a + 2 (n-1)/n b B, with h = ceil(log2 n) and d = log2 n, or floor(log2 n) + 2 where n is no power of
    two. They are equal at B = a/b (2h - d) / (d - 2 (n-1)/n), which is 4 a/b on four nodes.

    The ring takes 2 (n-1) steps of B/n bytes. Where those are long it is as fast as the others, and its messages go to
    the next node only; where they are short it must not be taken. docs/algorithms.md has the measurements.
    """
    halving_bytes = _RING_STEP * small_bytes * nodes
    if nodes <= 2:  # all are the same, but for additions
        return Limits(small_bytes, halving_bytes, small_bytes)
    halvings = (nodes - 1).bit_length()
    doublings = halvings if nodes & (nodes - 1) == 0 else halvings + 1
    times = (2 * halvings - doublings) / (doublings - 2 * (nodes - 1) / nodes)
    return Limits(int(small_bytes / 4 * times), halving_bytes, small_bytes)


def at_once_bytes(small_bytes: int, segment_bytes: int, nodes: int) -> int:
    """Up to so many an allreduce between ``nodes`` is a few messages; no rank's last comes before all have begun."""
    if nodes > _MOST_NODES_AT_ONCE:
        return 0
    return min(limits_of(small_bytes, nodes).doubling_bytes, segment_bytes)


def parts_of(nbytes: int, rails: int, part_bytes: int, share_bytes: int) -> int:
    """Into how many parts a hierarchical allreduce is cut: the node works on one while another is between nodes.

    Args:
        part_bytes: of a part, at least.
        share_bytes: of a part, what each rail carries at least. Each part takes the steps of its algorithm, which cost
            little only where bytes cost more.
    """
    return max(1, min(_MOST_PARTS, nbytes // max(part_bytes, rails * share_bytes)))
