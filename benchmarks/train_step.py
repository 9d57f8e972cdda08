"""Time of a whole training step: hvdlite beside DistributedDataParallel over Gloo, MPI, and no communication at all.

    python -m hvdlite run --mpi -np 2 train_step.py
    mpirun -np 2 python train_step.py --json results/train_step.json
    python train_step.py --threads 1                       # one rank: what hooks and coordinator cost

The ways take turns, a block of few steps each, and are compared within each round of turns. A long step is a
block of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
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
    median_difference,
    median_ratio,
    meet,
    parser_for,
    show,
    slowest,
    table,
    write_json,
)
from models import LONG, SHORT, Task
from peers import start_gloo
from training import DDPS, SIMPLE, Alone, Hvdlite, Way

if TYPE_CHECKING:
    from mpi4py import MPI

MODELS = (*LONG, *SHORT)
LEAST_ROUNDS, MOST_ROUNDS = 7, 60
LONG_S = 0.1  # so long a step is a block of its own: what ran before it, and who starts first, no longer matters
CHECKED = 3  # steps: until buckets are in the order of backward
UNTIL_FROZEN = 24  # more: until that order is frozen, and gradients that always come so have no hooks any more


def block(way: Way, comm: MPI.Comm, steps: int, *, led: bool = True) -> list[float]:
    """Seconds of each of ``steps`` steps. If ``led`` one step more goes before, to start the ranks together."""
    meet(comm)
    if led:
        way.step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        way.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def check_equal(ways: Sequence[Way], comm: MPI.Comm) -> None:
    """All ways that reduce must have trained the same model, on all ranks.

    Raises:
        AssertionError: they have not.
    """
    reduced = [way for way in ways if way.is_reduced or comm.size == 1]
    reference = [parameter.detach() for parameter in reduced[-1].model.parameters()]
    expected = [comm.bcast(parameter if comm.rank == 0 else None) for parameter in reference]
    for way in reduced:
        for (name, parameter), value in zip(way.model.named_parameters(), expected, strict=True):
            same = torch.allclose(parameter, value, rtol=1e-4, atol=1e-6)
            assert same, f"{way.label}: '{name}' differs on rank {comm.rank} by {(parameter - value).abs().max()}"


def measure(task: Task, comm: MPI.Comm, rounds: int | None, steps: int | None, seconds_in_all: float) -> dict[str, Any]:
    """All ways of one model, and how they compare; the trained models are compared after warming up."""
    kinds: tuple[type[Way], ...] = (Alone, Hvdlite, *DDPS, *SIMPLE) if comm.size > 1 else (Alone, Hvdlite)
    ways = {kind.label: kind(task, comm) for kind in kinds}
    step_s = [float(np.median(block(way, comm, CHECKED, led=False))) for way in ways.values()]
    check_equal([*ways.values()], comm)
    block(ways[Hvdlite.label], comm, UNTIL_FROZEN, led=False)
    led = comm.bcast(min(step_s) < LONG_S)
    steps = steps or (3 if led else 1)
    rounds = rounds or comm.bcast(
        max(LEAST_ROUNDS, min(MOST_ROUNDS, round(seconds_in_all / ((steps + led) * sum(step_s)))))
    )
    before = hvd.statistics()
    seconds: dict[str, list[list[float]]] = {label: [] for label in ways}
    for label in in_turns([*ways], rounds):
        seconds[label].append(block(ways[label], comm, steps, led=led))
    after = hvd.statistics()
    submitted, counted = (after[name] - before[name] for name in ("submissions", "counted"))
    worst = {label: slowest(comm, own).reshape(rounds, steps) * 1e3 for label, own in seconds.items()}
    parameters = list(ways[Alone.label].model.parameters())
    return {
        "model": task.name,
        "parameters": len(parameters),
        "gradient_bytes": sum(parameter.nbytes for parameter in parameters),
        "rounds": rounds,
        "steps_per_round": steps,
        "frozen_share": counted / submitted if submitted else None,
        **summarize(worst),
    }


def exposed_ratio(own: np.ndarray, peer: np.ndarray, alone: np.ndarray) -> np.ndarray:
    return median_difference(own, alone) / median_difference(peer, alone)


def summarize(times: dict[str, np.ndarray]) -> dict[str, Any]:
    """What ``times``, (rounds, steps) in ms of each way, say: of each way, and of hvdlite against its best peers."""
    blocks = {label: np.median(own, axis=1) for label, own in times.items()}
    alone, own = blocks[Alone.label], blocks[Hvdlite.label]
    rows = {
        label: {
            "median_ms": float(np.median(times[label])),
            "p95_ms": float(np.quantile(times[label], 0.95)),
            "exposed_ms": estimate(median_difference, mine, alone),
            "relative": estimate(median_ratio, mine, alone),
        }
        for label, mine in blocks.items()
    }
    against = {}
    for name, kinds in (("DDP", DDPS), ("simple MPI", SIMPLE)):
        labels = [kind.label for kind in kinds if kind.label in blocks]
        if labels:
            best = min(labels, key=lambda label: rows[label]["exposed_ms"]["value"])
            against[name] = {
                "way": best,
                "step": estimate(median_ratio, own, blocks[best]),
                "exposed": estimate(exposed_ratio, own, blocks[best], alone),
            }
    return {"ways": rows, "against_best": against}


def print_model(found: dict[str, Any]) -> None:
    mib = found["gradient_bytes"] / 2**20
    print(f"\n{found['model']}: {found['parameters']} parameters, {mib:.1f} MiB of gradients; {found['rounds']} rounds")
    lines = [
        [label, f"{row['median_ms']:.2f}", f"{row['p95_ms']:.2f}", show(row["exposed_ms"], 2), show(row["relative"], 3)]
        for label, row in found["ways"].items()
    ]
    print(table(["", "median ms", "p95 ms", "exposed ms", "relative"], lines))
    for name, best in found["against_best"].items():
        print(
            f"hvdlite against the best {name} ({best['way']}): "
            f"step {show(best['step'], 3)}, exposed {show(best['exposed'], 2)}"
        )
    if found["frozen_share"] is not None:
        print(f"hvdlite's order was frozen for {found['frozen_share']:.0%} of its operations", flush=True)


def main() -> None:
    parser = parser_for(__doc__)
    names = [task.name for task in MODELS]
    text = f"{', '.join(names)} (default: all; on one rank not the first {len(LONG)})"
    parser.add_argument("--models", nargs="+", choices=names, metavar="MODEL", help=text)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each model, about (default: %(default)s)")
    text = f"blocks of each way and model (default: {LEAST_ROUNDS} to {MOST_ROUNDS}, by what --seconds allows)"
    parser.add_argument("--rounds", type=int, help=text)
    parser.add_argument("--steps", type=int, help=f"of each block (default: 3, or 1 of more than {LONG_S} s)")
    parser.add_argument("--threads", type=int, help="of a rank's torch (default: as many as make a thread per core)")
    options = parser.parse_args()

    comm, facts = begin()
    torch.set_num_threads(options.threads or max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    start_gloo(comm)
    if comm.rank == 0:
        print(describe(facts))
        print(f"{torch.get_num_threads()} thread(s) per rank; exposed: beyond the step without communication; ", end="")
        print("relative: to it; (from, to): 95 % interval", flush=True)
    found = []
    for task in MODELS if comm.size > 1 or options.models else SHORT:
        if options.models is None or task.name in options.models:
            found.append(measure(task, comm, options.rounds, options.steps, options.seconds))
            if comm.rank == 0:
                print_model(found[-1])
    if comm.rank == 0:
        report = {"benchmark": "train_step", **facts, "threads": torch.get_num_threads(), "models": found}
        write_json(options.json, report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
