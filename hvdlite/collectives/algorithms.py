"""The schedule of each algorithm between nodes, for one rank of several; docs/algorithms.md has its steps and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache

from hvdlite.collectives.schedule import Fold, Schedule
from hvdlite.dtypes import SUM, Reduction
from hvdlite.memory.layout import Range, shard_bounds


class Algorithm(Enum):
    """How an allreduce, a reduce_scatter or an allgather goes; the latter two know no `DOUBLING`."""

    DOUBLING = "recursive doubling"
    HALVING = "recursive halving and doubling"
    RING = "ring"


@lru_cache(maxsize=32)
def allreduce(
    algorithm: Algorithm,
    numel: int,
    itemsize: int,
    rank: int,
    size: int,
    segment_bytes: int,
    reduction: Reduction = SUM,
) -> Schedule:
    """Every rank ends with all ``numel`` elements, reduced; messages have at most ``segment_bytes``."""
    schedule = Schedule(segment_bytes // itemsize)
    if algorithm is Algorithm.DOUBLING:
        _doubling(schedule, numel, rank, size, reduction)
        return schedule
    shards = [[shard_bounds(numel, size, part, itemsize)] for part in range(size)]
    _reduce_scatter(algorithm, schedule, shards, rank, reduction)
    _allgather(algorithm, schedule, shards, rank)
    return schedule


def reduce_scatter(
    algorithm: Algorithm, blocks: Sequence[Sequence[Range]], rank: int, piece_numel: int, reduction: Reduction = SUM
) -> Schedule:
    """Rank r ends with ``blocks[r]``, reduced."""
    schedule = Schedule(piece_numel)
    _reduce_scatter(algorithm, schedule, blocks, rank, reduction)
    return schedule


def allgather(algorithm: Algorithm, blocks: Sequence[Sequence[Range]], rank: int, piece_numel: int) -> Schedule:
    """Rank r starts with ``blocks[r]``, and all end with all blocks."""
    schedule = Schedule(piece_numel)
    _allgather(algorithm, schedule, blocks, rank)
    return schedule


def chain_broadcast(numel: int, root: int, rank: int, size: int, piece_numel: int) -> Schedule:
    """From ``root`` to the right, up to the rank on its left."""
    schedule = Schedule(piece_numel)
    if rank != root:
        schedule.receive((rank - 1) % size, [(0, numel)])
    if (rank + 1) % size != root:
        schedule.send((rank + 1) % size, [(0, numel)])
    return schedule


def tree_broadcast(numel: int, root: int, rank: int, size: int, piece_numel: int) -> Schedule:
    """Down a binomial tree."""
    schedule = Schedule(piece_numel)
    place = (rank - root) % size
    distance = 1
    while distance < size and place % (2 * distance) == 0:
        distance *= 2
    if place > 0:
        schedule.receive((rank - distance) % size, [(0, numel)])
    while distance > 1:
        distance //= 2
        if place + distance < size:
            schedule.send((rank + distance) % size, [(0, numel)])
    return schedule


def _reduce_scatter(
    algorithm: Algorithm, schedule: Schedule, blocks: Sequence[Sequence[Range]], rank: int, reduction: Reduction
) -> None:
    reduce = _ring_reduce_scatter if algorithm is Algorithm.RING else _halving_reduce_scatter
    reduce(schedule, blocks, rank, reduction)


def _allgather(algorithm: Algorithm, schedule: Schedule, blocks: Sequence[Sequence[Range]], rank: int) -> None:
    gather = _ring_allgather if algorithm is Algorithm.RING else _doubling_allgather
    gather(schedule, blocks, rank)


def _doubling(schedule: Schedule, numel: int, rank: int, size: int, reduction: Reduction) -> None:
    """Partners exchange everything and combine it, at distances 1, 2, 4, ...; lower ranks come first in every sum.

    So every rank computes the same expression, and gets the same bits. Of n = 2^k + m ranks the first m pairs act as
    one rank each.
    """
    op, prescale, postscale = reduction
    whole = [(0, numel)]
    power = 1 << (size.bit_length() - 1)
    pairs = size - power
    own = rank - pairs
    if rank < 2 * pairs:
        partner = rank ^ 1
        if partner < rank:
            schedule.send(partner, whole)
            schedule.receive(partner, whole)
            return
        schedule.receive(partner, whole, Fold(op, prescale=prescale, own_first=True))
        own = rank // 2
    elif pairs > 0:
        schedule.scale_first(whole, prescale)
    distance = 1
    while distance < power:
        partner = own ^ distance
        partner = 2 * partner if partner < pairs else partner + pairs
        fold = Fold(
            op,
            prescale=prescale if distance == 1 and pairs == 0 else 1.0,
            postscale=postscale if 2 * distance == power else 1.0,
            own_first=rank < partner,
        )
        schedule.send(partner, whole)
        schedule.receive(partner, whole, fold)
        distance *= 2
    if rank < 2 * pairs:
        schedule.send(rank + 1, whole)


def _halvings(size: int) -> list[tuple[int, int]]:
    """How many blocks a rank has in each round of recursive halving, and how many it keeps: the larger half."""
    rounds = []
    while size > 1:
        rounds.append((size, (size + 1) // 2))
        size = (size + 1) // 2
    return rounds


def _halving_reduce_scatter(
    schedule: Schedule, blocks: Sequence[Sequence[Range]], rank: int, reduction: Reduction
) -> None:
    """In each round a rank keeps the blocks of the ranks that follow it, itself first, and sends the further half on.

    A contribution to the block of the rank d ahead goes there in the skips that add up to d: of each rank one way only.
    Any number of ranks takes ceil(log2 n) rounds, in which each sends n - 1 blocks (Träff 2024, arXiv:2410.14234).
    """
    op, prescale, postscale = reduction
    size = len(blocks)
    for now, kept in _halvings(size):
        last = kept == 1
        fold = Fold(op, prescale=prescale if now == size else 1.0, postscale=postscale if last else 1.0)
        if now == size and size % 2 == 1:
            # The one block that neither leaves nor gets anything in the first round, where others are scaled.
            schedule.scale_first(blocks[(rank + kept - 1) % size], prescale)
        # What goes on in the next round comes first. The last block goes on from its begin, in `_doubling_allgather`.
        schedule.send((rank + kept) % size, _following(blocks, rank + kept, now - kept), backwards=not last)
        schedule.receive((rank - kept) % size, _following(blocks, rank, now - kept), fold, backwards=not last)


def _doubling_allgather(schedule: Schedule, blocks: Sequence[Sequence[Range]], rank: int) -> None:
    """The way of `_halving_reduce_scatter` back: in each round a rank gets as many blocks as it has, or one less.

    Bruck et al. 1997, doi:10.1109/71.642949.
    """
    size = len(blocks)
    for now, before in reversed(_halvings(size)):
        schedule.send((rank - before) % size, _following(blocks, rank, now - before))
        schedule.receive((rank + before) % size, _following(blocks, rank + before, now - before))


def _ring_reduce_scatter(
    schedule: Schedule, blocks: Sequence[Sequence[Range]], rank: int, reduction: Reduction
) -> None:
    """Each block starts at the rank behind its own and goes all the way around."""
    op, prescale, postscale = reduction
    size = len(blocks)
    for step in range(size - 1):
        # At the first step both operands are raw; later, what arrives carries the scale already.
        fold = Fold(
            op,
            own_scale=1.0 if step == 0 else prescale,
            prescale=prescale if step == 0 else 1.0,
            postscale=postscale if step == size - 2 else 1.0,
        )
        schedule.send((rank + 1) % size, _following(blocks, rank - step - 1, 1))
        schedule.receive((rank - 1) % size, _following(blocks, rank - step - 2, 1), fold)


def _ring_allgather(schedule: Schedule, blocks: Sequence[Sequence[Range]], rank: int) -> None:
    """Each block starts at its rank and goes all the way."""
    size = len(blocks)
    for step in range(size - 1):
        schedule.send((rank + 1) % size, blocks[(rank - step) % size])
        schedule.receive((rank - 1) % size, blocks[(rank - step - 1) % size])


def _following(blocks: Sequence[Sequence[Range]], first: int, count: int) -> list[Range]:
    """The ranges of ``count`` blocks from number ``first`` on, around the end."""
    return [part for index in range(first, first + count) for part in blocks[index % len(blocks)]]
