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

import torch
from torch import nn
from torch.nn.functional import mse_loss

import hvdlite
import hvdlite.torch as hvd
from hvdlite.timeline.report import build_report
from hvdlite.timeline.trace_file import read_trace
from measure import add_json_option, describe, meet, provenance, slowest, summary, table, write_json

if TYPE_CHECKING:
    from mpi4py import MPI

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


def measure(steps: dict[str, Step], comm: MPI.Comm, rounds: int, count: int) -> dict[str, tuple[float, float]]:
    """(median, 95th percentile) of a step in ms; a round more goes before, and a step before every block."""
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    order = list(steps)
    for turn in range(rounds + 1):
        for label in order[turn % 3 :] + order[: turn % 3]:
            meet(comm)
            steps[label]()
            for _ in range(count):
                start = time.perf_counter()
                steps[label]()
                if turn > 0:
                    seconds[label].append(time.perf_counter() - start)
    found = {}
    for label, own in seconds.items():
        median, p95 = summary(slowest(comm, own))
        found[label] = (median * 1e3, p95 * 1e3)
    return found


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
    parser.add_argument("--rounds", type=int, default=4, help="blocks of each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="of each block (default: %(default)s)")
    parser.add_argument("--timelines", type=Path, metavar="DIRECTORY", help="keep the timelines there")
    add_json_option(parser)
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.size()))  # emulated hosts share the cores
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
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


def summarize(times: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """``hidden_share`` is None where even the serial way exposes nothing that stands out from the noise."""
    alone = times["no communication"][0]
    rows = {
        label: {"median_ms": median, "p95_ms": p95, "exposed_ms": median - alone}
        for label, (median, p95) in times.items()
    }
    serial = rows["serial"]["exposed_ms"]
    hidden = 1 - rows["overlapped"]["exposed_ms"] / serial if serial > 0.02 * alone else None
    return {"steps": rows, "hidden_share": hidden}


def print_report(report: dict[str, Any]) -> None:
    print("\nstep time")
    print_rows(report["steps"], ["median_ms", "p95_ms", "exposed_ms"])
    hidden = report["hidden_share"]
    print(
        "too little is exposed to say how much is hidden"
        if hidden is None
        else f"hidden share = 1 - exposed(overlapped) / exposed(serial) = {hidden:.0%}"
    )
    print("\ntimeline")
    print_rows(report["timeline"], ["step_ms", "communication_ms", "exposed_ms", "hidden_share"])


def print_rows(rows: dict[str, dict[str, float]], keys: list[str]) -> None:
    print(table(["", *keys], [[label, *(f"{row[key]:.2f}" for key in keys)] for label, row in rows.items()]))


if __name__ == "__main__":
    main()
