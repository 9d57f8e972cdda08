"""Which operations travel together: pure, ordered responses in, buckets out; every rank fuses alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.request import Request


def fuse(responses: Sequence[Response], threshold_bytes: int) -> list[list[Response]]:
    """Group responses for execution, in the order of the first of each group.

    Requests of the same `Request.fusion` travel together, as long as together they have at most ``threshold_bytes``; a
    later small one may still join an earlier bucket (Horovod's look-ahead). All else goes alone.
    """
    if len(responses) == 1:
        return [[*responses]]
    buckets: list[list[Response]] = []
    open_buckets: dict[Hashable, tuple[list[Response], int]] = {}
    for response in responses:
        key, nbytes = response.request.fusion
        if key is None:
            buckets.append([response])
            continue
        bucket, filled = open_buckets.get(key, ([], 0))
        if not bucket or filled + nbytes > threshold_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(response)
        open_buckets[key] = bucket, filled + nbytes
    return buckets


def bursts(requests: Sequence[Request], joined: Sequence[bool], limit_bytes: int) -> list[int]:
    """How many operations of a plan, one burst after the other, are done together: `fuse` makes one bucket of each.

    Args:
        joined: whether no rank waits for what comes before, when it submits this.
        limit_bytes: of the operations of a burst; what has more goes alone.
    """
    lengths: list[int] = []
    open_key: Hashable = None
    filled = 0
    for request, is_joined in zip(requests, joined, strict=True):
        key, nbytes = request.fusion
        if is_joined and key is not None and key == open_key and filled + nbytes <= limit_bytes:
            lengths[-1] += 1
            filled += nbytes
        else:
            lengths.append(1)
            open_key, filled = key, nbytes
    return lengths
