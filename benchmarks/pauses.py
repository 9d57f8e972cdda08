"""What a small operation takes that comes after a pause, and what waiting costs meanwhile.

    python across_hosts.py --hosts 4 --ranks 1 --rate 10gbit pauses.py --json results/pauses.json     # needs root

Every rank pauses and then waits for an allreduce of 4 B. After a pause everybody sleeps who has to do with it, so this
is the time that wake-ups take: of ranks, and of the leaders of other nodes.
"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

import hvdlite.torch as hvd
from measure import begin, describe, meet, parser_for, slowest, table, write_json

if TYPE_CHECKING:
    from mpi4py import MPI

WARM_UP = 100  # calls: until the request is known, and its order is frozen
PAUSES_MS = [0.0, 1.0, 10.0, 100.0]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--pauses-ms", type=float, nargs="+", default=PAUSES_MS, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: %(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(1)
    comm, facts = begin()
    rows = [after(pause_ms / 1e3, comm, options.seconds) for pause_ms in options.pauses_ms]
    shares = {"idle": idle(comm, options.seconds), "waiting for rank 0": waiting(comm, options.seconds)}
    if comm.rank == 0:
        print(describe(facts))
        lines = [[f"{row['pause_ms']:g}", *(f"{row[name]:.0f}" for name in ("median_us", "p99_us"))] for row in rows]
        print("\n" + table(["pause ms", "median us", "99th percentile us"], lines))
        print("\n" + table(["all ranks", "% of a core, at most"], [[k, f"{v:.2%}"] for k, v in shares.items()]))
        write_json(options.json, {"benchmark": "pauses", **facts, "rows": rows, "share_of_a_core": shares})


def after(pause_s: float, comm: MPI.Comm, seconds: float) -> dict[str, float]:
    """An allreduce after each of many pauses, on the slowest rank."""
    tensor = torch.zeros(1)
    calls = int(max(20, seconds / (pause_s + 1e-3)))

    def call() -> float:
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter()
        hvd.allreduce(tensor, op=hvd.Sum, name="one")
        return time.perf_counter() - start

    for _ in range(WARM_UP if pause_s < 0.01 else 5):
        call()
    meet(comm)
    call()
    worst = slowest(comm, [call() for _ in range(calls)]) * 1e6
    return {
        "pause_ms": pause_s * 1e3,
        "calls": calls,
        "median_us": float(np.median(worst)),
        "p99_us": float(np.quantile(worst, 0.99)),
    }


def idle(comm: MPI.Comm, seconds: float) -> float:
    """The share of a core that the busiest rank uses while nobody submits anything."""
    meet(comm)
    before = used_s()
    time.sleep(seconds)
    return float(slowest(comm, [(used_s() - before) / seconds])[0])


def waiting(comm: MPI.Comm, seconds: float) -> float:
    """The same of the ranks that wait for rank 0."""
    meet(comm)
    before, start = used_s(), time.monotonic()
    if comm.rank == 0:
        time.sleep(seconds)
    hvd.allreduce(torch.zeros(1), op=hvd.Sum, name="one")
    return float(slowest(comm, [(used_s() - before) / (time.monotonic() - start)])[0])


def used_s() -> float:
    """CPU seconds of all threads of this process, in user and kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
