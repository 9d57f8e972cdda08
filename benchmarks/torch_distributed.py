"""torch.distributed over hvdlite beside torch.distributed over Gloo: every collective, and steps of DDP and of FSDP2.

    python -m hvdlite run --mpi -np 2 torch_distributed.py --json results/torch_distributed.json
    python -m hvdlite run --mpi -np 4 torch_distributed.py --json results/torch_distributed_4.json

Both are process groups of the same processes, and take turns; with steps of DDP so does one whose buckets nobody
reduces: what DDP itself costs, below which no backend gets. A call is waited for. The bytes of a collective are those
of a rank's larger buffer, and at least one element of each rank. From 256 KiB on a memcpy takes turns with them, of as
many bytes on every rank that has a result to write: where a rank writes its own result, no collective is faster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hvdlite.distributed  # noqa: F401 (registers the backend)
import hvdlite.torch as hvd
from hvdlite.distributed.work import GroupWork
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
    summary,
    table,
    write_json,
)
from models import LONG, SHORT, Task
from torch_collectives import COLLECTIVES, Group
from train_step import CHECKED, LONG_S, block, check_equal, exposed_ratio
from training import Alone, Way

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = (4, 4 << 10, 256 << 10, 4 << 20, 64 << 20)
MODELS = (*SHORT, *LONG)
PARTS = ("collectives", "ddp", "fsdp2")
SHARDED = "three 4096^2 layers"  # 192 MiB
HVDLITE, GLOO, COPY, ALONE = "hvdlite", "Gloo", "memcpy", "DDP alone"
COPIED_BYTES = 256 << 10  # of fewer the call takes the time
LEAST_ROUNDS, MOST_ROUNDS = 5, 60
BLOCK_BYTES, MOST_CALLS = 16 << 20, 100  # of a block of calls

Groups = dict[str, Group]


def start(comm: MPI.Comm) -> Groups:
    """The default process group over hvdlite, and one over Gloo of the same ranks."""
    dist.init_process_group("hvdlite")
    everybody = dist.group.WORLD
    assert everybody is not None and dist.get_rank() == comm.rank
    return {HVDLITE: everybody, GLOO: dist.new_group(backend="gloo")}


def ddp(label: str, group: Group) -> type[Way]:
    class Ddp(Way):
        def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
            self.optimizer = self.sgd()
            return DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=True)

    Ddp.label = label
    return Ddp


class NotReduced(Way):
    """Each rank trains for itself: over a group that takes every bucket as it is. (A communication hook would keep DDP
    from dividing gradients, which it does one by one.)"""

    label = ALONE

    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        self.optimizer = self.sgd()
        group = dist.new_group(backend="hvdlite")
        model = DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=True)
        group.allreduce = leave
        return model


def leave(tensors: list[torch.Tensor], opts: Any) -> GroupWork:
    """In place of a group's allreduce."""
    work = GroupWork(None, tensors, "nothing")
    work.finish()
    return work


def fsdp2(label: str, group: Group) -> type[Way]:
    class Fsdp2(Way):
        """Each layer is sharded for itself."""

        def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in self.model.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            self.optimizer = self.sgd()
            return self.model

    Fsdp2.label = label
    return Fsdp2


def timed(call: Callable[[], object], comm: MPI.Comm, calls: int) -> float:
    """Seconds per call; one call more goes before, to start the ranks together."""
    meet(comm)
    call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def measure_collective(name: str, nbytes: int, groups: Groups, comm: MPI.Comm, rounds: int) -> dict[str, Any]:
    numel = -(-nbytes // 4 // comm.size) * comm.size  # the ranks divide it
    exercise = COLLECTIVES[name](numel)
    calls = max(1, min(MOST_CALLS, BLOCK_BYTES // nbytes))
    ways: dict[str, Callable[[], object]] = {label: partial(exercise.call, group) for label, group in groups.items()}
    if nbytes >= COPIED_BYTES:
        ways[COPY] = exercise.copy()
    for group in groups.values():
        exercise.check(group)
    for call in ways.values():
        timed(call, comm, min(calls, 20))
    seconds: dict[str, list[float]] = {label: [] for label in ways}
    for label in in_turns([*ways], rounds):
        seconds[label].append(timed(ways[label], comm, calls))
    times = {label: slowest(comm, own) * 1e6 for label, own in seconds.items()}
    found = {label: summary(own) for label, own in times.items()}
    row = {
        "collective": name,
        "bytes": nbytes,
        "calls_per_round": calls,
        "ways": {label: {"median_us": median, "p95_us": p95} for label, (median, p95) in found.items()},
        "times_as_fast": estimate(median_ratio, times[GLOO], times[HVDLITE]),
    }
    return row | ({"bound": estimate(median_ratio, times[GLOO], times[COPY])} if COPY in times else {})


def check_shards_equal(ways: Sequence[Way]) -> None:
    """All ways have trained the same model.

    Raises:
        AssertionError: they have not.
    """
    models = [{name: whole(value) for name, value in way.model.named_parameters()} for way in ways]
    for model in models[1:]:
        for name, value in model.items():
            torch.testing.assert_close(value, models[0][name], rtol=1e-4, atol=1e-6, msg=f"'{name}' differs")


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def step_times(
    ways: dict[str, Way], check: Callable[[], None], comm: MPI.Comm, rounds: int | None, seconds_in_all: float
) -> dict[str, np.ndarray]:
    """(rounds,): the median step of each block, in ms. ``check`` is called once all have taken a few steps."""
    step_s = [float(np.median(block(way, comm, CHECKED, led=False))) for way in ways.values()]
    check()
    led = comm.bcast(min(step_s) < LONG_S)
    steps = 3 if led else 1
    fit = round(seconds_in_all / ((steps + led) * sum(step_s)))
    rounds = rounds or comm.bcast(max(LEAST_ROUNDS, min(MOST_ROUNDS, fit)))
    seconds: dict[str, list[list[float]]] = {label: [] for label in ways}
    for label in in_turns([*ways], rounds):
        seconds[label].append(block(ways[label], comm, steps, led=led))
    return {label: np.median(slowest(comm, own).reshape(rounds, steps), axis=1) * 1e3 for label, own in seconds.items()}


def facts_of(task: Task, times: dict[str, np.ndarray]) -> dict[str, Any]:
    return {
        "model": task.name,
        "rounds": len(times[HVDLITE]),
        "ways": {label: {"median_ms": float(np.median(own))} for label, own in times.items()},
        "step": estimate(median_ratio, times[HVDLITE], times[GLOO]),
    }


def measure_ddp(
    task: Task, groups: Groups, comm: MPI.Comm, rounds: int | None, seconds_in_all: float
) -> dict[str, Any]:
    ways: dict[str, Way] = {label: ddp(label, group)(task, comm) for label, group in groups.items()}
    check = partial(check_equal, [*ways.values()], comm)
    others = {Alone.label: Alone(task, comm), ALONE: NotReduced(task, comm)}
    times = step_times({**others, **ways}, check, comm, rounds, seconds_in_all)
    exposed, bound = (
        estimate(exposed_ratio, times[label], times[GLOO], times[Alone.label]) for label in (HVDLITE, ALONE)
    )
    return {**facts_of(task, times), "exposed": exposed, "bound": bound}


def measure_fsdp2(
    task: Task, groups: Groups, comm: MPI.Comm, rounds: int | None, seconds_in_all: float
) -> dict[str, Any]:
    ways: dict[str, Way] = {label: fsdp2(label, group)(task, comm) for label, group in groups.items()}
    check = partial(check_shards_equal, [*ways.values()])
    return facts_of(task, step_times(ways, check, comm, rounds, seconds_in_all))


def print_report(report: dict[str, Any]) -> None:
    rows = [
        [
            row["collective"],
            size(row["bytes"]),
            *(f"{row['ways'][label]['median_us']:.1f}" for label in (HVDLITE, GLOO)),
            show(row["times_as_fast"], 2),
            show(row["bound"], 2) if "bound" in row else "",
        ]
        for row in report["collectives"]
    ]
    if rows:
        print("\n" + table(["collective", "bytes", "hvdlite us", "Gloo us", "times as fast", "a memcpy is"], rows))
    print_steps("DDP", report["ddp"], {"step": 3, "exposed": 2, "bound": 2})
    print_steps("FSDP2", report["fsdp2"], {"step": 3})


def print_steps(title: str, found: Sequence[dict[str, Any]], ratios: dict[str, int]) -> None:
    """``ratios``: what is compared with Gloo's, and digits."""
    if not found:
        return
    header = [title, *(f"{label}, ms" for label in found[0]["ways"]), *(f"{what} / Gloo's" for what in ratios)]
    rows = [
        [
            each["model"],
            *(f"{way['median_ms']:.1f}" for way in each["ways"].values()),
            *(show(each[what], digits) for what, digits in ratios.items()),
        ]
        for each in found
    ]
    print("\n" + table(header, rows), flush=True)


def main() -> None:
    parser = parser_for(__doc__, rounds=7, of="each collective")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, metavar="N", help="default: 4 B to 64 MiB")
    names = [task.name for task in MODELS]
    text = "of DDP (default: all; with more ranks than cores those whose step is short)"
    parser.add_argument("--models", nargs="*", choices=names, metavar="MODEL", help=text)
    parser.add_argument("--seconds", type=float, default=45.0, help="for each model, about (default: %(default)s)")
    parser.add_argument("--step-rounds", type=int, help="blocks of steps (default: by what --seconds allows)")
    options = parser.parse_args()

    comm, facts = begin()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    groups = start(comm)
    if comm.rank == 0:
        print(describe(facts), flush=True)
    collectives = [
        measure_collective(name, nbytes, groups, comm, options.rounds)
        for name in COLLECTIVES
        for nbytes in options.bytes
        if "collectives" in options.parts
    ]
    limits = (options.step_rounds, options.seconds)
    usual = MODELS if comm.size <= len(os.sched_getaffinity(0)) else SHORT
    chosen = [task for task in MODELS if (task in usual if options.models is None else task.name in options.models)]
    found = [measure_ddp(task, groups, comm, *limits) for task in chosen if "ddp" in options.parts]
    split = [task for task in MODELS if task.name == SHARDED and "fsdp2" in options.parts]
    sharded = [measure_fsdp2(task, groups, comm, *limits) for task in split]
    if comm.rank == 0:
        report = {"benchmark": "torch_distributed", **facts, "threads": torch.get_num_threads()}
        report |= {"collectives": collectives, "ddp": found, "fsdp2": sharded}
        print_report(report)
        write_json(options.json, report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
