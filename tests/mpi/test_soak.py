"""Thousands of steps of small random operations, in random order, with random delays: right sums, no hang or growth."""

from __future__ import annotations

import gc
import os
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from mpi4py import MPI

from backend_lab import RANK, SIZE
from hvdlite.config import Config
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import ReduceOp, Reduction
from hvdlite.job_runtime import Runtime
from hvdlite.memory.views import TensorView
from hvdlite.operations.allgather import allgather_async
from hvdlite.operations.allocate import allocate
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.broadcast import broadcast_async
from runtime_lab import LAYOUTS, agree, running

STEPS = 3_000 if SIZE == 2 else 1_000  # elsewhere a shorter one: all counts of ranks together would take minutes
WARM_UP = STEPS // 5
NAMES = 60
IN_FLIGHT = 3  # steps
SLOT_BYTES = 2048
GROWTH_BYTES = 4 << 20
TYPES = [np.float32, np.float64, np.float16, np.int32, np.int8, np.uint8]


def value(rank: int, step: int, name: int) -> int:
    """From 1 to 8: sums over 8 ranks are exact in every type."""
    return (rank * 5 + step * 3 + name) % 8 + 1


@dataclass
class Pending:
    """An operation in flight, and what must come of it."""

    handle: Submission
    check: Callable[[], str | None]
    keep: object


def all_equal(array: np.ndarray, expected: float, what: str) -> str | None:
    return None if (array == expected).all() else f"{what}: expected {expected}, got {array[:4]}"


class Worker:
    """Submits the operations of a step; ``common`` gives the same numbers on every rank, ``own`` does not."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._slots = allocate(runtime.group, IN_FLIGHT * NAMES * SLOT_BYTES).memory

    def submit(self, step: int, name: int, common: random.Random) -> Callable[[], Pending]:
        """Decides with the others what ``name`` is in this step; returns what starts it."""
        dtype, numel = TYPES[name % len(TYPES)], common.choice([1, 2, 17, 100, 250])
        kind = common.choices(["allreduce", "slot", "group", "allgather", "broadcast"], [6, 3, 2, 2, 2])[0]
        root = common.randrange(SIZE)
        mine = value(RANK, step, name)
        label = f"{step % IN_FLIGHT}.{name}"
        if kind == "allgather":
            return lambda: self._allgather(label, step, name, numel)
        if kind == "broadcast":
            return lambda: self._broadcast(label, np.full(numel, mine, dtype), root, value(root, step, name))
        op, combine = common.choice([(ReduceOp.SUM, sum), (ReduceOp.MAX, max), (ReduceOp.MIN, min)])
        expected = float(combine(value(rank, step, name) for rank in range(SIZE)))
        if kind == "slot":
            start = ((step % IN_FLIGHT) * NAMES + name) * SLOT_BYTES
            array = self._slots[start : start + SLOT_BYTES].view(dtype)[:numel]
            return lambda: self._reduce(label, [array], mine, op, expected)
        count = common.randrange(2, 5) if kind == "group" else 1
        return lambda: self._reduce(label, [np.empty(numel + i, dtype) for i in range(count)], mine, op, expected)

    def _reduce(self, label: str, arrays: list[np.ndarray], mine: int, op: ReduceOp, expected: float) -> Pending:
        for array in arrays:
            array[:] = mine
        views = [TensorView.of_numpy(array) for array in arrays]
        handle = allreduce_async(self._runtime.group, views, views, Reduction(op), name=label)
        check = lambda: next((p for a in arrays if (p := all_equal(a, expected, f"{op.label} {label}"))), None)  # noqa: E731
        return Pending(handle, check, arrays)

    def _allgather(self, label: str, step: int, name: int, numel: int) -> Pending:
        rows = [(value(rank, step, name) * (numel % 5 + 1)) % 11 for rank in range(SIZE)]
        mine = np.full((rows[RANK], 2), value(RANK, step, name), np.int16)
        result: list[np.ndarray] = []

        def allocate(index: int, shape: tuple[int, ...]) -> TensorView:
            result.append(np.zeros(shape, np.int16))
            return TensorView.of_numpy(result[-1])

        def check() -> str | None:
            expected = np.repeat([value(rank, step, name) for rank in range(SIZE)], rows)
            good = result[0].shape == (sum(rows), 2) and (result[0] == expected[:, None]).all()
            return None if good else f"allgather {label}: expected {expected}, got {result[0][:, 0]}"

        handle = allgather_async(self._runtime.group, [TensorView.of_numpy(mine)], allocate, name=label)
        return Pending(handle, check, mine)

    def _broadcast(self, label: str, array: np.ndarray, root: int, expected: int) -> Pending:
        handle = broadcast_async(self._runtime.group, [TensorView.of_numpy(array)], root_rank=root, name=label)
        return Pending(handle, lambda: all_equal(array, expected, f"broadcast {label}"), array)


def resources() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident": resident,
    }


@pytest.mark.any_mpi
@pytest.mark.time_limit(400)
@pytest.mark.up_to_three_ranks
def test_thousands_of_steps(comm: MPI.Intracomm) -> None:
    """On two runtimes in turn: one of a single node, one of several. The cache is smaller than the number of names."""
    config = Config(cache_capacity=100, spin_us=0, small_bytes=256, segment_bytes=1024)
    common, own = random.Random(1), random.Random(1000 + RANK)
    problems: list[str] = []
    pending: deque[list[Pending]] = deque()
    before: dict[str, int] = {}
    with running(comm, config) as one, running(comm, config, LAYOUTS[-1]) as several:
        workers = [Worker(one), Worker(several)]
        for step in range(STEPS):
            if step == WARM_UP:
                before = resources()
            worker = workers[common.random() < 0.3]
            chosen = [] if common.random() < 0.05 else common.sample(range(NAMES), common.randrange(1, 7))
            starts = [worker.submit(step, name, common) for name in chosen]
            own.shuffle(starts)
            if own.random() < 0.01:
                time.sleep(own.random() * 3e-3)
            pending.append([start() for start in starts])
            if len(pending) == IN_FLIGHT:
                for operation in pending.popleft():
                    operation.handle.wait()
                    if problem := operation.check():
                        problems.append(f"step {step}: {problem}")
        for operation in (operation for operations in pending for operation in operations):
            operation.handle.wait()
        after = resources()
    growth = {name: after[name] - before[name] for name in after}
    print(f"rank {RANK}: {growth['resident'] / (STEPS - WARM_UP):.0f} bytes per step, {growth}")
    agree(
        comm,
        *problems[:3],
        f"{growth['files']} more files" if growth["files"] > 0 else None,
        f"{growth['threads']} more threads" if growth["threads"] > 0 else None,
        f"{growth['resident']} bytes more memory" if growth["resident"] > GROWTH_BYTES else None,
    )
