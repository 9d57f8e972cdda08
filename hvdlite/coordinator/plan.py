"""Which responses travel together: pure, ordered responses in, buckets out; every rank plans the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from hvdlite.coordinator.messages import KNOWN_REQUESTS, Kind, Request, Response
from hvdlite.dtypes import DType


def plan_buckets(responses: Sequence[Response], threshold_bytes: int) -> list[list[Response]]:
    """Group responses for execution, in the order of the first of each group.

    Allreduces of tensors from elsewhere fuse with those of the same dtype, op, scales and wire dtype, as long as
    together they have at most ``threshold_bytes``; a later small one may still join an earlier bucket (Horovod's
    look-ahead). Everything else, and tensors that live in their slots, goes alone.
    """
    if len(responses) == 1:
        return [[*responses]]
    buckets: list[list[Response]] = []
    open_buckets: dict[tuple[object, ...], tuple[list[Response], int]] = {}
    for response in responses:
        key, nbytes = _fusion(response.request)
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


@lru_cache(maxsize=KNOWN_REQUESTS)
def _fusion(request: Request) -> tuple[tuple[object, ...] | None, int]:
    """What must be equal for two requests to be fused, None where one goes alone; and how much this one fills."""
    if request.kind is not Kind.ALLREDUCE or request.place is not None:
        return None, 0
    dtypes: set[DType] = {tensor.dtype for tensor in request.tensors}
    if len(dtypes) != 1:
        return None, 0
    nbytes = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in request.tensors)
    return (*dtypes, request.op, request.prescale, request.postscale, request.wire_dtype), nbytes
