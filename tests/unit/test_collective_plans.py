"""What travels around a ring depends on sizes and ranks only; here for counts above 2^31, without the memory."""

from __future__ import annotations

import math

import pytest

from hvdlite.collectives import pipeline
from hvdlite.collectives.ring import doubling_bytes
from hvdlite.collectives.shm import share_of
from hvdlite.dtypes import ReduceOp
from hvdlite.memory import shard_bounds


@pytest.mark.parametrize("size", [2, 3, 5])
def test_plans_of_huge_buffers_fit_together(size: int) -> None:
    numel = 5 * (1 << 31) + 17
    piece_numel = 1 << 26
    shards = [shard_bounds(numel, size, part, 4) for part in range(size)]
    plans = [
        pipeline.plan_reduce_scatter(shards, rank, piece_numel, ReduceOp.SUM, 0.5, 2.0).then(
            pipeline.plan_allgather([[shard] for shard in shards], rank, piece_numel)
        )
        for rank in range(size)
    ]
    for rank, plan in enumerate(plans):
        from_left = plans[(rank - 1) % size].outgoing
        assert [(p.start, p.stop) for p in from_left] == [(p.start, p.stop) for p in plan.arriving]
        assert all(0 < p.stop - p.start <= piece_numel for p in plan.arriving)
        folded = {p.start: p.stop for p in plan.arriving if p.fold is not None}
        stored = {p.start: p.stop for p in plan.arriving if p.fold is None}
        own = {p.start: p.stop for p in pipeline.cut([shards[rank]], piece_numel)}
        assert covers(stored | own, numel)
        assert covers(folded | {p.start: p.stop for p in plan.own}, numel)
        assert all(p.fold.postscale == (2.0 if p.start in own else 1.0) for p in plan.arriving if p.fold)


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


def test_broadcast_plans_of_huge_buffers_fit_together() -> None:
    numel, size, root = (1 << 33) + 1, 4, 2
    plans = [pipeline.plan_broadcast(numel, root, rank, size, 1 << 26) for rank in range(size)]
    for rank, plan in enumerate(plans):
        assert plan.arriving == plans[(rank - 1) % size].outgoing
        if rank != root:
            assert covers({piece.start: piece.stop for piece in plan.arriving}, numel)


def test_doubling_goes_further_where_the_ring_has_more_steps() -> None:
    def steps_s(ranks: int, nbytes: float) -> tuple[float, float]:
        """Of doubling and of the ring, where a step costs as much as 4 KiB."""
        rounds = math.log2(ranks)
        doubling = rounds * (4096 + nbytes)
        ring = 2 * (ranks - 1) * (4096 + nbytes / ranks)
        return doubling, ring

    assert [doubling_bytes(32768, ranks) for ranks in (1, 2, 3, 4)] == [32768] * 4
    for ranks in (4, 5, 8, 100, 2048):
        limit = doubling_bytes(32768, ranks)
        doubling, ring = steps_s(ranks, limit)
        assert doubling == pytest.approx(ring, rel=1e-3)
        assert steps_s(ranks, 2 * limit)[0] > steps_s(ranks, 2 * limit)[1]
    assert doubling_bytes(0, 2048) == 0
