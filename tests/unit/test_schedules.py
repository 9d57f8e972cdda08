"""Schedules of all ranks, executed on arrays with messages as late as MPI allows, leave what the collective must."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hvdlite.collectives import algorithms
from hvdlite.collectives.algorithms import Algorithm
from hvdlite.collectives.schedule import WINDOW, Fold, Receive, Schedule
from hvdlite.dtypes import ReduceOp, Reduction
from hvdlite.memory.layout import Range

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

    def __init__(self, rank: int, schedule: Schedule, memory: np.ndarray) -> None:
        self.rank = rank
        self.schedule = schedule
        self.memory = memory
        self.sent = self.left = self.arrived = self.posted = 0
        self.slots: deque[np.ndarray | None] = deque()  # of what is posted; None: not there yet
        for elements in schedule.scaled:
            memory[slice(*elements)] *= np.asarray(schedule.scale, memory.dtype)

    def moves(self, links: Links) -> list[str]:
        """What may happen next."""
        moves = []
        outgoing, arriving = self.schedule.outgoing, self.schedule.arriving
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
            piece = self.schedule.outgoing[self.left]
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
            piece = self.schedule.arriving[self.arrived]
            content = self.slots.popleft()
            self.arrived += 1
            if piece.fold is not None:
                own = self.memory[piece.start : piece.stop]
                own[:] = folded(piece.fold, own, content)

    def _waiting(self) -> list[tuple[Receive, np.ndarray | None]]:
        return list(zip(self.schedule.arriving[self.arrived : self.posted], self.slots, strict=True))

    @property
    def is_done(self) -> bool:
        return self.arrived == len(self.schedule.arriving) and self.left == len(self.schedule.outgoing)


def folded(fold: Fold, own: np.ndarray, arrived: np.ndarray) -> np.ndarray:
    def times(values: np.ndarray, scale: float) -> np.ndarray:
        return values * np.asarray(scale, values.dtype)

    operands = [times(arrived, fold.prescale), times(times(own, fold.own_scale), fold.prescale)]
    if fold.own_first:
        operands.reverse()
    return times(operands[0] + operands[1] if fold.op is ReduceOp.SUM else np.minimum(*operands), fold.postscale)


def execute(schedules: Sequence[Schedule], memories: Sequence[np.ndarray], seed: int) -> None:
    """Until everybody is done; who does what next is random, and some ranks are much slower than others."""
    chance = random.Random(seed)
    ranks = [
        Rank(rank, schedule, memory) for rank, (schedule, memory) in enumerate(zip(schedules, memories, strict=True))
    ]
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
            algorithms.allreduce(
                algorithm, numel, LINE, rank, size, pieces * LINE, Reduction(prescale=3.0, postscale=5.0)
            )
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
    reduction = Reduction(op, 0.7, 1 / 3)
    made = [algorithms.allreduce(algorithm, numel, LINE, rank, size, 2 * LINE, reduction) for rank in range(size)]
    results = set()
    for seed in range(2):
        memories = [row.astype(np.float32) for row in inputs]
        execute(made, memories, seed)
        results |= {memory.tobytes() for memory in memories}
    assert len(results) == 1


def ragged_blocks(size: int, chance: random.Random) -> tuple[int, list[list[Range]]]:
    """Elements, and blocks of them with gaps, in any order; some ranks have none, some several."""
    numel = chance.randrange(1, 40)
    cuts = sorted({chance.randrange(numel + 1) for _ in range(2 * size)})
    blocks: list[list[Range]] = [[] for _ in range(size)]
    for elements in itertools.pairwise(cuts):
        if chance.random() < 0.8:
            chance.choice(blocks).append(elements)
    for block in blocks:
        chance.shuffle(block)
    return numel, blocks


@pytest.mark.parametrize("algorithm", EITHER, ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_leaves_each_block_with_its_rank(algorithm: Algorithm, size: int) -> None:
    chance = random.Random(size)
    for seed in range(8):
        numel, blocks = ragged_blocks(size, chance)
        memories = [contribution(rank, numel) for rank in range(size)]
        reduction = Reduction(prescale=3.0, postscale=5.0)
        execute(
            [algorithms.reduce_scatter(algorithm, blocks, rank, 2, reduction) for rank in range(size)], memories, seed
        )
        expected = 15 * sum(contribution(rank, numel) for rank in range(size))
        for memory, block in zip(memories, blocks, strict=True):
            assert all(np.array_equal(memory[start:stop], expected[start:stop]) for start, stop in block), blocks


@pytest.mark.parametrize("algorithm", EITHER, ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize("size", SIZES)
def test_allgather_brings_every_block_everywhere(algorithm: Algorithm, size: int) -> None:
    chance = random.Random(size)
    for seed in range(6):
        numel, blocks = ragged_blocks(size, chance)
        wanted = np.zeros(numel, np.int64)
        memories = [np.zeros(numel, np.int64) for _ in range(size)]
        for rank, block in enumerate(blocks):
            for start, stop in block:
                wanted[start:stop] = memories[rank][start:stop] = rank + 1
        execute([algorithms.allgather(algorithm, blocks, rank, 3) for rank in range(size)], memories, seed)
        assert all(np.array_equal(memory, wanted) for memory in memories), blocks


@pytest.mark.parametrize("make", [algorithms.tree_broadcast, algorithms.chain_broadcast], ids=["tree", "chain"])
@pytest.mark.parametrize("size", SIZES)
def test_broadcast_brings_the_roots_copy_everywhere(make: Callable[..., Schedule], size: int) -> None:
    for root, numel in itertools.product(range(size), [0, 1, 7]):
        memories = [np.full(numel, rank) for rank in range(size)]
        execute([make(numel, root, rank, size, 2) for rank in range(size)], memories, root)
        assert all((memory == root).all() for memory in memories)
