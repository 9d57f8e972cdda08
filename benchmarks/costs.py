"""What hvdlite costs besides time: processor time while nothing happens or somebody is late, and memory.

    python -m hvdlite run --mpi -np 2 costs.py
    mpirun -np 2 python costs.py --json results/costs.json
    python across_hosts.py --hosts 2 --ranks 1 costs.py --what idle waiting

Processor time is that of a whole process, memory what it has beyond plain torch's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import hvdlite
import hvdlite.torch as hvd
from measure import describe, keep_collector_out, meet, parser_for, provenance, table, write_json
from models import SHORT, Task
from training import Alone, Hvdlite, Way

if TYPE_CHECKING:
    from mpi4py import MPI

PARTS = ("idle", "waiting", "memory")
LAYER = Task(
    "one layer", lambda: nn.Linear(32, 32), lambda: (torch.randn(32, 32), torch.randn(32, 32)), nn.functional.mse_loss
)
STEPS = 10  # until buckets are in the order of backward, and that order is frozen
LOOK_S = 5e-3


def cpu_share(during: Callable[[], object]) -> float:
    """Processor time of this process, all threads, per second."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    during()
    after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - start
    return (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) / seconds


def idle(comm: MPI.Comm, seconds: float) -> list[float]:
    """Shares of a core, by rank, while nobody does anything."""
    meet(comm)
    time.sleep(0.5)
    return comm.allgather(cpu_share(lambda: time.sleep(seconds)))


def waiting(comm: MPI.Comm, way: Way, seconds: float) -> list[dict[str, Any]]:
    """Shares of a core, by rank, while one rank sleeps and the others wait for it, in one way and another."""
    tensor = torch.ones(1000)

    def allreduce() -> None:
        hvd.allreduce(tensor, name="late")

    found = []
    for what, call in (("hvd.allreduce", allreduce), ("optimizer.step", way.step)):
        for late in dict.fromkeys((0, comm.size - 1)):
            call()
            meet(comm)

            def during(call: Callable[[], None] = call, late: int = late) -> None:
                if comm.rank == late:
                    time.sleep(seconds)
                call()

            found.append({"in": what, "late": late, "shares": comm.allgather(cpu_share(during))})
    return found


class Peak:
    """The most memory that this process has inside the context, from looks at short intervals."""

    def __init__(self) -> None:
        self.pss = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.pss = max(self.pss, pss())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def pss() -> int:
    """Bytes in memory: private ones, and of those shared by n processes an n-th. Not of files, as code is."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def settled(comm: MPI.Comm) -> int:
    """`pss`, once all ranks are here and what was freed is given back."""
    gc.collect()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    meet(comm)
    found = pss()
    meet(comm)
    return found


def run(way: Way) -> None:
    for _ in range(STEPS):
        way.step()


def trained(comm: MPI.Comm, way: Way) -> tuple[int, int]:
    """Bytes of memory between steps, with gradients, and at most during steps."""
    run(way)
    settled(comm)  # or memory that somebody before has freed counts
    with Peak() as peak:
        run(way)
    return settled(comm), peak.pss


def memory(comm: MPI.Comm, task: Task, start_bytes: int) -> dict[str, Any]:
    """What hvdlite takes beyond what plain training has, on the rank where that is most.

    Args:
        start_bytes: what hvdlite took before this model.
    """
    way = Alone(task, comm)
    plain_rest, plain_peak = trained(comm, way)
    way.optimizer = hvd.DistributedOptimizer(way.optimizer, named_parameters=way.model.named_parameters())
    own_rest, own_peak = trained(comm, way)
    gradient_bytes = sum(parameter.nbytes for parameter in way.model.parameters())
    beyond = (own_rest - plain_rest + start_bytes, own_peak - plain_peak + start_bytes)
    rest, peak = (max(comm.allgather(nbytes)) for nbytes in beyond)
    return {"gradient_bytes": gradient_bytes, "at_rest_bytes": rest, "at_peak_bytes": peak}


def print_shares(title: str, shares: dict[str, list[float]]) -> None:
    ranks = len(next(iter(shares.values())))
    rows = [[label, *(f"{100 * share:.2f}" for share in own)] for label, own in shares.items()]
    print(f"\n{title}: % of a core\n" + table(["", *(f"rank {rank}" for rank in range(ranks))], rows), flush=True)


def print_memory(found: dict[str, dict[str, Any]], start_bytes: int) -> None:
    print(f"\nmemory, MiB; of it before the first model: {start_bytes / 2**20:.1f}")
    rows = [
        [label, *(f"{row[key] / 2**20:.1f}" for key in ("gradient_bytes", "at_rest_bytes", "at_peak_bytes"))]
        for label, row in found.items()
    ]
    print(table(["", "gradients", "beyond them", "at the peak of a step"], rows))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--what", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    names = [task.name for task in SHORT]
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL", help="for memory")
    parser.add_argument("--idle-s", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--wait-s", type=float, default=5.0, help="default: %(default)s")
    options = parser.parse_args()

    torch.set_num_threads(1)
    from mpi4py import MPI  # starts MPI, whose memory is not hvdlite's

    comm = MPI.COMM_WORLD.Dup()
    keep_collector_out()
    run(Alone(LAYER, comm))
    before = settled(comm)
    hvd.init()
    way = Hvdlite(LAYER, comm)
    run(way)
    start_bytes = max(comm.allgather(settled(comm) - before))
    facts = provenance(comm, len(hvdlite.runtime().topology.nodes))
    report: dict[str, Any] = {"benchmark": "costs", **facts}
    if comm.rank == 0:
        print(describe(facts), flush=True)
    report |= measure(comm, options, way, start_bytes)
    if comm.rank == 0:
        write_json(options.json, report)


def measure(comm: MPI.Comm, options: argparse.Namespace, way: Way, start_bytes: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "memory" in options.what:
        chosen = [task for task in SHORT if task.name in options.models]
        found["memory"] = {task.name: memory(comm, task, start_bytes) for task in chosen}
        found["start_bytes"] = start_bytes
        if comm.rank == 0:
            print_memory(found["memory"], start_bytes)
        run(way)  # until its order is frozen again
    if "idle" in options.what:
        found["idle"] = idle(comm, options.idle_s)
        if comm.rank == 0:
            print_shares(f"idle for {options.idle_s:g} s", {"": found["idle"]})
    if "waiting" in options.what:
        found["waiting"] = waiting(comm, way, options.wait_s)
        if comm.rank == 0:
            shares = {f"{each['in']}, rank {each['late']} late": each["shares"] for each in found["waiting"]}
            print_shares(f"one rank {options.wait_s:g} s late", shares)
    return found


if __name__ == "__main__":
    main()
