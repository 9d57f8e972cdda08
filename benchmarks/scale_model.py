"""How hvdlite scales to ranks that are not there: messages, the root's load, exposed communication; 2 to 16384 ranks.

    python scale_model.py
    python scale_model.py --model gpt2 --ranks 512,16384 --jitter 0.05 --link-gbit 25 --json scale.json

One process, without MPI. What ranks say is hvdlite's own code (virtual_node.py), so messages and bytes are exact, and
the root's Python is measured. Times follow from the model of a machine (data_path.py), which options change.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from data_path import Algorithm, Machine, flat_ring_s, hierarchical_s, rings_s
from hvdlite import Config, __version__
from hvdlite.torch.bucketing import BUCKET_BYTES
from measure import parser_for, table, write_json
from schedules import MODELS, Schedule, schedule
from virtual_ranks import AllreduceTime, VirtualJob

RANKS = [2**k for k in range(1, 15)]
ACROSS: dict[str, Algorithm] = {"hvdlite": hierarchical_s, "rings": rings_s, "flat ring": flat_ring_s}
TIMES = ("latency", "wake", "cycle", "message", "send", "piece")  # of a `Machine`, in microseconds
LONGEST_WARM_UP = 10  # steps; no order is frozen that has more operations than HVDLITE_CACHE_CAPACITY
Row = dict[str, Any]


def main() -> None:
    options = parse()
    machine = Machine(
        link_bytes_per_s=options.link_gbit / 8e-9,
        memory_bytes_per_s=options.memory_gbyte * 1e9,
        **{f"{name}_s": getattr(options, f"{name}_us") / 1e6 for name in TIMES},
    )
    config = replace(
        Config(),
        tree_fanout=options.fanout,
        bucket_bytes=int(options.bucket_mib * 2**20),
        small_bytes=int(options.small_kib * 2**10),
    )
    step = schedule(options.model, config.bucket_bytes)
    print(
        f"{step.name}: {len(step.buckets)} buckets, {sum(made.nbytes for made in step.buckets) / 2**20:.0f} MiB, "
        f"{step.compute_s * 1e3:.0f} ms of compute, deviation {options.jitter:.0%}\n"
        f"{options.ranks_per_node} ranks per node, fanout {config.tree_fanout}, {options.link_gbit:g} Gbit/s per node, "
        f"{options.latency_us:g} us"
    )
    # Python would look through the millions of objects of all nodes again and again, while the root is timed as well.
    gc.disable()
    rows = []
    for ranks in options.ranks:
        rows.append(simulate(ranks, step, machine, config, options))
        gc.collect()
    print(f"\n{times_table(rows)}\n\n{messages_table(rows)}")
    write_json(
        options.json,
        {
            "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
            "hvdlite": __version__,
            "machine": asdict(machine),
            "model": step.name,
            "compute_ms": step.compute_s * 1e3,
            "buckets": [{"bytes": made.nbytes, "ready_ms": made.ready_s * 1e3} for made in step.buckets],
            "rows": rows,
        },
    )


def parse() -> argparse.Namespace:
    def option(name: str, default: Any, text: str = "", **more: Any) -> None:
        shown = f"{default:g}" if isinstance(default, float) else "%(default)s"
        help_text = f"{text}{' ' if text else ''}(default: {shown})"
        parser.add_argument(name, default=default, type=type(default), help=help_text, metavar="X", **more)

    parser = parser_for(__doc__)
    machine, config = Machine(), Config()
    option("--model", "resnet50", f"{', '.join(MODELS)}, or a file of buckets (schedules.py)")
    parser.add_argument("--ranks", type=numbers, default=RANKS, metavar="N,N", help="(default: 2,4,8,...,16384)")
    option("--ranks-per-node", 8)
    option("--fanout", config.tree_fanout, "of the tree of leaders")
    option("--bucket-mib", BUCKET_BYTES / 2**20)
    option("--small-kib", config.small_bytes / 2**10, "up to this share of a rank, recursive doubling")
    parser.add_argument("--across", nargs="+", choices=ACROSS, default=[*ACROSS], help="between nodes (default: all)")
    parser.add_argument("--claims", action="store_true", help="as if no order ever repeated itself")
    option("--jitter", 0.0, "deviation of a rank's compute time as a share of it, 0.05 for 5 %%")
    option("--seed", 0, "of the jitter")
    option("--link-gbit", machine.link_bytes_per_s * 8e-9, "of a node")
    option("--memory-gbyte", machine.memory_bytes_per_s * 1e-9, "of a node, per second")
    for name in TIMES:
        option(f"--{name}-us", getattr(machine, f"{name}_s") * 1e6)
    options = parser.parse_args()
    for ranks in options.ranks:
        if ranks > options.ranks_per_node and ranks % options.ranks_per_node:
            parser.error(f"--ranks {ranks} is no multiple of {options.ranks_per_node} ranks per node")
    return options


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def simulate(ranks: int, step: Schedule, machine: Machine, config: Config, options: argparse.Namespace) -> Row:
    """A step of a job of ``ranks``, once it says no more than it will from then on.

    With each way across nodes, what it adds to the step; everything else with the first.
    """
    began = time.perf_counter()
    local_size = min(ranks, options.ranks_per_node)
    nodes = tuple(tuple(range(first, first + local_size)) for first in range(0, ranks, local_size))
    job = VirtualJob(nodes, step, machine, config, freezes=not options.claims, jitter=options.jitter, seed=options.seed)

    def time_of(way: str) -> AllreduceTime:
        return lambda nbytes: ACROSS[way](len(nodes), local_size, nbytes, machine, config)

    speakers = {
        "root": [0],
        "other leaders": [members[0] for members in nodes[1:]],
        "other ranks": nodes[0][1:2],  # all alike
    }
    way, *others = options.across
    for _ in range(1 if options.claims else LONGEST_WARM_UP):
        job.step(time_of(way))
        if job.plans:
            break
    before = {rank: job.control(rank) for members in speakers.values() for rank in members}
    steady = job.step(time_of(way))
    after = {rank: job.control(rank) for rank in before}
    return {
        "ranks": ranks,
        "nodes": len(nodes),
        "exposed_ms": {way: steady.exposed_s * 1e3, **{o: job.step(time_of(o)).exposed_s * 1e3 for o in others}},
        "step_ms": steady.seconds * 1e3,
        "compute_ms": steady.compute_s * 1e3,
        "batches": len(steady.agreement_s),
        "agreement_ms": {"median": median(steady.agreement_s) * 1e3, "most": max(steady.agreement_s) * 1e3},
        "root_python_ms": steady.root_cpu_s * 1e3,
        "root_load": steady.root_busy_s / steady.seconds,
        "most_counted": {
            who: {name: max(after[rank][name] - before[rank][name] for rank in members) for name in after[0]}
            for who, members in speakers.items()
            if members
        },
        "simulated_in_s": time.perf_counter() - began,
    }


def times_table(rows: Sequence[Row]) -> str:
    """A line per number of ranks: times of a step, in ms."""
    lines = [
        [
            f"{row['ranks']} on {row['nodes']}",
            f"{row['compute_ms']:.0f}",
            *(f"{exposed_ms:.1f}" for exposed_ms in row["exposed_ms"].values()),
            f"{row['batches']}",
            f"{row['agreement_ms']['median']:.2f}",
            f"{row['agreement_ms']['most']:.2f}",
        ]
        for row in rows
    ]
    exposed = [f"exposed ms: {way}" for way in rows[0]["exposed_ms"]]
    return table(["ranks on nodes", "compute ms", *exposed, "batches", "to agree ms", "at most ms"], lines)


def messages_table(rows: Sequence[Row]) -> str:
    """A line per number of ranks: what a step takes of the control plane."""
    lines = []
    for row in rows:
        cells = [f"{row['ranks']}"]
        for who in ("root", "other leaders", "other ranks"):
            counts = row["most_counted"].get(who)
            if counts is None:
                cells += ["-", "-"]
                continue
            messages = counts["tree_messages_sent"] + counts["tree_messages_received"]
            nbytes = sum(count for name, count in counts.items() if name.startswith(("tree_bytes", "page_bytes")))
            cells += [f"{messages}", f"{nbytes}"]
        lines.append([*cells, f"{row['root_python_ms']:.2f}", f"{row['root_load']:.2%}"])
    header = ["ranks", "root: messages", "bytes", "other leaders", "bytes", "other ranks", "bytes"]
    return table([*header, "root: Python ms", "load"], lines)


if __name__ == "__main__":
    main()
