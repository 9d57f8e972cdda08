"""Plans of all ranks, executed on arrays with messages as late as MPI allows, leave what the collective must."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hvdlite.collectives import plans
from hvdlite.collectives.base import Range
from hvdlite.collectives.pipeline import WINDOW, Fold, Plan, Receive
from hvdlite.collectives.plans import Algorithm
from hvdlite.dtypes import ReduceOp
from hvdlite.memory import shard_bounds

LINE = 64  # bytes of an element, so that every element may be a shard
SIZES = range(2, 10)
ALL = [*Algorithm]
EITHER = [Algorithm.HALVING, Algorithm.RING]


def counts(size: int) -> list[int]:
    """Elements: none, fewer than ranks, as many, and many."""
    return [0, 1, size - 1, size, 4 * size + 1]


Links = dict[tuple[int, int], deque[tuple[Range, np.ndarray]]]
"""What is on its way, by (source, target)."""


class Rank:
    """What hvdlite/collectives/pipeline.py does, except that somebody else says when anything happens."""

    def __init__(self, rank: int, plan: Plan, memory: np.ndarray) -> None:
        self.rank = rank
        self.plan = plan
        self.memory = memory
        self.sent = self.left = self.arrived = self.posted = 0
        self.slots: deque[np.ndarray | None] = deque()  # of what is posted; None: not there yet
        if plan.scaled[0] < plan.scaled[1]:
            memory[slice(*plan.scaled)] *= np.asarray(plan.scale, memory.dtype)

    def moves(self, links: Links) -> list[str]:
        """What may happen next."""
        moves = []
        outgoing, arriving = self.plan.outgoing, self.plan.arriving
        if self.sent < min(len(outgoing), self.left + WINDOW) and outgoing[self.sent].after <= self.arrived:
            moves.append("send")
        if self.left < self.sent:
            moves.append("leave")
        if self.posted < min(len(arriving), self.arrived + WINDOW):
            piece = arriving[self.posted]
            if piece.fold is not None or piece.after <= self.left:
                moves.append("post")
        if any(slot is None and links[piece.source, self.rank] for piece, slot in self._waiting()):
            moves.append("land")
        if self.slots and self.slots[0] is not None and arriving[self.arrived].after <= self.left:
            moves.append("take")
        return moves

    def move(self, name: str, links: Links) -> None:
        if name == "send":
            self.sent += 1
        elif name == "leave":  # MPI may read the memory as late as that
            piece = self.plan.outgoing[self.left]
            content = self.memory[piece.start : piece.stop].copy()
            links[self.rank, piece.to].append(((piece.start, piece.stop), content))
            self.left += 1
        elif name == "post":
            self.slots.append(None)
            self.posted += 1
        elif name == "land":
            index, (piece, _) = next(
                (i, (piece, slot))
                for i, (piece, slot) in enumerate(self._waiting())
                if slot is None and links[piece.source, self.rank]
            )
            elements, content = links[piece.source, self.rank].popleft()
            assert elements == (piece.start, piece.stop)
            self.slots[index] = content
            if piece.fold is None:
                self.memory[piece.start : piece.stop] = content
        else:
            piece = self.plan.arriving[self.arrived]
            content = self.slots.popleft()
            self.arrived += 1
            if piece.fold is not None:
                own = self.memory[piece.start : piece.stop]
                own[:] = folded(piece.fold, own, content)

    def _waiting(self) -> list[tuple[Receive, np.ndarray | None]]:
        return list(zip(self.plan.arriving[self.arrived : self.posted], self.slots, strict=True))

    @property
    def is_done(self) -> bool:
        return self.arrived == len(self.plan.arriving) and self.left == len(self.plan.outgoing)


def folded(fold: Fold, own: np.ndarray, arrived: np.ndarray) -> np.ndarray:
    def times(values: np.ndarray, scale: float) -> np.ndarray:
        return values * np.asarray(scale, values.dtype)

    operands = [times(arrived, fold.prescale), times(times(own, fold.own_scale), fold.prescale)]
    if fold.own_first:
        operands.reverse()
    return times(operands[0] + operands[1] if fold.op is ReduceOp.SUM else np.minimum(*operands), fold.postscale)


def execute(plans_of: Sequence[Plan], memories: Sequence[np.ndarray], seed: int) -> None:
    """Until everybody is done; who does what next is random, and some ranks are much slower than others."""
    chance = random.Random(seed)
    ranks = [Rank(rank, plan, memory) for rank, (plan, memory) in enumerate(zip(plans_of, memories, strict=True))]
    pace = [chance.choice([1, 1, 20]) for _ in ranks]
    links: Links = {pair: deque() for pair in itertools.product(range(len(ranks)), repeat=2)}
    while True:
        able = [(rank, moves) for rank in ranks if (moves := rank.moves(links))]
        if not able:
            break
        rank, moves = chance.choices(able, [pace[rank.rank] for rank, _ in able])[0]
        rank.move(chance.choice(moves), links)
    assert all(rank.is_done for rank in ranks), "they wait for one another"
    assert not any(links.values())


def contribution(rank: int, numel: int) -> np.ndarray:
    """A digit of its own for each rank, so that a sum tells how often each was added."""
    return (np.arange(numel) % 3 + 1) << 5 * rank


@pytest.mark.parametrize("algorithm", ALL, ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize("size", SIZES)
def test_allreduce_adds_every_contribution_once(algorithm: Algorithm, size: int) -> None:
    for seed, (numel, pieces) in enumerate(itertools.product(counts(size), [1, 3])):
        memories = [contribution(rank, numel) for rank in range(size)]
        made = [
            plans.allreduce(algorithm, numel, LINE, rank, size, pieces * LINE, ReduceOp.SUM, 3.0, 5.0)
            for rank in range(size)
        ]
        execute(made, memories, seed)
        expected = 15 * sum(contribution(rank, numel) for rank in range(size))
        assert all(np.array_equal(memory, expected) for memory in memories), (numel, pieces)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN], ids=lambda op: op.label)
@pytest.mark.parametrize("algorithm", ALL, ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_the_same_bits_at_any_timing(algorithm: Algorithm, size: int, op: ReduceOp) -> None:
    """Rounding depends on the order of a sum, and the least of 0 and -0 on which comes first."""
    numel = 4 * size + 1
    generator = np.random.default_rng(size)
    inputs = generator.standard_normal((size, numel)) * generator.choice([1.0, 0.0, -0.0], (size, numel))
    made = [plans.allreduce(algorithm, numel, LINE, rank, size, 2 * LINE, op, 0.7, 1 / 3) for rank in range(size)]
    results = set()
    for seed in range(2):
        memories = [row.astype(np.float32) for row in inputs]
        execute(made, memories, seed)
        results |= {memory.tobytes() for memory in memories}
    assert len(results) == 1


@pytest.mark.parametrize("algorithm", EITHER, ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_leaves_each_shard_with_its_rank(algorithm: Algorithm, size: int) -> None:
    for seed, (numel, parts) in enumerate(itertools.product(counts(size), sorted({1, size // 2, size}))):
        shards = [shard_bounds(numel, parts, part, LINE) for part in range(parts)] + [(0, 0)] * (size - parts)
        memories = [contribution(rank, numel) for rank in range(size)]
        made = [plans.reduce_scatter(algorithm, shards, rank, 2, ReduceOp.SUM, 3.0, 5.0) for rank in range(size)]
        execute(made, memories, seed)
        expected = 15 * sum(contribution(rank, numel) for rank in range(size))
        for memory, shard in zip(memories, shards, strict=True):
            assert np.array_equal(memory[slice(*shard)], expected[slice(*shard)]), (numel, parts)


@pytest.mark.parametrize("algorithm", EITHER, ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize("size", SIZES)
def test_allgather_brings_every_block_everywhere(algorithm: Algorithm, size: int) -> None:
    """Ragged blocks with gaps, in any order; some ranks have none, some several."""
    chance = random.Random(size)
    for seed in range(6):
        numel = chance.randrange(1, 40)
        cuts = sorted({chance.randrange(numel + 1) for _ in range(2 * size)})
        blocks: list[list[Range]] = [[] for _ in range(size)]
        for elements in itertools.pairwise(cuts):
            if chance.random() < 0.8:
                chance.choice(blocks).append(elements)
        for block in blocks:
            chance.shuffle(block)
        wanted = np.zeros(numel, np.int64)
        memories = [np.zeros(numel, np.int64) for _ in range(size)]
        for rank, block in enumerate(blocks):
            for start, stop in block:
                wanted[start:stop] = memories[rank][start:stop] = rank + 1
        execute([plans.allgather(algorithm, blocks, rank, 3) for rank in range(size)], memories, seed)
        assert all(np.array_equal(memory, wanted) for memory in memories), blocks


@pytest.mark.parametrize("make", [plans.tree_broadcast, plans.chain_broadcast], ids=["tree", "chain"])
@pytest.mark.parametrize("size", SIZES)
def test_broadcast_brings_the_roots_copy_everywhere(make: Callable[..., Plan], size: int) -> None:
    for root, numel in itertools.product(range(size), [0, 1, 7]):
        memories = [np.full(numel, rank) for rank in range(size)]
        execute([make(numel, root, rank, size, 2) for rank in range(size)], memories, root)
        assert all((memory == root).all() for memory in memories)
