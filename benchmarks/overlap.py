"""How much of the communication hides behind backward: steps that reduce while backward runs, beside steps that wait.

    python across_hosts.py --hosts 2 --ranks 1 --rate 1gbit overlap.py     # two emulated hosts, needs root
    python -m hvdlite run --mpi -np 2 overlap.py                                 # this machine

Three ways take turns, a block of steps each: without communication; serial, where nothing is reduced before backward is
over; and overlapped, which is what hvd.DistributedOptimizer does. Of the last two a timeline is recorded as well.

The batch is chosen so that backward takes as long as the communication that there is to hide. The same three ways
follow with a backward that sleeps for as long as the other computes: what then stays exposed has not been started in
time, and what hides less behind the one that computes was taken from it: the processor time of communication. Across
hosts there is the bound of that, too: as many bytes over plain TCP, all of them there when backward begins.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
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
    begin,
    describe,
    estimate,
    in_turns,
    median_difference,
    meet,
    parser_for,
    show,
    slowest,
    summary,
    table,
    write_json,
)
from summing import Wire

if TYPE_CHECKING:
    from mpi4py import MPI

WARM_UP = 8  # steps: until buckets are in the order of backward, and that order is frozen
WAYS = ("no communication", "serial", "overlapped")
TCP_WAYS = ("no communication", "TCP, serial", "TCP, overlapped")
TRIAL_ROWS = 256


@dataclass
class Step:
    """A step of training, one way; ``backward_s`` of each that has been taken."""

    model: nn.Module
    optimizer: Any
    inputs: torch.Tensor
    targets: torch.Tensor
    is_serial: bool = False
    backward_s: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        loss = mse_loss(self.model(self.inputs), self.targets)
        start = time.perf_counter()
        if self.is_serial:
            with self.optimizer.no_sync():  # so that step() finds that nothing has been submitted
                loss.backward()
        else:
            loss.backward()
        self.backward_s.append(time.perf_counter() - start)
        self.optimizer.step()


@dataclass
class TcpStep(Step):
    """A step beside which, or after whose backward, ``wire`` sends what an allreduce of the gradients must."""

    wire: Wire | None = None

    def __call__(self) -> None:
        assert self.wire is not None
        self.optimizer.zero_grad()
        loss = mse_loss(self.model(self.inputs), self.targets)
        sender = threading.Thread(target=self.wire.call)
        if not self.is_serial:
            sender.start()
        loss.backward()
        if self.is_serial:
            sender.start()
        sender.join()
        self.optimizer.step()


class _Sleep(torch.autograd.Function):
    """The identity, whose backward sleeps and then has a gradient of ``weight``."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.shape, ctx.seconds = weight.shape, seconds
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, torch.zeros(ctx.shape), None


class SleepingLayer(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self._seconds = seconds

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(data, self.weight, self._seconds)


def make_steps(build: Callable[[], nn.Module], width: int, rows: int) -> dict[str, Step]:
    """A step in each of the three `WAYS`, on a model of its own."""
    inputs, targets = torch.randn(rows, width), torch.randn(rows, width)
    steps = {}
    for way in WAYS:
        model = build()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        if way != "no communication":
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        steps[way] = Step(model, optimizer, inputs, targets, is_serial=way == "serial")
    return steps


def tcp_steps(alone: Step, wire: Wire) -> dict[str, Step]:
    """Those of `TCP_WAYS` that communicate, on the model of ``alone``."""
    return {
        way: TcpStep(alone.model, alone.optimizer, alone.inputs, alone.targets, way == "TCP, serial", wire=wire)
        for way in TCP_WAYS[1:]
    }


def computing(layers: int, width: int) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, bias=False), nn.ReLU()]
    return nn.Sequential(*parts)


def sleeping(layers: int, width: int, backward_s: float) -> nn.Module:
    return nn.Sequential(*(SleepingLayer(width, share * backward_s) for share in shares(layers)))


def shares(layers: int) -> list[float]:
    """Of backward, by layer, the first one first; its input has no gradient, so it takes one product instead of two."""
    whole = 2 * layers - 1
    return [1 / whole, *[2 / whole] * (layers - 1)]


def schedule_bound(layers: int, backward_s: float, communication_s: float) -> float:
    """The hidden share if communication took no processor time, began with each layer's gradient and never paused."""
    end = 0.0
    for ready in accumulate(reversed(shares(layers))):
        end = max(end, ready * backward_s) + communication_s / layers
    return 1 - (end - backward_s) / communication_s


def choose_rows(layers: int, width: int, comm: MPI.Comm) -> int:
    """Of a batch whose backward takes as long as the communication, both measured."""
    steps = make_steps(lambda: computing(layers, width), width, TRIAL_ROWS)
    alone, serial = steps["no communication"], steps["serial"]
    times = {label: np.median(own) for label, own in measure({"a": alone, "s": serial}, comm, 3, 2).items()}
    communication_s = (times["s"] - times["a"]) / 1e3
    rows = TRIAL_ROWS
    for _ in range(2):
        alone.inputs, alone.targets = torch.randn(rows, width), torch.randn(rows, width)
        measure({"a": alone}, comm, 2, 2, warm_up=1)
        backward_s = float(np.median(slowest(comm, alone.backward_s[-4:])))
        rows = max(16, round(rows * communication_s / backward_s / 16) * 16)
    return rows


def measure(
    steps: dict[str, Step], comm: MPI.Comm, rounds: int, count: int, warm_up: int = WARM_UP
) -> dict[str, np.ndarray]:
    """(rounds, count) ms of each way; some steps go before the first round, and one before every block."""
    for step in steps.values():
        for _ in range(warm_up):
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


def record(step: Callable[[], None], path: Path, count: int) -> dict[str, Any]:
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
    parser = parser_for(__doc__, rounds=8)
    parser.add_argument("--layers", type=int, default=24, help="of width x width (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--rows", type=int, help="of a rank's batch (default: backward takes as long as communication)")
    parser.add_argument("--steps", type=int, default=2, help="of each block (default: %(default)s)")
    parser.add_argument("--timelines", type=Path, metavar="DIRECTORY", help="keep the timelines there")
    options = parser.parse_args()

    comm, facts = begin()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.size()))  # emulated hosts share the cores
    layers, width = options.layers, options.width
    rows = options.rows or choose_rows(layers, width, comm)
    mib = layers * width**2 * 4 / 2**20
    if comm.rank == 0:
        print(describe(facts))
        print(f"{layers} layers of {width} x {width}, {mib:.1f} MiB of gradients, batches of {rows} rows", flush=True)
    steps = make_steps(lambda: computing(layers, width), width, rows)
    topology, tcp = hvdlite.runtime().topology, {}
    if len(topology.nodes) == comm.size:
        wire = Wire(comm, topology, np.zeros(layers * width**2, np.float32))
        wire.prepare(layers * width**2)
        tcp = tcp_steps(steps["no communication"], wire)
    times = measure({**steps, **tcp}, comm, options.rounds, options.steps)
    found = summarize(times, WAYS)
    backward_s = float(np.median(slowest(comm, steps["no communication"].backward_s[WARM_UP:])))
    asleep = make_steps(lambda: sleeping(layers, width, backward_s), width, 1)
    found_asleep = summarize(measure(asleep, comm, options.rounds, options.steps), WAYS)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(comm.bcast(str((options.timelines or Path(temporary)).resolve())))
        directory.mkdir(parents=True, exist_ok=True)
        count = options.steps * 3
        traced = {label: record(steps[label], directory / f"{label}.json", count) for label in ("serial", "overlapped")}
    if comm.rank == 0:
        communication_ms = found["steps"]["serial"]["exposed_ms"]["value"]
        report = {
            "benchmark": "overlap",
            **facts,
            "gradient_mib": mib,
            "rows": rows,
            "backward_ms": backward_s * 1e3,
            "communication_ms": communication_ms,
            "schedule_bound": schedule_bound(layers, backward_s, communication_ms / 1e3),
            **found,
            "asleep": found_asleep,
            "tcp": summarize(times, TCP_WAYS) if tcp else None,
            "timeline": traced,
        }
        print_report(report)
        write_json(options.json, report)


def summarize(times: dict[str, np.ndarray], ways: Sequence[str]) -> dict[str, Any]:
    """Of ``ways``: without communication, serial and overlapped.

    ``hidden_share`` is None where even the serial way exposes nothing that stands out from the noise.
    """
    blocks = {label: np.median(times[label], axis=1) for label in ways}
    alone, serial, overlapped = blocks.values()
    rows = {}
    for label in ways:
        median, p95 = summary(times[label])
        exposed = estimate(median_difference, blocks[label], alone)
        rows[label] = {"median_ms": median, "p95_ms": p95, "exposed_ms": exposed}
    stands_out = rows[ways[1]]["exposed_ms"]["value"] > 0.02 * np.median(alone)
    return {"steps": rows, "hidden_share": estimate(hidden, overlapped, serial, alone) if stands_out else None}


def hidden(overlapped: np.ndarray, serial: np.ndarray, alone: np.ndarray) -> np.ndarray:
    return 1 - median_difference(overlapped, alone) / median_difference(serial, alone)


def print_report(report: dict[str, Any]) -> None:
    print(
        f"\nbackward alone {report['backward_ms']:.1f} ms, communication alone {report['communication_ms']:.1f} ms; "
        f"the schedule hides at most {report['schedule_bound']:.2f}"
    )
    titles = {
        "backward computes": report,
        "backward computes, plain TCP": report["tcp"],
        "backward sleeps": report["asleep"],
    }
    for title, found in titles.items():
        if found is not None:
            print_steps(title, found)
    keys = ["step_ms", "communication_ms", "exposed_ms", "hidden_share"]
    rows = [[label, *(f"{row[key]:.2f}" for key in keys)] for label, row in report["timeline"].items()]
    print("\n" + table(["timeline", *keys], rows))


def print_steps(title: str, found: dict[str, Any]) -> None:
    rows = [
        [label, f"{row['median_ms']:.2f}", f"{row['p95_ms']:.2f}", show(row["exposed_ms"], 2)]
        for label, row in found["steps"].items()
    ]
    print("\n" + table([title, "median ms", "p95 ms", "exposed ms"], rows))
    share = found["hidden_share"]
    print(
        "too little is exposed to say how much is hidden"
        if share is None
        else f"hidden share = 1 - exposed(overlapped) / exposed(serial) = {show(share, 2)}"
    )


if __name__ == "__main__":
    main()
