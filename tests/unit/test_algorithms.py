"""What travels between nodes depends on sizes and ranks only; here for counts above 2^31, without the memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from hvdlite.collectives import algorithms
from hvdlite.collectives.algorithms import Algorithm
from hvdlite.collectives.schedule import Schedule
from hvdlite.collectives.thresholds import limits_of, parts_of
from hvdlite.memory.layout import shard_bounds, share_of


def assert_that_messages_meet(schedules: Sequence[Schedule]) -> None:
    """What each rank sends another is what that one receives from it, in the same order."""
    for source, target in itertools.product(range(len(schedules)), repeat=2):
        sent = [(piece.start, piece.stop) for piece in schedules[source].outgoing if piece.to == target]
        assert sent == [(piece.start, piece.stop) for piece in schedules[target].arriving if piece.source == source]


@pytest.mark.parametrize("algorithm", Algorithm, ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_schedules_huge_buffers_fit_together(algorithm: Algorithm, size: int) -> None:
    numel = 5 * (1 << 31) + 17
    made = [algorithms.allreduce(algorithm, numel, 4, rank, size, 1 << 28) for rank in range(size)]
    assert_that_messages_meet(made)
    for rank, schedule in enumerate(made):
        assert all(0 < piece.stop - piece.start <= 1 << 26 for piece in schedule.arriving)
        if algorithm is Algorithm.DOUBLING:
            continue
        own = [shard_bounds(numel, size, rank, 4)]
        stored = [(piece.start, piece.stop) for piece in schedule.arriving if piece.fold is None]
        assert covers(dict(own + stored), numel)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 100, 128, 1000])
def test_halving_and_doubling_take_few_steps_and_no_byte_too_many(size: int) -> None:
    shard_numel = 16
    rounds = (size - 1).bit_length()
    for rank in {0, 1, size // 2, size - 1}:
        schedule = algorithms.allreduce(Algorithm.HALVING, shard_numel * size, 4, rank, size, 1 << 20)
        for pieces in (schedule.outgoing, schedule.arriving):
            assert sum(piece.stop - piece.start for piece in pieces) == 2 * (size - 1) * shard_numel
            assert len(pieces) <= 2 * rounds + 2 * rounds  # a message more where a round wraps around the end
        peers = [peer for peer, _ in itertools.groupby(piece.to for piece in schedule.outgoing)]
        assert len(peers) <= 2 * rounds


def covers(ranges: dict[int, int], numel: int) -> bool:
    """Whether the ranges follow one another from 0 to ``numel``."""
    position = 0
    for start in sorted(ranges):
        if start != position:
            return False
        position = ranges[start]
    return position == numel


def test_shares_of_huge_blocks_cover_everything_once() -> None:
    numel = 7 * (1 << 31) + 5
    blocks = [[(0, 1 << 31), (3 << 31, 4 << 31)], [], [(1 << 31, 3 << 31), (4 << 31, numel)]]
    shares = [share_of(blocks, 3, index, 2) for index in range(3)]
    assert covers({start: stop for share in shares for _, start, stop in share}, numel)
    for owner, start, stop in (piece for share in shares for piece in share):
        assert any(first <= start and stop <= last for first, last in blocks[owner])
    lengths = [sum(stop - start for _, start, stop in share) for share in shares]
    assert max(lengths) - min(lengths) <= 128


@pytest.mark.parametrize("make", [algorithms.chain_broadcast, algorithms.tree_broadcast], ids=["chain", "tree"])
def test_broadcast_schedules_huge_buffers_fit_together(make: Callable[..., Schedule]) -> None:
    numel, size, root = (1 << 33) + 1, 4, 2
    made = [make(numel, root, rank, size, 1 << 26) for rank in range(size)]
    assert_that_messages_meet(made)
    for rank, schedule in enumerate(made):
        assert covers({piece.start: piece.stop for piece in schedule.arriving}, numel) == (rank != root)


def test_each_algorithm_is_taken_where_its_steps_and_bytes_cost_least() -> None:
    def costs(nodes: int, nbytes: float) -> list[float]:
        """Of doubling and of halving, where a message costs as much as 8 KiB."""
        rounds = (nodes - 1).bit_length()
        exchanges = rounds if nodes == 1 << rounds else rounds + 1
        return [exchanges * (8192 + nbytes), 2 * rounds * 8192 + 2 * (nodes - 1) / nodes * nbytes]

    assert limits_of(32768, 2).doubling_bytes == limits_of(32768, 4).doubling_bytes == 32768
    for nodes in (3, 4, 5, 6, 7, 8, 9, 100, 128, 1000, 2048):
        limit = limits_of(32768, nodes).doubling_bytes
        doubling, halving = costs(nodes, limit)
        assert doubling == pytest.approx(halving, rel=1e-3)
        assert costs(nodes, 2 * limit)[0] > costs(nodes, 2 * limit)[1]


def test_limits_grow_with_the_nodes_and_0_leaves_the_ring() -> None:
    assert [limits_of(0, nodes).algorithm(1) for nodes in (2, 3, 2048)] == [Algorithm.RING] * 3
    for nodes in (2, 8, 2048):
        made = limits_of(32768, nodes)
        order = [made.algorithm(nbytes) for nbytes in (0, made.doubling_bytes, made.halving_bytes)]
        assert order == [Algorithm.DOUBLING, Algorithm.DOUBLING, Algorithm.HALVING]
        assert made.algorithm(made.halving_bytes + 1) is Algorithm.RING
        assert made.halving_bytes / nodes == limits_of(32768, 2).halving_bytes / 2


def test_parts_are_neither_short_nor_many() -> None:
    def parts(nbytes: int, rails: int = 2, share_bytes: int = 0) -> int:
        return parts_of(nbytes, rails, part_bytes=100, share_bytes=share_bytes)

    assert [parts(nbytes) for nbytes in (0, 1, 199, 200, 299, 300, 800, 10**9)] == [1, 1, 1, 2, 2, 3, 8, 8]
    assert [parts(1000, rails, share_bytes=125) for rails in (1, 2, 4, 8)] == [8, 4, 2, 1]
