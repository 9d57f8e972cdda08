"""Which gradients travel together, and where they live: pure decisions, alike on every rank that is told the same.

The first step guesses that gradients arrive in the reverse of the order of the parameters. At its end the order in
which they did arrive on the first rank becomes everybody's, with buckets of the size that suits nodes and network.
Homes for gradients are made where they are of use: across nodes at once, and for buckets of small ones; for others on
one node after the second step, if they stay.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

BUCKET_BYTES = 8 << 20  # where nothing is known
_GPU_BUCKET_BYTES = 32 << 20  # GPUs of a node reduce so much in the time that a bucket takes the host, some 150 us
_EDGE_FRACTION = 8  # the first and the last bucket have at most this part of a full one
_LEAST_BUCKET_BYTES = 1 << 20
_BUCKET_S = 8e-3  # on the wire: far more than a bucket costs beside its bytes, and soon over when backward is


class Phase(Enum):
    """How far the ranks have come in dividing gradients into buckets."""

    UNASSIGNED = auto()
    BY_REGISTRATION = auto()
    """A guess, for one step; which gradients are sparse is not agreed on either."""
    BY_ARRIVAL = auto()
    """The order is known, and one more step will show whether large gradients stay where they are."""
    SETTLED = auto()
    """As long as the parameters that need gradients are the same."""

    def after_agreement(self, *, homes_may_follow: bool) -> Phase:
        """The phase once the ranks have agreed on a `Bucketing` at the end of a step."""
        return Phase.BY_ARRIVAL if self is Phase.BY_REGISTRATION and homes_may_follow else Phase.SETTLED


class Bucketing(NamedTuple):
    """What the first rank chooses for all.

    Attributes:
        bucket_bytes: of a bucket, where the settings name no size.
        has_homes: whether large gradients live in the fusion buffer.
        order: gradients, the first to arrive first; each is in a bucket.
    """

    bucket_bytes: int
    has_homes: bool
    order: Sequence[int]

    def encode(self, gradients: int) -> list[int]:
        """As many integers for any order of some of ``gradients``."""
        return [self.bucket_bytes, int(self.has_homes), *self.order, *[-1] * (gradients - len(self.order))]

    @classmethod
    def decode(cls, sent: Sequence[int]) -> Bucketing:
        bucket_bytes, has_homes, *order = sent
        return cls(bucket_bytes, bool(has_homes), [index for index in order if index >= 0])


def arrival_order(arrived: Sequence[int], expected: Sequence[int]) -> list[int]:
    """``arrived``, by the last time of each where there were several passes; then those ``expected`` that did not."""
    order = list(dict.fromkeys(reversed(arrived)))[::-1]
    seen = set(order)
    return order + [gradient for gradient in expected if gradient not in seen]


def choose_bucket_bytes(nodes: int, cores: int, threads: int, bytes_per_s: float) -> int | None:
    """How large buckets should be; None: all gradients in one.

    Where every core of the only node computes, reducing while backward runs takes from it what waiting would, and more,
    for changes of threads and for what the two push out of each other's cache. Across nodes waiting for the network
    takes no core, and the smaller buckets are, the less is left to reduce when backward is over. GPUs of a node are so
    fast that what a bucket costs beside its bytes counts.

    Args:
        nodes: of the ranks that reduce.
        cores: of a node.
        threads: that compute on these cores, all ranks together; 0: GPUs do.
        bytes_per_s: that an allreduce across nodes has been seen to do; 0: not seen.
    """
    if nodes == 1 and threads == 0:
        return _GPU_BUCKET_BYTES
    if nodes == 1:
        return None if threads >= cores else BUCKET_BYTES
    if bytes_per_s == 0:
        return BUCKET_BYTES
    return min(max(int(bytes_per_s * _BUCKET_S), _LEAST_BUCKET_BYTES), BUCKET_BYTES)


def choose_homes(nodes: int, *, have: bool, stay: bool) -> bool:
    """Whether large gradients should live in the fusion buffer.

    Args:
        nodes: of the ranks that reduce.
        have: whether they do already.
        stay: whether gradients were in the same tensors as one step before.
    """
    return nodes > 1 or have or stay


def assign_buckets(
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
