"""What a user calls besides allreduce, beside MPI and Gloo; and what one such call does to a step of small allreduces.

    python -m hvdlite run --mpi -np 2 operations.py
    mpirun -np 2 python operations.py --json results/operations.json

A call is waited for. Its bytes are those of a rank's larger tensor, float32. `hvd.allgather`, `hvd.alltoall` and
`hvd.reducescatter` return a new tensor each time; MPI and Gloo write into the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from latency import Call, measure
from measure import (
    begin,
    describe,
    estimate,
    in_turns,
    median_ratio,
    meet,
    parser_for,
    show,
    size,
    slowest,
    table,
    write_json,
)
from peers import start_gloo

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = [1 << shift for shift in (2, 12, 18, 20, 22, 24, 26)]
SMALL = 20  # allreduces of a step, of 256 B each
STEPS = 100
WARM_UP = 30  # calls, or steps: until requests are known, and their order is frozen

Ways = dict[str, Call]


def _ways(ours: Call, mpi: Call, gloo: Call) -> Ways:
    return {"hvd": ours, "MPI": mpi, "Gloo": gloo}


def broadcast(numel: int, comm: MPI.Comm) -> Ways:
    tensor = torch.full((numel,), float(hvd.rank()))
    hvd.broadcast_(tensor, 0)
    assert (tensor == 0).all()
    return _ways(
        lambda: hvd.broadcast_(tensor, 0, name=f"broadcast {numel}"),
        lambda: comm.Bcast(tensor.numpy(), 0),
        lambda: dist.broadcast(tensor, 0),
    )


def allgather(numel: int, comm: MPI.Comm) -> Ways:
    own, whole = torch.full((numel // comm.size,), float(hvd.rank())), torch.empty(numel // comm.size * comm.size)
    parts = [*whole.view(comm.size, -1)]
    expected = torch.arange(float(comm.size)).repeat_interleave(own.numel())
    assert torch.equal(hvd.allgather(own), expected)
    return _ways(
        lambda: hvd.allgather(own, name=f"allgather {numel}"),
        lambda: comm.Allgather(own.numpy(), whole.numpy()),
        lambda: dist.all_gather(parts, own),
    )


def alltoall(numel: int, comm: MPI.Comm) -> Ways:
    numel = numel // comm.size * comm.size
    source, target = torch.full((numel,), float(hvd.rank())), torch.empty(numel)
    expected = torch.arange(float(comm.size)).repeat_interleave(numel // comm.size)
    assert torch.equal(hvd.alltoall(source), expected)
    return _ways(
        lambda: hvd.alltoall(source, name=f"alltoall {numel}"),
        lambda: comm.Alltoall(source.numpy(), target.numpy()),
        lambda: dist.all_to_all_single(target, source),
    )


def reducescatter(numel: int, comm: MPI.Comm) -> Ways:
    numel = numel // comm.size * comm.size
    source, target = torch.full((numel,), float(hvd.rank() + 1)), torch.empty(numel // comm.size)
    assert (hvd.reducescatter(source, op=hvd.Sum) == comm.size * (comm.size + 1) // 2).all()
    return _ways(
        lambda: hvd.reducescatter(source, op=hvd.Sum, name=f"reducescatter {numel}"),
        lambda: comm.Reduce_scatter_block(source.numpy(), target.numpy()),
        lambda: dist.reduce_scatter(target, [*source.view(comm.size, -1)]),
    )


OPERATIONS: dict[str, Callable[[int, MPI.Comm], Ways]] = {
    "broadcast_": broadcast,
    "allgather": allgather,
    "alltoall": alltoall,
    "reducescatter": reducescatter,
}


def beside_small_ones(comm: MPI.Comm, rounds: int) -> dict[str, dict[str, Any]]:
    """Steps of `SMALL` allreduces of 256 B, and of these and one other operation of 32 B."""
    tensors, few = [torch.zeros(64) for _ in range(SMALL)], torch.zeros(8)
    rows = iter(range(1 << 30))
    ways: dict[str, Call] = {
        "nothing": lambda: None,
        "broadcast_": lambda: hvd.broadcast_(few, 0, name="few, broadcast"),
        "allgather": lambda: hvd.allgather(few, name="few, allgather"),
        "allgather of other sizes each time": lambda: hvd.allgather(few[: next(rows) % 8], name="ragged"),
        "alltoall": lambda: hvd.alltoall(few, name="few, alltoall"),
        "barrier": hvd.barrier,
    }

    def steps(other: Call, count: int) -> float:
        meet(comm)
        start = 0.0
        for step in range(WARM_UP + count):
            if step == WARM_UP:
                start = time.perf_counter()
            for place, tensor in enumerate(tensors):
                hvd.allreduce_(tensor, op=hvd.Sum, name=f"small.{place}")
            other()
        return (time.perf_counter() - start) / count

    seconds: dict[str, list[float]] = {label: [] for label in ways}
    for label in in_turns([*ways], rounds):
        seconds[label].append(steps(ways[label], STEPS))
    times = {label: slowest(comm, own) * 1e6 for label, own in seconds.items()}
    return {
        label: {"median_us": float(np.median(own)), "relative": estimate(median_ratio, own, times["nothing"])}
        for label, own in times.items()
    }


def main() -> None:
    parser = parser_for(__doc__, rounds=7)
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, metavar="N", help="default: 4 B to 64 MiB")
    options = parser.parse_args()

    torch.set_num_threads(1)
    comm, facts = begin()
    start_gloo(comm)
    own = comm.Dup()
    rows: list[dict[str, Any]] = []
    for name, make in OPERATIONS.items():
        for nbytes in options.bytes:
            numel = max(nbytes // 4, comm.size)
            calls = max(1, min(100, (32 << 20) // nbytes))
            ways = measure(make(numel, own), comm, options.rounds, calls, min(calls, WARM_UP))
            rows.append({"operation": name, "bytes": nbytes, "ways": ways})
    steps = beside_small_ones(comm, options.rounds)
    if comm.rank == 0:
        print(describe(facts))
        cells = [
            [
                row["operation"],
                size(row["bytes"]),
                *(f"{way['median_us']:.1f}" for way in row["ways"].values()),
                *(show(ratio, 2) for ratio in row["ways"]["hvd"]["times_as_fast"].values()),
            ]
            for row in rows
        ]
        header = ["hvd.", "bytes", "hvd us", "MPI us", "Gloo us", "times as fast as MPI", "as Gloo"]
        print("\n" + table(header, cells))
        taken = [[label, f"{row['median_us']:.0f}", show(row["relative"], 2)] for label, row in steps.items()]
        print("\n" + table([f"{SMALL} allreduces of 256 B, and", "us per step", "times as long"], taken))
        write_json(options.json, {"benchmark": "operations", **facts, "operations": rows, "steps": steps})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
