"""How much of the communication hides behind backward: steps that reduce while backward runs, beside steps that wait.

    python across_hosts.py --hosts 2 --ranks 1 --rate 1gbit overlap.py     # two emulated hosts, needs root
    python -m hvdlite run -np 2 overlap.py                                 # this machine

Three ways take turns, a block of steps each: without communication; serial, where nothing is reduced before backward is
over; and overlapped, which is what hvd.DistributedOptimizer does. Of the last two a timeline is recorded as well.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hvdlite
import hvdlite.torch as hvd
from hvdlite.timeline.report import build_report
from hvdlite.timeline.trace_file import read_trace
from measure import (
    add_json_option,
    describe,
    estimate,
    in_turns,
    keep_collector_out,
    median_difference,
    meet,
    provenance,
    show,
    slowest,
    summary,
    table,
    write_json,
)

if TYPE_CHECKING:
    from mpi4py import MPI

WARM_UP = 8  # steps: until buckets are in the order of backward, and that order is frozen

Step = Callable[[], None]


def make_steps(layers: int, width: int, rows: int) -> dict[str, Step]:
    """What a step does in each of the three ways, on a model of its own."""
    inputs, targets = torch.randn(rows, width), torch.randn(rows, width)

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width, bias=False), nn.ReLU()]
        return nn.Sequential(*parts)

    def distributed() -> tuple[nn.Module, Any]:
        model = build()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        return model, hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())

    alone = build()
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=1e-3)
    serial, serial_optimizer = distributed()
    overlapped, overlapped_optimizer = distributed()

    def step_alone() -> None:
        alone_optimizer.zero_grad()
        mse_loss(alone(inputs), targets).backward()
        alone_optimizer.step()

    def step_serial() -> None:
        serial_optimizer.zero_grad()
        with serial_optimizer.no_sync():  # so that step() finds that nothing has been submitted
            mse_loss(serial(inputs), targets).backward()
        serial_optimizer.step()

    def step_overlapped() -> None:
        overlapped_optimizer.zero_grad()
        mse_loss(overlapped(inputs), targets).backward()
        overlapped_optimizer.step()

    return {"no communication": step_alone, "serial": step_serial, "overlapped": step_overlapped}


def measure(steps: dict[str, Step], comm: MPI.Comm, rounds: int, count: int) -> dict[str, np.ndarray]:
    """(rounds, count) ms of each way; some steps go before the first round, and one before every block."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    seconds: dict[str, list[list[float]]] = {label: [] for label in steps}
    for label in in_turns([*steps], rounds):
        meet(comm)
        steps[label]()
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            steps[label]()
            taken.append(time.perf_counter() - start)
        seconds[label].append(taken)
    return {label: slowest(comm, own) * 1e3 for label, own in seconds.items()}


def record(step: Step, path: Path, count: int) -> dict[str, Any]:
    """Medians over ``count`` steps, from a timeline that is left in ``path``; on rank 0, which has the file."""
    hvd.start_timeline(str(path))
    for _ in range(count + 1):  # of the first one the timeline does not know the beginning
        step()
    hvd.stop_timeline()
    if hvd.rank() != 0:
        return {}
    median = build_report(read_trace(str(path))).median
    assert median is not None
    return {
        "step_ms": median.step_ms,
        "communication_ms": median.communication_ms,
        "exposed_ms": median.exposed_ms,
        "hidden_share": median.hidden_share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of width x width (default: %(default)s)")
    parser.add_argument("--width", type=int, default=768, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=1024, help="of a rank's batch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="of each block (default: %(default)s)")
    parser.add_argument("--timelines", type=Path, metavar="DIRECTORY", help="keep the timelines there")
    add_json_option(parser)
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.size()))  # emulated hosts share the cores
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    keep_collector_out()
    facts = provenance(comm, len(hvdlite.runtime().topology.nodes))
    mib = options.layers * options.width**2 * 4 / 2**20
    if comm.rank == 0:
        print(describe(facts))
        print(f"{options.layers} layers of {options.width} x {options.width}, {mib:.1f} MiB of gradients", flush=True)
    steps = make_steps(options.layers, options.width, options.rows)
    times = measure(steps, comm, options.rounds, options.steps)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(comm.bcast(str((options.timelines or Path(temporary)).resolve())))
        directory.mkdir(parents=True, exist_ok=True)
        count = options.steps * 3
        traced = {label: record(steps[label], directory / f"{label}.json", count) for label in ("serial", "overlapped")}
    if comm.rank == 0:
        report = {"benchmark": "overlap", **facts, "gradient_mib": mib, **summarize(times), "timeline": traced}
        print_report(report)
        write_json(options.json, report)


def summarize(times: dict[str, np.ndarray]) -> dict[str, Any]:
    """``hidden_share`` is None where even the serial way exposes nothing that stands out from the noise."""
    blocks = {label: np.median(own, axis=1) for label, own in times.items()}
    alone, serial, overlapped = (blocks[label] for label in ("no communication", "serial", "overlapped"))
    rows = {}
    for label, own in times.items():
        median, p95 = summary(own)
        exposed = estimate(median_difference, blocks[label], alone)
        rows[label] = {"median_ms": median, "p95_ms": p95, "exposed_ms": exposed}
    stands_out = rows["serial"]["exposed_ms"]["value"] > 0.02 * np.median(alone)
    return {"steps": rows, "hidden_share": estimate(hidden, overlapped, serial, alone) if stands_out else None}


def hidden(overlapped: np.ndarray, serial: np.ndarray, alone: np.ndarray) -> np.ndarray:
    return 1 - median_difference(overlapped, alone) / median_difference(serial, alone)


def print_report(report: dict[str, Any]) -> None:
    rows = [
        [label, f"{row['median_ms']:.2f}", f"{row['p95_ms']:.2f}", show(row["exposed_ms"], 2)]
        for label, row in report["steps"].items()
    ]
    print("\n" + table(["step time", "median ms", "p95 ms", "exposed ms"], rows))
    share = report["hidden_share"]
    print(
        "too little is exposed to say how much is hidden"
        if share is None
        else f"hidden share = 1 - exposed(overlapped) / exposed(serial) = {show(share, 2)}"
    )
    keys = ["step_ms", "communication_ms", "exposed_ms", "hidden_share"]
    rows = [[label, *(f"{row[key]:.2f}" for key in keys)] for label, row in report["timeline"].items()]
    print("\n" + table(["timeline", *keys], rows))


if __name__ == "__main__":
    main()
