"""Leaders whose links to other nodes are slow."""

from __future__ import annotations

import pytest

from coordinator_lab import Lab, submission

CHAIN = [(0, 1), (2, 3), (4,)]


@pytest.mark.parametrize(("leader", "claims"), [(0, 0), (2, 1)], ids=["root", "in the middle"])
def test_nobody_begins_what_other_nodes_have_not_been_told(
    monkeypatch: pytest.MonkeyPatch, leader: int, claims: int
) -> None:
    """A node that executes sends nothing more, and would wait for ever for those that do not know that they shall."""
    lab = Lab(CHAIN, 0, monkeypatch, tree_fanout=1)
    submissions = [submission("a") for _ in lab.ranks]
    for rank, made in zip(lab.ranks, submissions, strict=True):
        rank.submit(made)
    tree = lab.trees[leader]
    while tree.sent < claims:
        lab.turn()
    tree.is_full = True
    for _ in range(5000):
        lab.turn()
    began = [bool(executor.buckets) for executor in lab.executors]
    assert began == [rank < leader for rank in range(len(lab.ranks))]
    tree.is_full = False
    lab.settle([made.handle for made in submissions])
