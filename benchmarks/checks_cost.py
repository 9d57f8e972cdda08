"""What HVDLITE_CHECK_NUMERICS and HVDLITE_CHECK_EVERY cost: steps with one of them and with none, in turns.

    python -m hvdlite run --mpi -np 2 checks_cost.py
    mpirun -np 2 python checks_cost.py --json results/checks_cost.json

Settings are those of a start, so hvdlite is started anew for every block of steps, which begins with some that are not
timed. State is compared after every 10th step, with Adam; the cost at every 100th is a tenth of that.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import hvdlite
import hvdlite.torch as hvd
from cost import cost
from measure import estimate, in_turns, median_ratio, show, slowest, table
from models import Task
from train_step import CHECKED, UNTIL_FROZEN, block
from training import LR, Hvdlite

if TYPE_CHECKING:
    from mpi4py import MPI

EVERY = 10
SETTINGS = {
    "off": {},
    "numerics": {"HVDLITE_CHECK_NUMERICS": "raise"},
    "state": {"HVDLITE_CHECK_EVERY": str(EVERY)},
}


class WithAdam(Hvdlite):
    """Whose state is twice as large as the parameters."""

    def sgd(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=LR)


def restart(settings: dict[str, str]) -> None:
    """Start hvdlite anew with these."""
    hvd.shutdown()
    for name in {name for others in SETTINGS.values() for name in others}:
        os.environ.pop(name, None)
    os.environ.update(settings)
    hvdlite.init()


def measure(task: Task, comm: MPI.Comm, rounds: int, block_s: float) -> dict[str, Any]:
    """Medians of steps without checks, and how many times as long they take with each."""
    way = WithAdam(task, comm)
    warm = CHECKED + UNTIL_FROZEN
    steps = comm.bcast(EVERY * math.ceil(block_s / EVERY / float(np.median(block(way, comm, warm)))))
    seconds: dict[str, list[float]] = {key: [] for key in SETTINGS}
    for key in in_turns(list(SETTINGS), rounds):
        restart(SETTINGS[key])
        block(way, comm, warm)
        seconds[key].append(float(np.mean(slowest(comm, [block(way, comm, steps)]))))
    means = {key: np.array(found) * 1e3 for key, found in seconds.items()}
    return {
        "off_ms": float(np.median(means["off"])),
        "numerics": estimate(median_ratio, means["numerics"], means["off"]),
        f"state, every {EVERY}": estimate(median_ratio, means["state"], means["off"]),
        "rounds": rounds,
        "steps_per_round": steps,
    }


def main() -> None:
    def tell(found: dict[str, Any]) -> str:
        checks = ["numerics", f"state, every {EVERY}"]
        rows = [[name, f"{row['off_ms']:.2f}", *(show(row[key], 3) for key in checks)] for name, row in found.items()]
        return table(["checks", "off, ms", *(f"{key} / off" for key in checks)], rows)

    cost("checks_cost", __doc__, measure, tell)


if __name__ == "__main__":
    main()
