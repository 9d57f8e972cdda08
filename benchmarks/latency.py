"""Small operations: one that is waited for, a few or a thousand that are submitted at once, and two orders in turns.

    python -m hvdlite run --mpi -np 2 latency.py
    mpirun -np 2 python latency.py --json results/latency.json

Every call is timed, on every rank; the slowest rank counts. Ways take turns, as in allreduce.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import hvdlite.torch as hvd
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
    table,
    write_json,
)
from peers import start_gloo

if TYPE_CHECKING:
    from mpi4py import MPI

WARM_UP = 100  # calls: until requests are known, and their order is frozen
LED = 3  # calls that go before a block: until what they touch is in the caches
FEW = (1, 4, 16)
ORDER = 20  # operations of an order, as of a training step or of one of validation
STEPS = 50  # of an order, until the other has its turn

Call = Callable[[], object]


def blocking_ways(comm: MPI.Comm) -> dict[str, Call]:
    """Sums of one float32, which every rank needs at once, as a loss."""
    from mpi4py import MPI

    tensor, array = torch.zeros(1), np.zeros(1, np.float32)
    own = comm.Dup()
    return {
        "hvd.allreduce": lambda: hvd.allreduce(tensor, op=hvd.Sum, name="one"),
        "hvd.allreduce_": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="one, in place"),
        "MPI": lambda: own.Allreduce(MPI.IN_PLACE, array),
        "Gloo": lambda: dist.all_reduce(tensor),
    }


def burst_ways(count: int, nbytes: int) -> dict[str, Call]:
    """``count`` tensors of ``nbytes`` each, all submitted before the first is waited for."""
    tensors = [torch.zeros(nbytes // 4) for _ in range(count)]

    def ours() -> None:
        handles = [hvd.allreduce_async_(x, op=hvd.Sum, name=f"burst.{i}") for i, x in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    def gloo() -> None:
        for work in [dist.all_reduce(x, async_op=True) for x in tensors]:
            work.wait()

    return {"hvd.allreduce_async_": ours, "Gloo": gloo}


def few_ways(comm: MPI.Comm, count: int) -> dict[str, Call]:
    """``count`` equal tensors of 1 KiB without names, as metrics are: all submitted before the first is waited for."""
    from mpi4py import MPI

    tensors, arrays = [torch.zeros(256) for _ in range(count)], [np.zeros(256, np.float32) for _ in range(count)]
    own = comm.Dup()

    def ours() -> None:
        for handle in [hvd.allreduce_async_(x, op=hvd.Sum) for x in tensors]:
            hvd.synchronize(handle)

    def mpi() -> None:
        MPI.Request.Waitall([own.Iallreduce(MPI.IN_PLACE, x) for x in arrays])

    def gloo() -> None:
        for work in [dist.all_reduce(x, async_op=True) for x in tensors]:
            work.wait()

    return {"hvd.allreduce_async_": ours, "MPI": mpi, "Gloo": gloo}


def measure(ways: dict[str, Call], comm: MPI.Comm, rounds: int, calls: int, warm_up: int) -> dict[str, dict[str, Any]]:
    """Of each way the median and the 99th percentile of all calls, in microseconds; of hvdlite's what peers take."""
    seconds: dict[str, list[list[float]]] = {label: [] for label in ways}
    for way in ways.values():
        for _ in range(warm_up):
            way()
    for label in in_turns([*ways], rounds):
        meet(comm)
        for _ in range(LED):
            ways[label]()
        taken = []
        for _ in range(calls):
            start = time.perf_counter()
            ways[label]()
            taken.append(time.perf_counter() - start)
        seconds[label].append(taken)
    times = {label: slowest(comm, own) * 1e6 for label, own in seconds.items()}
    blocks = {label: np.median(own, axis=1) for label, own in times.items()}
    found: dict[str, dict[str, Any]] = {}
    for label, own in times.items():
        found[label] = {"median_us": float(np.median(own)), "p99_us": float(np.quantile(own, 0.99))}
        if label.startswith("hvd"):
            peers = [peer for peer in ways if not peer.startswith("hvd")]
            found[label]["times_as_fast"] = {
                peer: estimate(median_ratio, blocks[peer], blocks[label]) for peer in peers
            }
    return found


def alternating(comm: MPI.Comm, rounds: int) -> dict[str, Any]:
    """Two orders of `ORDER` blocking operations of 4 KiB, `STEPS` steps of each in turn, and one of them as often."""
    tensors = [torch.zeros(1024) for _ in range(ORDER)]

    def steps(order: str, count: int) -> None:
        for _ in range(count):
            for place, tensor in enumerate(tensors):
                hvd.allreduce_(tensor, op=hvd.Sum, name=f"{order}.{place}")

    def seconds(*orders: str) -> float:
        meet(comm)
        steps("training", 1)
        start = time.perf_counter()
        for order in orders:
            steps(order, STEPS)
        return time.perf_counter() - start

    for _ in range(3):
        seconds("validation", "training")
    taken = [(seconds("training", "training"), seconds("validation", "training")) for _ in range(rounds)]
    one, two = slowest(comm, [row[0] for row in taken]), slowest(comm, [row[1] for row in taken])
    per_operation = 1e6 / (2 * STEPS * ORDER)
    return {
        "one_us": float(np.median(one) * per_operation),
        "in_turns_us": float(np.median(two) * per_operation),
        "relative": estimate(median_ratio, two, one),
    }


def main() -> None:
    parser = parser_for(__doc__, rounds=20)
    parser.add_argument("--calls", type=int, default=200, help="of each block (default: %(default)s)")
    parser.add_argument("--count", type=int, default=1000, help="tensors of a burst (default: %(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(1)
    comm, facts = begin()
    start_gloo(comm)
    report: dict[str, Any] = {
        "benchmark": "latency",
        **facts,
        "blocking, 4 B": measure(blocking_ways(comm), comm, options.rounds, options.calls, WARM_UP),
        **{f"{n} at once, 1 KiB": measure(few_ways(comm, n), comm, options.rounds, 20, WARM_UP) for n in FEW},
        f"{options.count} at once, 4 KiB": measure(burst_ways(options.count, 4096), comm, options.rounds, 1, 8),
    }
    titles = [title for title in report if title not in facts and title != "benchmark"]
    turns = report["two orders"] = alternating(comm, options.rounds)
    if comm.rank == 0:
        print(describe(facts))
        for title in titles:
            rows = [[label, f"{row['median_us']:.1f}", f"{row['p99_us']:.1f}"] for label, row in report[title].items()]
            print(f"\n{title}\n" + table(["way", "median us", "99th percentile us"], rows))
        taken = f"{turns['in_turns_us']:.2f} us per operation, of one order {turns['one_us']:.2f}"
        print(f"\ntwo orders of {ORDER} operations, {STEPS} steps of each in turn: {taken}; ", end="")
        print(f"{show(turns['relative'], 2)} times as long")
        write_json(options.json, report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
