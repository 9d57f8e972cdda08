"""What recording a timeline costs: steps with it on and off, in turns, of one model and one optimizer.

    python -m hvdlite run --mpi -np 2 timeline_cost.py
    mpirun -np 2 python timeline_cost.py --json results/timeline_cost.json

Blocks are so long that the timeline is written several times in each.
"""

from __future__ import annotations

import math
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import hvdlite.torch as hvd
from cost import cost
from measure import estimate, in_turns, median_ratio, meet, show, slowest, table
from models import Task
from train_step import CHECKED, UNTIL_FROZEN, block
from training import Hvdlite

if TYPE_CHECKING:
    from mpi4py import MPI


def measure(task: Task, comm: MPI.Comm, rounds: int, block_s: float, path: Path) -> dict[str, Any]:
    """Medians with the timeline off and on, and how many events a step records, over all ranks."""
    way = Hvdlite(task, comm)
    steps = comm.bcast(math.ceil(block_s / float(np.median(block(way, comm, CHECKED + UNTIL_FROZEN)))))
    seconds: dict[bool, list[list[float]]] = {False: [], True: []}
    events = []
    for recorded in in_turns((False, True), rounds):
        if recorded:
            hvd.start_timeline(str(path))
        seconds[recorded].append(block(way, comm, steps))
        meet(comm)
        if recorded:
            hvd.stop_timeline()
            events.append(path.read_text().count('"ph"') if comm.rank == 0 else 0)
    off, on = (np.median(slowest(comm, seconds[key]), axis=1) * 1e3 for key in (False, True))
    return {
        "off_ms": float(np.median(off)),
        "on_ms": float(np.median(on)),
        "relative": estimate(median_ratio, on, off),
        "rounds": rounds,
        "steps_per_round": steps,
        "events_per_step": float(np.median(events)) / (steps + 1),
    }


def main() -> None:
    def tell(found: dict[str, Any]) -> str:
        keys = ("off_ms", "on_ms", "events_per_step")
        rows = [[name, *(f"{row[key]:.2f}" for key in keys), show(row["relative"], 3)] for name, row in found.items()]
        return table(["timeline", "off, ms", "on, ms", "events per step", "on / off"], rows)

    with tempfile.TemporaryDirectory() as directory:
        cost("timeline_cost", __doc__, partial(measure, path=Path(directory, "timeline.json")), tell)


if __name__ == "__main__":
    main()
