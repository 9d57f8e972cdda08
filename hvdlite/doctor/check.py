"""Whether the ranks of a group compute right sums, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite import TensorView, _native
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.group import Group
from hvdlite.operations.allreduce import allreduce_async

CHECK_BYTES = 32 << 20
"""On one machine."""


def check_group(group: Group, seconds: float, nbytes: int) -> dict[str, float]:
    """On each rank: wrong elements of small allreduces of several types, GB/s of a large one and of a memcpy.

    Args:
        seconds: of each of the two; ``nbytes``: that they move at a time.
    """
    wrong = sum(_wrong(group, dtype) for dtype in (np.int32, np.int64, np.float32, np.float64))
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    view = TensorView.of_numpy(np.zeros(nbytes // 4, np.float32))
    rates = {
        "allreduce": _rate(group, seconds, nbytes, lambda: _sum(group, view)),
        "memcpy": _rate(group, seconds, nbytes, lambda: _native.copy(target.ctypes.data, source.ctypes.data, nbytes)),
    }
    return {"wrong": float(wrong), **rates}


def summary(ranks: list[dict[str, float]], nbytes: int) -> dict[str, Any]:
    """What `check_group` has returned on all ranks, in one; with a problem in words if there is one."""
    wrong = int(sum(rank["wrong"] for rank in ranks))
    result: dict[str, Any] = {
        "ranks": len(ranks),
        "bytes": nbytes,
        "wrong elements": wrong,
        "allreduce GB/s": min(rank["allreduce"] for rank in ranks),
        "memcpy GB/s": min(rank["memcpy"] for rank in ranks),
    }
    if wrong:
        result["problem"] = f"an allreduce had {wrong} wrong elements: report this, with all that is printed here"
    return result


def _wrong(group: Group, dtype: type[np.generic]) -> int:
    """Elements of a sum over ranks that are not what they should be."""
    pattern = np.arange(10_007) % 251
    own = (pattern + group.rank).astype(dtype)
    _sum(group, TensorView.of_numpy(own))
    size = group.size
    return int((own != (pattern * size + size * (size - 1) // 2).astype(dtype)).sum())


def _sum(group: Group, view: TensorView) -> None:
    allreduce_async(group, [view], [view], Reduction(ReduceOp.SUM)).wait()


def _rate(group: Group, seconds: float, nbytes: int, call: Callable[[], object]) -> float:
    """GB/s of calls on ``nbytes``, as many as the slowest rank does in ``seconds``, after one that warms up."""
    call()
    start = time.perf_counter()
    call()
    planned = np.array([max(1, round(seconds / (time.perf_counter() - start)))], np.int64)
    view = TensorView.of_numpy(planned)
    assert view.dtype is DType.INT64
    allreduce_async(group, [view], [view], Reduction(ReduceOp.MIN)).wait()
    calls = int(planned[0])
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return calls * nbytes / (time.perf_counter() - start) / 1e9
