"""Which responses travel together: pure, ordered responses in, buckets out; every rank plans the same."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.coordinator.messages import Kind, Request, Response
from hvdlite.dtypes import DType


def plan_buckets(responses: Sequence[Response], threshold_bytes: int) -> list[list[Response]]:
    """Group responses for execution, in the order of the first of each group.

    Allreduces of tensors from elsewhere fuse with those of the same dtype, op, scales and wire dtype, as long as
    together they have at most ``threshold_bytes``; a later small one may still join an earlier bucket (Horovod's
    look-ahead). Everything else, and tensors that live in their slots, goes alone.
    """
    buckets: list[list[Response]] = []
    open_buckets: dict[tuple[object, ...], tuple[list[Response], int]] = {}
    for response in responses:
        key = _fusion_key(response.request)
        if key is None:
            buckets.append([response])
            continue
        nbytes = request_bytes(response.request)
        bucket, filled = open_buckets.get(key, ([], 0))
        if not bucket or filled + nbytes > threshold_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(response)
        open_buckets[key] = bucket, filled + nbytes
    return buckets


def request_bytes(request: Request) -> int:
    """Bytes of all tensors, as the user holds them (without dimension 0 of an allgather)."""
    total = 0
    for tensor in request.tensors:
        numel = 1
        for extent in tensor.shape:
            numel *= extent
        total += numel * tensor.dtype.itemsize
    return total


def _fusion_key(request: Request) -> tuple[object, ...] | None:
    """What must be equal for two requests to be fused; None where a request goes alone."""
    if request.kind is not Kind.ALLREDUCE or request.place is not None:
        return None
    dtypes: set[DType] = {tensor.dtype for tensor in request.tensors}
    if len(dtypes) != 1:
        return None
    return (*dtypes, request.op, request.prescale, request.postscale, request.wire_dtype)
