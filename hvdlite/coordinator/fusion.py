"""Which operations travel together: pure, ordered responses in, buckets out; every rank fuses alike."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence

from hvdlite.config import Config
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.request import Request

_CHUNKS_OF_BURST = 8


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


def burst_bytes(config: Config) -> int:
    """Of the operations of a burst: more at a time takes no less for each byte, and comes later."""
    return min(config.fusion_threshold_bytes, _CHUNKS_OF_BURST * config.chunk_bytes)


def bursts(requests: Sequence[Request], after_pause: Container[int], limit_bytes: int) -> list[int]:
    """At which operations of a plan bursts begin, which are done together: `fuse` makes one bucket of each.

    Args:
        after_pause: operations that some rank may submit only when it has waited for those before.
        limit_bytes: of the operations of a burst; what has more goes alone.
    """
    begins: list[int] = []
    open_key: Hashable = None
    filled = 0
    for place, request in enumerate(requests):
        key, nbytes = request.fusion
        if place in after_pause or key is None or key != open_key or filled + nbytes > limit_bytes:
            begins.append(place)
            open_key, filled = key, 0
        filled += nbytes
    return begins
