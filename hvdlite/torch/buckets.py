"""Which gradients travel together: pure, an order of arrival in, buckets out; every rank plans the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

BUCKET_BYTES = 8 << 20  # where nothing is known
_EDGE_FRACTION = 8  # the first and the last bucket have at most this part of a full one
_LEAST_BUCKET_BYTES = 1 << 20
_BUCKET_S = 8e-3  # on the wire: far more than a bucket costs beside its bytes, and soon over when backward is


def choose_bucket_bytes(nodes: int, cores: int, threads: int, bytes_per_s: float) -> int | None:
    """How large buckets should be; None: all gradients in one.

    Where every core of the only node computes, reducing while backward runs takes from it what waiting would, and more,
    for changes of threads and for what the two push out of each other's cache. Across nodes waiting for the network
    takes no core, and the smaller buckets are, the less is left to reduce when backward is over.

    Args:
        nodes: of the ranks that reduce.
        cores: of a node.
        threads: that compute on these cores, all ranks together.
        bytes_per_s: that an allreduce across nodes has been seen to do; 0: not seen.
    """
    if nodes == 1:
        return None if threads >= cores else BUCKET_BYTES
    if bytes_per_s == 0:
        return BUCKET_BYTES
    return min(max(int(bytes_per_s * _BUCKET_S), _LEAST_BUCKET_BYTES), BUCKET_BYTES)


def plan_buckets(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    bucket_bytes: int,
    groups: Sequence[Sequence[int]] = (),
    edge_bytes: int | None = None,
) -> list[list[int]]:
    """Cut tensors into buckets in the order in which backward produces their gradients.

    The first and the last bucket of each kind are small: the first so that communication starts early, the last
    because nothing hides it, as backward is over when it is complete. A tensor above the limit is alone.

    Args:
        nbytes: of tensor i.
        kinds: of tensor i; only tensors of one kind share a bucket (their dtype, for example).
        order: tensors, the first to arrive first; each at most once. Others are in no bucket.
        bucket_bytes: most bytes of a bucket of several tensors; 0 keeps every tensor apart.
        groups: tensors that must be together, whatever their size; of each group one bucket per kind.
        edge_bytes: most bytes of the first and the last bucket; an eighth of ``bucket_bytes`` if None.

    Returns:
        Tensors per bucket, the first to be complete first.
    """
    position = {tensor: place for place, tensor in enumerate(order)}
    group_of = {tensor: number for number, group in enumerate(groups) for tensor in group}
    together: dict[Hashable, list[int]] = {}
    apart: dict[Hashable, list[int]] = {}
    for tensor in order:
        if tensor in group_of:
            together.setdefault((group_of[tensor], kinds[tensor]), []).append(tensor)
        else:
            apart.setdefault(kinds[tensor], []).append(tensor)
    if edge_bytes is None:
        edge_bytes = bucket_bytes // _EDGE_FRACTION
    buckets = list(together.values())
    for tensors in apart.values():
        buckets += _cut(tensors, nbytes, bucket_bytes, edge_bytes)
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def split_evenly(order: Sequence[int], parts: int) -> list[list[int]]:
    """``order`` in at most ``parts`` consecutive parts of the same number of tensors, as far as that goes."""
    bounds = [len(order) * part // parts for part in range(parts + 1)]
    return [list(order[start:stop]) for start, stop in pairwise(bounds) if start < stop]


def _cut(tensors: list[int], nbytes: Sequence[int], bucket_bytes: int, edge_bytes: int) -> list[list[int]]:
    last = _fill(tensors[::-1], nbytes, edge_bytes)[::-1]
    rest = tensors[: len(tensors) - len(last)]
    limit = edge_bytes
    buckets = []
    while rest:
        bucket = _fill(rest, nbytes, limit)
        buckets.append(bucket)
        rest = rest[len(bucket) :]
        limit = bucket_bytes
    return [*buckets, last]


def _fill(tensors: Sequence[int], nbytes: Sequence[int], limit: int) -> list[int]:
    """As many of the first tensors as fit ``limit`` bytes together; at least one."""
    filled = nbytes[tensors[0]]
    count = 1
    while count < len(tensors) and filled + nbytes[tensors[count]] <= limit:
        filled += nbytes[tensors[count]]
        count += 1
    return list(tensors[:count])
