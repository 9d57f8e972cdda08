"""Ranks in messages."""

from __future__ import annotations

from collections.abc import Sequence


def rank_list(ranks: Sequence[int]) -> str:
    """'rank 2', 'ranks 0, 1 and 3', shortened beyond ten."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 10:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
