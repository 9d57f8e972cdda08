"""The virtual ranks of benchmarks/ say what up to 8 real ranks on several hosts say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab import Lab

CHECK = Path(__file__).resolve().parents[2] / "benchmarks" / "scale_check.py"


@pytest.mark.parametrize(
    ("ranks_per_host", "fanout"),
    [([2, 2, 2, 2], 4), ([2, 2, 2, 2], 1), ([1, 1, 1, 1, 1, 1, 1], 2), ([3, 2, 1], 4)],
    ids=["4 x 2", "a chain of 4 x 2", "7 in a binary tree", "3+2+1"],
)
def test_virtual_ranks_say_what_real_ranks_say(
    hosts: Callable[..., Lab], ranks_per_host: list[int], fanout: int
) -> None:
    env = {"HVDLITE_TREE_FANOUT": str(fanout)}
    lab = hosts(len(ranks_per_host))
    result = lab.launch(CHECK, ranks_per_host=ranks_per_host, env=env, timeout=150).check()
    assert "all counts of all ranks are as computed" in result.ranks[0].stdout, result
    assert f"{sum(ranks_per_host)} ranks on {len(ranks_per_host)} node(s)" in result.ranks[0].stdout
