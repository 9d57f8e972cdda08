"""Allreduce of a tensor in its slot: 16-bit types beside float32, and more ranks than cores beside as many.

    python -m hvdlite run --mpi -np 4 slot.py
    mpirun -np 4 python slot.py --json results/slot.json

One job for all of it: the first ranks, as many as there are cores, are a process set of their own, and while they
measure the others sleep. All ways take turns.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import hvdlite.torch as hvd
from hvdlite.operations.allocate import allocate
from measure import (
    begin,
    describe,
    estimate,
    in_turns,
    median_ratio,
    meet,
    parser_for,
    show,
    slowest,
    summary,
    table,
    write_json,
)

if TYPE_CHECKING:
    from mpi4py import MPI

CALLS = 3  # of a block; after one more, values are at most 3 * 4**4, which every type has
NAP_S = 2e-3  # between two looks of a rank that waits, which shall not take a core from those that measure


class Slot:
    """``nbytes`` of ``dtype`` in a fusion buffer of ``process_set``; on its members only."""

    def __init__(self, process_set: hvd.ProcessSet, dtype: torch.dtype, nbytes: int) -> None:
        self.label = f"{str(dtype).removeprefix('torch.')}, {process_set.size()} ranks"
        self._ranks = process_set.size()
        self._process_set = process_set
        group = process_set.group_of_members()
        self._tensor = None
        if group is not None:
            memory = allocate(group, nbytes).memory.view(np.uint8)
            self._tensor = torch.from_numpy(memory[:nbytes]).view(dtype)

    def block(self, comm: MPI.Comm) -> float:
        """Seconds per call, one more going before; 0 on ranks that are no members.

        Raises:
            AssertionError: a result is wrong.
        """
        if self._tensor is not None:
            pattern = torch.arange(1, 4, dtype=self._tensor.dtype).repeat(len(self._tensor) // 3 + 1)
            self._tensor.copy_(pattern[: len(self._tensor)])
        meet(comm, NAP_S)
        seconds = 0.0
        if self._tensor is not None:
            self._call()
            start = time.perf_counter()
            for _ in range(CALLS):
                self._call()
            seconds = (time.perf_counter() - start) / CALLS
            assert torch.equal(self._tensor, pattern[: len(self._tensor)] * self._ranks ** (CALLS + 1)), self.label
        meet(comm, NAP_S)
        return seconds

    def _call(self) -> None:
        hvd.allreduce_(self._tensor, op=hvd.Sum, name=self.label, process_set=self._process_set)


def main() -> None:
    parser = parser_for(__doc__, rounds=20)
    parser.add_argument("--bytes", type=int, default=64 << 20, help="default: %(default)s")
    options = parser.parse_args()

    torch.set_num_threads(1)
    comm, facts = begin()
    few = min(len(os.sched_getaffinity(0)), comm.size)
    some = hvd.add_process_set(list(range(few))) if few < comm.size else hvd.global_process_set
    slots = [Slot(some, dtype, options.bytes) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    if few < comm.size:
        slots.append(Slot(hvd.global_process_set, torch.float32, options.bytes))
    for slot in slots:
        slot.block(comm)
    seconds: dict[str, list[float]] = {slot.label: [] for slot in slots}
    for slot in in_turns(slots, options.rounds):
        seconds[slot.label].append(slot.block(comm))
    times = {label: slowest(comm, own) * 1e3 for label, own in seconds.items()}
    reference = times[slots[0].label]
    ways: dict[str, dict[str, Any]] = {}
    for label, own in times.items():
        median, p95 = summary(own)
        ways[label] = {"median_ms": median, "p95_ms": p95, "time_of_first": estimate(median_ratio, own, reference)}
    if comm.rank == 0:
        print(describe(facts))
        print(f"{options.bytes / 2**20:g} MiB in its slot; relative: time / that of {slots[0].label}")
        rows = [
            [label, f"{way['median_ms']:.2f}", f"{way['p95_ms']:.2f}", show(way["time_of_first"], 2)]
            for label, way in ways.items()
        ]
        print(table(["", "median ms", "p95 ms", "relative"], rows))
        report = {"benchmark": "slot", **facts, "bytes": options.bytes, "few": few, "ways": ways}
        write_json(options.json, report)


if __name__ == "__main__":
    main()
