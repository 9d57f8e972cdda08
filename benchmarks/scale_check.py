"""What real ranks say, counted by themselves; and whether virtual ones say the same (scale_model.py).

    python -m hvdlite run --mpi -np 4 scale_check.py
    python across_hosts.py --hosts 8 --ranks 4 --rate 10gbit scale_check.py     # needs root

The same buckets are reduced both ways, one at a time and then all at once, and every count of every rank is compared.
Without --claims their order is frozen on the way. All at once, how many buckets share a message depends on when they
are ready, so there are bounds for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import hvdlite
from data_path import Machine
from hvdlite.coordinator.order_watch import OrderWatch
from hvdlite.coordinator.submission import Submission
from hvdlite.job_runtime import Runtime
from hvdlite.memory.base import FusionBuffer, Home
from hvdlite.memory.layout import align_up, slot_offsets
from hvdlite.memory.views import TensorView
from hvdlite.operations.allocate import allocate
from hvdlite.operations.allreduce import allreduce_async
from measure import parser_for, provenance, table, write_json
from schedules import Bucket, Schedule, bucket
from virtual_ranks import VirtualJob

if TYPE_CHECKING:
    from mpi4py import MPI

ALONE_S = 0.1  # between two buckets, in virtual time: far more than it takes to agree on one
SHARED = (
    "batches",
    "page_bytes_written",
    "page_bytes_read",
    *(f"tree_{what}_{way}" for what in ("messages", "bytes") for way in ("sent", "received")),
)
"""What there is less of where buckets are ready together."""
Counts = dict[str, tuple[int, int, int]]
"""(real, at least, at most) by name."""
# Elements of each tensor of each bucket: below and above what recursive doubling takes, whole cache lines and not.
TENSORS = [[16], [3, 35, 1], [192], [193, 7], [5000, 3], [100_000], [17, 300_000]]


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="the first spells requests out (default: %(default)s)")
    parser.add_argument("--claims", action="store_true", help="freeze nothing")
    options = parser.parse_args()
    # Who has waited long says so, for the stall check; with more ranks than cores that would be often.
    os.environ["HVDLITE_STALL_CHECK_DISABLE"] = "1"
    os.environ["HVDLITE_PREPARED_OPERATIONS"] = "0"  # with which ranks of one node say nothing at all
    if options.claims:
        OrderWatch.period = lambda watch: 0  # type: ignore[method-assign]
    hvdlite.init()
    from mpi4py import MPI

    comm, runtime = MPI.COMM_WORLD, hvdlite.runtime()
    steps = [*compare(runtime, comm, not options.claims, options.steps)]
    wrong = [f"step {i}: {text}" for i, (_, counts) in enumerate(steps) for text in differences(counts)]
    everywhere = comm.gather((runtime.topology.is_leader, steps[options.steps - 1][1], steps[-1][1], wrong))
    facts = provenance(comm, len(runtime.topology.nodes))
    if everywhere is not None:
        row: dict[str, Any] = {"fanout": runtime.config.tree_fanout, "buckets": len(TENSORS)}
        print(f"{facts['ranks']} ranks on {facts['nodes']} node(s), {len(TENSORS)} buckets, in the last step at most")
        for place, how in enumerate(("one at a time", "at once"), start=1):
            row[how] = highest([(rank[0], rank[place]) for rank in everywhere])
            print(f"\n{counts_table(how, row[how])}")
        by_rank = {rank: texts for rank, (*_, texts) in enumerate(everywhere) if texts}
        print("\n".join(f"rank {rank}: {text}" for rank, texts in by_rank.items() for text in texts))
        print(f"{len(by_rank)} ranks differ" if by_rank else "all counts of all ranks are as computed, in every step")
        wrong = list(by_rank.values())
        if options.json:
            write_json(options.json, {"benchmark": "scale_check", **facts, **row})
    return int(comm.bcast(bool(wrong)))


def differences(step: Counts) -> list[str]:
    return [
        f"{name} is {real}, not {least}{f' to {most}' if most > least else ''} as computed"
        for name, (real, least, most) in step.items()
        if not least <= real <= most
    ]


def highest(counts: list[tuple[bool, Counts]]) -> dict[str, dict[str, int]]:
    """The highest counts of one rank: of the root, of other leaders, of other ranks, from (is a leader, counts)."""
    members = {
        "root": [counts[0][1]],
        "other leaders": [own for is_leader, own in counts[1:] if is_leader],
        "other ranks": [own for is_leader, own in counts[1:] if not is_leader],
    }
    return {
        who: {name: max(own[name][0] for own in own_counts) for name in own_counts[0]}
        for who, own_counts in members.items()
        if own_counts
    }


def counts_table(how: str, by_member: dict[str, dict[str, int]]) -> str:
    rows = [[name, *(f"{counts[name]}" for counts in by_member.values())] for name in by_member["root"]]
    return table([how, *by_member], rows)


def schedule(gap_s: float) -> Schedule:
    """`TENSORS`, a bucket every ``gap_s``."""
    buckets: list[Bucket] = []
    end = 0
    for i, numels in enumerate(TENSORS):
        tensors = [(f"layer{i}.{j}.weight", (numel,)) for j, numel in enumerate(numels)]
        buckets.append(bucket(f"bucket{i}", tensors, gap_s * (i + 1), end))
        end += align_up(buckets[-1].nbytes)
    return Schedule("check", gap_s * (len(TENSORS) + 1), tuple(buckets))


def compare(runtime: Runtime, comm: MPI.Comm, freezes: bool, steps: int) -> Iterator[tuple[bool, Counts]]:
    """What this rank counts in each step, and what virtual ranks do; and whether buckets were reduced one at a time.

    First they are, then they are reduced at once, ``steps`` steps each. A collective call.
    """
    made = schedule(ALONE_S)
    job = VirtualJob(runtime.topology.nodes, made, Machine(), runtime.config, freezes=freezes)
    memory = allocate(runtime.group, sum(align_up(each.nbytes) for each in made.buckets))
    real, virtual = counted(runtime, comm), job.statistics(runtime.rank)
    for i in range(2 * steps):
        alone = i < steps
        handles = []
        for each in made.buckets:
            handles.append(reduce(runtime, memory, each))
            if alone:
                handles[-1].wait()
        for handle in handles:
            handle.wait()
        job.step(lambda nbytes: 1e-3)
        real_after, virtual_after = counted(runtime, comm), job.statistics(runtime.rank)
        counts = {}
        for name in virtual:
            most = virtual_after[name] - virtual[name]
            least = most if alone or name not in SHARED else most // len(made.buckets)
            counts[name] = real_after[name] - real[name], least, most
        yield alone, counts
        real, virtual = real_after, virtual_after


def counted(runtime: Runtime, comm: MPI.Comm) -> dict[str, int]:
    """Once everybody is here; nobody goes on before all have looked."""
    comm.Barrier()
    counts = runtime.statistics()
    comm.Barrier()
    return counts


def reduce(runtime: Runtime, memory: FusionBuffer, made: Bucket) -> Submission:
    """Allreduce ``made`` where it lives in ``memory``."""
    request = made.request
    assert request.place is not None
    home = Home(memory, request.place[1])
    offsets, _ = slot_offsets([prod(spec.shape) for spec in request.tensors], request.tensors[0].dtype.itemsize)
    start = memory.address + home.offset_bytes
    views = [
        TensorView(start + offset * spec.dtype.itemsize, spec.shape, spec.dtype, memory.memory)
        for offset, spec in zip(offsets, request.tensors, strict=True)
    ]
    names = [spec.name for spec in request.tensors]
    return allreduce_async(runtime.group, views, views, request.reduction, name=request.name, names=names, home=home)


if __name__ == "__main__":
    sys.exit(main())
