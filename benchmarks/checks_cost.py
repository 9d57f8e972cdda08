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
from measure import begin, describe, estimate, in_turns, median_ratio, parser_for, show, slowest, table, write_json
from models import SHORT, Task
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
    parser = parser_for(__doc__, rounds=8, of="steps with and without")
    names = [task.name for task in SHORT]
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("--seconds", type=float, default=1.0, help="of each block, at least (default: %(default)s)")
    options = parser.parse_args()

    comm, facts = begin()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    chosen = [task for task in SHORT if task.name in options.models]
    found = {task.name: measure(task, comm, options.rounds, options.seconds) for task in chosen}
    if comm.rank == 0:
        print(describe(facts))
        checks = ["numerics", f"state, every {EVERY}"]
        rows = [[name, f"{row['off_ms']:.2f}", *(show(row[key], 3) for key in checks)] for name, row in found.items()]
        print(table(["checks", "off, ms", *(f"{key} / off" for key in checks)], rows))
        write_json(options.json, {"benchmark": "checks_cost", **facts, "models": found})


if __name__ == "__main__":
    main()
