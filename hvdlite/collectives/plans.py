"""What each algorithm between nodes sends, and in which order; docs/algorithms.md has its steps and bytes.

A plan is that of one rank of several. Plans follow from sizes and ranks alone, and need no MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import TypeVar

from hvdlite.collectives.base import Range
from hvdlite.collectives.pipeline import Fold, Plan
from hvdlite.dtypes import ReduceOp
from hvdlite.memory import shard_bounds

T = TypeVar("T")


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
    op: ReduceOp = ReduceOp.SUM,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Plan:
    """Every rank ends with all ``numel`` elements, reduced; messages have at most ``segment_bytes``."""
    plan = Plan(segment_bytes // itemsize)
    if algorithm is Algorithm.DOUBLING:
        _doubling(plan, numel, rank, size, op, prescale, postscale)
        return plan
    shards = [shard_bounds(numel, size, part, itemsize) for part in range(size)]
    _reduce_scatter(algorithm, plan, shards, rank, op, prescale, postscale)
    _allgather(algorithm, plan, [[shard] for shard in shards], rank)
    return plan


def reduce_scatter(
    algorithm: Algorithm,
    shards: Sequence[Range],
    rank: int,
    piece_numel: int,
    op: ReduceOp,
    prescale: float,
    postscale: float,
) -> Plan:
    """Rank r ends with ``shards[r]``, reduced."""
    plan = Plan(piece_numel)
    _reduce_scatter(algorithm, plan, shards, rank, op, prescale, postscale)
    return plan


def allgather(algorithm: Algorithm, blocks: Sequence[Sequence[Range]], rank: int, piece_numel: int) -> Plan:
    """Rank r starts with ``blocks[r]``, and all end with all blocks."""
    plan = Plan(piece_numel)
    _allgather(algorithm, plan, blocks, rank)
    return plan


def chain_broadcast(numel: int, root: int, rank: int, size: int, piece_numel: int) -> Plan:
    """From ``root`` to the right, up to the rank on its left."""
    plan = Plan(piece_numel)
    if rank != root:
        plan.receive((rank - 1) % size, [(0, numel)])
    if (rank + 1) % size != root:
        plan.send((rank + 1) % size, [(0, numel)])
    return plan


def tree_broadcast(numel: int, root: int, rank: int, size: int, piece_numel: int) -> Plan:
    """Down a binomial tree."""
    plan = Plan(piece_numel)
    place = (rank - root) % size
    distance = 1
    while distance < size and place % (2 * distance) == 0:
        distance *= 2
    if place > 0:
        plan.receive((rank - distance) % size, [(0, numel)])
    while distance > 1:
        distance //= 2
        if place + distance < size:
            plan.send((rank + distance) % size, [(0, numel)])
    return plan


def _reduce_scatter(
    algorithm: Algorithm,
    plan: Plan,
    shards: Sequence[Range],
    rank: int,
    op: ReduceOp,
    prescale: float,
    postscale: float,
) -> None:
    reduce = _ring_reduce_scatter if algorithm is Algorithm.RING else _halving_reduce_scatter
    reduce(plan, shards, rank, op, prescale, postscale)


def _allgather(algorithm: Algorithm, plan: Plan, blocks: Sequence[Sequence[Range]], rank: int) -> None:
    gather = _ring_allgather if algorithm is Algorithm.RING else _doubling_allgather
    gather(plan, blocks, rank)


def _doubling(plan: Plan, numel: int, rank: int, size: int, op: ReduceOp, prescale: float, postscale: float) -> None:
    """Partners exchange everything and combine it, at distances 1, 2, 4, ...; lower ranks come first in every sum.

    So every rank computes the same expression, and gets the same bits. Of n = 2^k + m ranks the first m pairs act as
    one rank each.
    """
    whole = [(0, numel)]
    power = 1 << (size.bit_length() - 1)
    pairs = size - power
    own = rank - pairs
    if rank < 2 * pairs:
        partner = rank ^ 1
        if partner < rank:
            plan.send(partner, whole)
            plan.receive(partner, whole)
            return
        plan.receive(partner, whole, Fold(op, prescale=prescale, own_first=True))
        own = rank // 2
    elif pairs > 0:
        plan.scale_first((0, numel), prescale)
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
        plan.send(partner, whole)
        plan.receive(partner, whole, fold)
        distance *= 2
    if rank < 2 * pairs:
        plan.send(rank + 1, whole)


def _halvings(size: int) -> list[tuple[int, int]]:
    """How many blocks a rank has in each round of recursive halving, and how many it keeps: the larger half."""
    rounds = []
    while size > 1:
        rounds.append((size, (size + 1) // 2))
        size = (size + 1) // 2
    return rounds


def _halving_reduce_scatter(
    plan: Plan, shards: Sequence[Range], rank: int, op: ReduceOp, prescale: float, postscale: float
) -> None:
    """In each round a rank keeps the shards of the ranks that follow it, itself first, and sends the further half on.

    A contribution to the shard of the rank d ahead goes there in the skips that add up to d: of each rank one way only.
    Any number of ranks takes ceil(log2 n) rounds, in which each sends n - 1 shards (Träff 2024, arXiv:2410.14234).
    """
    size = len(shards)
    for blocks, kept in _halvings(size):
        last = kept == 1
        fold = Fold(op, prescale=prescale if blocks == size else 1.0, postscale=postscale if last else 1.0)
        if blocks == size and size % 2 == 1:
            # The one shard that neither leaves nor gets anything in the first round, where others are scaled.
            plan.scale_first(shards[(rank + kept - 1) % size], prescale)
        # What goes on in the next round comes first. The last shard goes on from its begin, in `_doubling_allgather`.
        plan.send((rank + kept) % size, _following(shards, rank + kept, blocks - kept), backwards=not last)
        plan.receive((rank - kept) % size, _following(shards, rank, blocks - kept), fold, backwards=not last)


def _doubling_allgather(plan: Plan, blocks: Sequence[Sequence[Range]], rank: int) -> None:
    """The way of `_halving_reduce_scatter` back: in each round a rank gets as many blocks as it has, or one less.

    Bruck et al. 1997, doi:10.1109/71.642949.
    """
    size = len(blocks)

    def ranges(first: int, count: int) -> list[Range]:
        return [part for parts in _following(blocks, first, count) for part in parts]

    for now, before in reversed(_halvings(size)):
        plan.send((rank - before) % size, ranges(rank, now - before))
        plan.receive((rank + before) % size, ranges(rank + before, now - before))


def _ring_reduce_scatter(
    plan: Plan, shards: Sequence[Range], rank: int, op: ReduceOp, prescale: float, postscale: float
) -> None:
    """Each shard starts at the rank behind its own and goes all the way around."""
    size = len(shards)
    for step in range(size - 1):
        # At the first step both operands are raw; later, what arrives carries the scale already.
        fold = Fold(
            op,
            own_scale=1.0 if step == 0 else prescale,
            prescale=prescale if step == 0 else 1.0,
            postscale=postscale if step == size - 2 else 1.0,
        )
        plan.send((rank + 1) % size, _following(shards, rank - step - 1, 1))
        plan.receive((rank - 1) % size, _following(shards, rank - step - 2, 1), fold)


def _ring_allgather(plan: Plan, blocks: Sequence[Sequence[Range]], rank: int) -> None:
    """Each block starts at its rank and goes all the way."""
    size = len(blocks)
    for step in range(size - 1):
        plan.send((rank + 1) % size, blocks[(rank - step) % size])
        plan.receive((rank - 1) % size, blocks[(rank - step - 1) % size])


def _following(items: Sequence[T], first: int, count: int) -> list[T]:
    """``count`` of ``items`` from number ``first`` on, around the end."""
    return [items[index % len(items)] for index in range(first, first + count)]
