"""Time of a whole training step: hvdlite beside DistributedDataParallel over Gloo, MPI, and no communication at all.

    python -m hvdlite run -np 2 train_step.py
    mpirun -np 2 python train_step.py --json results/train_step.json

The ways are measured in turns, a block of steps each, in an order that moves on by one from round to round.
"""

from __future__ import annotations

import argparse
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdlite
import hvdlite.torch as hvd
from measure import add_json_option, describe, meet, provenance, slowest, summary, table, write_json
from models import MODELS, Task
from peers import start_gloo

if TYPE_CHECKING:
    from mpi4py import MPI

LR = 1e-3


class Way(ABC):
    """A copy of ``task``'s model and how it is trained.

    Attributes:
        is_reduced: whether ranks train one model.
    """

    label: str
    is_reduced = True
    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task, comm: MPI.Comm) -> None:
        torch.manual_seed(0)
        self.model = task.build()
        torch.manual_seed(1 + comm.rank)
        self._inputs, self._targets = task.batch()
        self._loss = task.loss
        self._comm = comm
        self._forward = self.prepare()

    @abstractmethod
    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Make ``optimizer``; return what maps inputs to outputs."""

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._loss(self._forward(self._inputs), self._targets).backward()
        self.reduce()
        self.optimizer.step()

    def reduce(self) -> None:
        """What the user does between backward() and step()."""

    def sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=LR)


class Alone(Way):
    label = "no communication"
    is_reduced = False

    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        self.optimizer = self.sgd()
        return self.model


class Hvdlite(Way):
    label = "hvdlite"

    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        self.optimizer = hvd.DistributedOptimizer(self.sgd(), named_parameters=self.model.named_parameters())
        return self.model


class Ddp(Way):
    label = "DDP"
    views = False

    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        self.optimizer = self.sgd()
        return DistributedDataParallel(self.model, gradient_as_bucket_view=self.views)


class DdpViews(Ddp):
    label = "DDP, views"
    views = True


class Mpi(Way):
    """As one writes it by hand: an Allreduce per parameter after backward."""

    label = "MPI"

    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        from mpi4py import MPI

        self.optimizer = self.sgd()
        self._in_place = MPI.IN_PLACE
        return self.model

    def reduce(self) -> None:
        for parameter in self.model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            self._comm.Allreduce(self._in_place, gradient.numpy())
            gradient /= self._comm.size


WAYS: tuple[type[Way], ...] = (Alone, Hvdlite, Ddp, DdpViews, Mpi)


def block(way: Way, comm: MPI.Comm, steps: int) -> list[float]:
    """Seconds of each of ``steps`` steps. One step more goes before, to start the ranks together."""
    meet(comm)
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
    reduced = [way for way in ways if way.is_reduced]
    reference = [parameter.detach() for parameter in reduced[-1].model.parameters()]
    expected = [comm.bcast(parameter if comm.rank == 0 else None) for parameter in reference]
    for way in reduced:
        for (name, parameter), value in zip(way.model.named_parameters(), expected, strict=True):
            same = torch.allclose(parameter, value, rtol=1e-4, atol=1e-6)
            assert same, f"{way.label}: '{name}' differs on rank {comm.rank} by {(parameter - value).abs().max()}"


def measure(task: Task, comm: MPI.Comm, rounds: int, steps: int) -> list[dict[str, Any]]:
    """One row per way; a round more goes before, after which the models are compared."""
    ways = [kind(task, comm) for kind in WAYS]
    seconds: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for i in range(len(ways)):
            index = (turn + i) % len(ways)
            taken = block(ways[index], comm, steps)
            if turn > 0:
                seconds[index] += taken
        if turn == 0:
            check_equal(ways, comm)
    parameters = list(ways[0].model.parameters())
    rows: list[dict[str, Any]] = []
    for way, own in zip(ways, seconds, strict=True):
        median, p95 = summary(slowest(comm, own))
        rows.append(
            {
                "model": task.name,
                "parameters": len(parameters),
                "gradient_bytes": sum(parameter.nbytes for parameter in parameters),
                "way": way.label,
                "median_ms": median * 1e3,
                "p95_ms": p95 * 1e3,
                "steps": len(own),
            }
        )
    for row in rows:
        row["exposed_ms"] = row["median_ms"] - rows[0]["median_ms"]
        row["relative"] = row["median_ms"] / rows[1]["median_ms"]
    return rows


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    mib = first["gradient_bytes"] / 2**20
    print(f"\n{first['model']}: {first['parameters']} parameters, {mib:.1f} MiB of gradients")
    print(
        table(
            ["", "median ms", "p95 ms", "exposed ms", "relative"],
            [
                [row["way"], *(f"{row[key]:.2f}" for key in ("median_ms", "p95_ms", "exposed_ms", "relative"))]
                for row in rows
            ],
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [task.name for task in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each way and model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of each block (default: %(default)s)")
    add_json_option(parser)
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    start_gloo(comm)
    facts = provenance(comm, len(hvdlite.runtime().topology.nodes))
    if comm.rank == 0:
        print(describe(facts))
        print("exposed: beyond the step without communication; relative: to hvdlite, above 1 is slower", flush=True)
    rows: list[dict[str, Any]] = []
    for task in MODELS:
        if task.name in options.models:
            found = measure(task, comm, options.rounds, options.steps)
            rows += found
            if comm.rank == 0:
                print_rows(found)
    if comm.rank == 0:
        write_json(options.json, {"benchmark": "train_step", **facts, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
