"""A runtime that has nothing to do, or waits for a slow rank, leaves the cores alone."""

from __future__ import annotations

import resource
import time

import pytest
from mpi4py import MPI

from backend_lab import RANK, SIZE
from hvdlite.config import Config
from hvdlite.dtypes import DType
from runtime_lab import LAYOUTS, Machines, Tensor, agree, allreduce, running

WINDOW_S = 0.5
MOST_OF_A_CORE = 0.2  # coarse: what is measured is 0.1 %


def used_s() -> float:
    """CPU seconds of all threads of this process, in user and kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.any_mpi
@pytest.mark.not_with_three_ranks
@pytest.mark.parametrize("machine_of", LAYOUTS, ids=lambda machine_of: "".join(map(str, machine_of)))
def test_waiting_costs_next_to_nothing(comm: MPI.Intracomm, machine_of: Machines) -> None:
    with running(comm, Config(), machine_of) as runtime:
        tensor = Tensor.input(1000, DType.FLOAT32)
        allreduce(runtime, tensor).wait()
        start = used_s()
        time.sleep(WINDOW_S)
        idle = (used_s() - start) / WINDOW_S

        start, began = used_s(), time.monotonic()
        if RANK == SIZE - 1:
            time.sleep(WINDOW_S)
        allreduce(runtime, tensor).wait()
        waiting = (used_s() - start) / (time.monotonic() - began)
        print(f"rank {RANK}: idle {idle:.1%}, waiting for a slow rank {waiting:.1%} of a core")
    agree(
        comm,
        f"rank {RANK} uses {idle:.0%} of a core while idle" if idle > MOST_OF_A_CORE else None,
        f"rank {RANK} uses {waiting:.0%} of a core while it waits" if waiting > MOST_OF_A_CORE else None,
    )
