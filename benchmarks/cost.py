"""What a benchmark of an option's cost does: the same models, with and without it, in turns; a table; a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import hvdlite.torch as hvd
from measure import begin, describe, parser_for, write_json
from models import SHORT


def cost(
    benchmark: str,
    description: str | None,
    measure: Callable[..., dict[str, Any]],
    tell: Callable[[dict[str, Any]], str],
) -> None:
    """Run it on the models that the command line names.

    Args:
        benchmark: its name in the file of figures.
        measure: takes a task, a communicator, rounds, and the seconds of a block.
        tell: what people read, of what ``measure`` has found by model.
    """
    parser = parser_for(description, rounds=8, of="steps with and without")
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
        print(tell(found))
        write_json(options.json, {"benchmark": benchmark, **facts, "models": found})
