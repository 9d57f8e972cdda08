"""Ranks, nodes and the tree of leaders as plain facts; shards of any size, beyond 2^31 too."""

import itertools

import pytest

from hvdlite.memory.layout import ALIGNMENT, shard_bounds
from hvdlite.topology import Topology


def test_uneven_nodes_in_any_order():
    nodes = ((0, 2, 5), (1,), (3, 4))
    found = {r: Topology(r, nodes) for r in range(6)}
    assert [found[r].local_rank for r in range(6)] == [0, 0, 1, 0, 1, 2]
    assert [found[r].local_size for r in range(6)] == [3, 1, 3, 2, 2, 3]
    assert [found[r].cross_rank for r in range(6)] == [0, 1, 0, 2, 1, 0]
    assert [found[r].cross_size for r in range(6)] == [3, 3, 2, 3, 2, 1]
    assert not found[0].is_homogeneous
    assert found[0].rails == 1
    assert found[0].leaders == (0, 1, 3)
    assert Topology(0, ((0, 1), (2, 3))).is_homogeneous


@pytest.mark.parametrize("fanout", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 21])
def test_the_tree_reaches_every_node_once(count, fanout):
    nodes = tuple((i,) for i in range(count))
    found = [Topology(i, nodes) for i in range(count)]
    for i in range(count):
        for child in found[i].children(fanout):
            assert found[child].parent(fanout) == i
        assert len(found[i].children(fanout)) <= fanout
    assert found[0].parent(fanout) is None
    assert found[0].subtree_ranks(0, fanout) == tuple(range(count))
    below = [r for child in found[0].children(fanout) for r in found[0].subtree_ranks(child, fanout)]
    assert sorted(below) == list(range(1, count))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000, 2**31 + 3, 2**40 + 17])
def test_shards_cover_everything_once_and_start_on_cache_lines(numel, parts, itemsize):
    bounds = [shard_bounds(numel, parts, i, itemsize) for i in range(parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    for (_, stop), (start, _) in itertools.pairwise(bounds):
        assert stop == start
    assert all(start * itemsize % ALIGNMENT == 0 for start, stop in bounds if stop > start)
    assert max(stop - start for start, stop in bounds) * itemsize <= numel * itemsize // parts + 2 * ALIGNMENT
