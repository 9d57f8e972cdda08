"""Whether real ranks say what virtual ones do (scale_model.py): the same buckets both ways, every count on every rank.

    python -m hvdlite run -np 4 scale_check.py
    python across_hosts.py --hosts 8 --ranks 4 scale_check.py     # 8 emulated hosts, needs root

Buckets are reduced one at a time, and then all at once, where what carries the messages depends on when they are ready.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import hvdlite
from data_path import Machine
from hvdlite.coordinator import frozen_plan, negotiation
from hvdlite.coordinator.handle import Handle
from hvdlite.fusion.fusion_buffer import FusionBuffer, Home, slot_offsets
from hvdlite.memory import TensorView, align_up
from hvdlite.runtime import Runtime
from measure import table
from schedules import Bucket, Schedule, bucket
from virtual_ranks import VirtualJob

if TYPE_CHECKING:
    from mpi4py import MPI

ALONE_S = 0.1  # between two buckets, in virtual time: far more than it takes to agree on one
WHENEVER = ("submissions", "claims_sent", "claims_heard", "responses", "messages_cached", "messages_spelled_out")
"""What does not depend on when buckets are ready."""
Pairs = dict[str, tuple[int, int]]
"""(real, virtual) by name of a count."""
# Elements of each tensor of each bucket: below and above what recursive doubling takes, whole cache lines and not.
TENSORS = [[16], [3, 35, 1], [192], [193, 7], [5000, 3], [100_000], [17, 300_000]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="the first spells requests out (default: %(default)s)")
    options = parser.parse_args()
    # A leader that has waited for a second passes on what it has; with more ranks than cores that would be often.
    negotiation._PATIENCE_S = float("inf")
    frozen_plan._FREEZABLE = ()
    hvdlite.init()
    from mpi4py import MPI

    comm, runtime = MPI.COMM_WORLD, hvdlite.runtime()
    status = 0
    for alone in (True, False):
        steps = [*compare(runtime, comm, alone, options.steps)]
        wrong = [f"step {i}: {text}" for i, step in enumerate(steps) for text in differences(step)]
        everywhere = comm.gather((runtime.topology.is_leader, steps[-1], wrong))
        if everywhere is None:
            continue
        print(f"{runtime.size} ranks on {len(runtime.topology.nodes)} node(s), {len(TENSORS)} buckets", end=" ")
        print("one at a time" if alone else "at once")
        print(last_step_table(everywhere))
        by_rank = {rank: texts for rank, (_, _, texts) in enumerate(everywhere) if texts}
        print("\n".join(f"rank {rank}: {text}" for rank, texts in by_rank.items() for text in texts))
        equal = f"all steps and ranks: {len(steps[0])} counts are equal"
        print(f"{len(by_rank)} ranks differ\n" if by_rank else f"{equal}\n")
        status |= bool(by_rank)
    return int(comm.bcast(status))


def differences(step: Pairs) -> list[str]:
    return [f"{name} is {real}, not {virtual} as computed" for name, (real, virtual) in step.items() if real != virtual]


def last_step_table(everywhere: list[tuple[bool, Pairs, list[str]]]) -> str:
    """What the root, the last leader and the last of the other ranks have counted."""
    chosen = {"root": everywhere[0][1]}
    last = {is_leader: step for is_leader, step, _ in everywhere[1:]}
    chosen |= {who: last[leads] for who, leads in (("last leader", True), ("last other rank", False)) if leads in last}
    names = everywhere[0][1]
    rows = [[name, *(f"{step[name][0]}" for step in chosen.values())] for name in names]
    return table(["in the last step", *chosen], rows)


def schedule(gap_s: float) -> Schedule:
    """`TENSORS`, a bucket every ``gap_s``."""
    buckets: list[Bucket] = []
    end = 0
    for i, numels in enumerate(TENSORS):
        tensors = [(f"layer{i}.{j}.weight", (numel,)) for j, numel in enumerate(numels)]
        buckets.append(bucket(f"bucket{i}.{gap_s}", tensors, gap_s * (i + 1), end))
        end += align_up(buckets[-1].nbytes)
    return Schedule("check", gap_s * (len(TENSORS) + 1), tuple(buckets))


def compare(runtime: Runtime, comm: MPI.Comm, alone: bool, steps: int) -> Iterator[Pairs]:
    """What this rank counts in each step. A collective call."""
    made = schedule(ALONE_S if alone else 0.0)
    job = VirtualJob(runtime.topology.nodes, made, Machine(), runtime.config, lambda nbytes: 1e-3)
    memory = runtime.group.allocate(sum(align_up(each.nbytes) for each in made.buckets))
    real, virtual = counted(runtime, comm), job.statistics(runtime.rank)
    for _ in range(steps):
        handles = []
        for each in made.buckets:
            handles.append(reduce(runtime, memory, each))
            if alone:
                handles[-1].wait()
        for handle in handles:
            handle.wait()
        job.step()
        real_after, virtual_after = counted(runtime, comm), job.statistics(runtime.rank)
        names = virtual if alone else WHENEVER
        yield {name: (real_after[name] - real[name], virtual_after[name] - virtual[name]) for name in names}
        real, virtual = real_after, virtual_after


def counted(runtime: Runtime, comm: MPI.Comm) -> dict[str, int]:
    """Once everybody is here; nobody goes on before all have looked."""
    comm.Barrier()
    counts = runtime.statistics()
    comm.Barrier()
    return counts


def reduce(runtime: Runtime, memory: FusionBuffer, made: Bucket) -> Handle:
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
    return runtime.group.allreduce_async(views, views, name=request.name, names=names, op=request.op, home=home)


if __name__ == "__main__":
    sys.exit(main())
