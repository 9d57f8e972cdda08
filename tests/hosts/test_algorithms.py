"""Each algorithm across more hosts than a power of two: right sums of every size, in the messages of its schedule."""

from __future__ import annotations

from collections.abc import Callable

from lab import Lab

WORK = """
import numpy as np
import hvdlite
from hvdlite import TensorView
from hvdlite.collectives import algorithms
from hvdlite.collectives.algorithms import Algorithm
from hvdlite.collectives.thresholds import limits_of
from hvdlite.operations.allreduce import allreduce_async

hvdlite.init()
rank, size, config = hvdlite.rank(), hvdlite.size(), hvdlite.runtime().config
taken = set()
for numel in (0, 1, size - 1, 100, 1000, 2001, 30_000):
    for dtype in (np.float32, np.float16, np.int64):
        for time in range(3):
            array = (np.arange(numel) % 7 + rank + time).astype(dtype)
            before = hvdlite.statistics()["ring_messages_sent"]
            view = TensorView.of_numpy(array)
            allreduce_async(hvdlite.runtime().group, [view], [view], name=f"{numel}.{dtype.__name__}").wait()
            sent = hvdlite.statistics()["ring_messages_sent"] - before
            expected = (np.arange(numel) % 7 + time) * size + size * (size - 1) // 2
            assert np.array_equal(array, expected.astype(dtype)), (numel, dtype, time)
            algorithm = limits_of(config.small_bytes, size).algorithm(array.nbytes)
            schedule = algorithms.allreduce(algorithm, numel, array.itemsize, rank, size, config.segment_bytes)
            assert sent == len(schedule.outgoing), (numel, dtype, algorithm, sent)
            taken.add(algorithm)
assert taken == set(Algorithm), taken
hvdlite.shutdown()
print("all sums are right", flush=True)
"""


def test_allreduce_by_every_algorithm(hosts: Callable[..., Lab], mpi: str) -> None:
    env = {"HVDLITE_SMALL_BYTES": "512", "HVDLITE_SEGMENT_BYTES": "2048"}
    result = hosts(5).launch(WORK, ranks_per_host=[1] * 5, mpi=mpi, env=env).check()
    assert result.stdout.count("all sums are right") == 5
