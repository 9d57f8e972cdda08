"""GPUs: what hvdlite does there, over what the same GPU does without it, in the same run.

    python gpu.py pack step                                  # one rank
    python -m hvdlite run --mpi -np 2 gpu.py node         # 2 ranks, on one GPU or a GPU each; and with -np 4
    python -m hvdlite run --mpi -np 2 gpu.py hidden       # as if they were two nodes with a slow wire
    python -m hvdlite run --mpi -np 8 gpu.py nccl         # beside torch's ProcessGroupNCCL; a GPU per rank

--simulate runs it on tiny sizes over the simulated driver of tests/: that proves the program and measures nothing.
Without a GPU it ends with status 77.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import hvdlite
import hvdlite.torch as hvd
from gpu_device import Gpu, SimulatedGpu
from hvdlite import _native, nccl_library
from hvdlite.collectives.direct import DirectBackend
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.layout import align_up
from hvdlite.node import discover
from hvdlite.operations.allocate import allocate_on_device
from hvdlite.torch.device import Now, storage_of
from measure import (
    describe,
    estimate,
    in_turns,
    keep_collector_out,
    median_ratio,
    meet,
    parser_for,
    provenance,
    show,
    size,
    slowest,
    summary,
    table,
    write_json,
)
from models import LONG, SHORT, Task
from overlap import WAYS, Step, computing, make_steps, schedule_bound, summarize
from slow_wire import machines
from training import Alone, Hvdlite

if TYPE_CHECKING:
    from mpi4py import MPI

MIB = 1 << 20
SKIPPED = 77
WARM_UP = 8  # calls or steps: until hvdlite's order is frozen
BATCHES = 16  # times the batch that keeps one core busy
Ways = dict[str, Callable[[], object]]


def timed(
    ways: Ways, settle: Callable[[], None], comm: MPI.Comm | None, rounds: int, calls: int
) -> dict[str, np.ndarray]:
    """(rounds,) seconds per call of each way, in turns; a block ends when the GPU has come to the end of it."""
    for way in ways.values():
        for _ in range(WARM_UP):
            way()
    settle()
    seconds: dict[str, list[float]] = {label: [] for label in ways}
    for label in in_turns([*ways], rounds):
        meet(comm)
        ways[label]()
        settle()
        start = time.perf_counter()
        for _ in range(calls):
            ways[label]()
        settle()
        seconds[label].append((time.perf_counter() - start) / calls)
    return {label: slowest(comm, own) for label, own in seconds.items()}


def row(seconds: np.ndarray) -> dict[str, Any]:
    median, p95 = summary(seconds * 1e6)
    return {"median_us": median, "p95_us": p95}


# Pack and unpack, beside a copy.


def pack(gpu: Gpu, nbytes: int, rounds: int) -> dict[str, Any]:
    """Of gradients of many sizes, the largest a thousand times the smallest.

    Returns:
        Per way its time, and ``of_copy``: its bandwidth over that of a copy of as many bytes.
    """
    sizes = [max(1, round(nbytes / 4 / 128 * 1000 ** (i / 128) / 150)) for i in range(128)]
    scale = nbytes / 4 / sum(sizes)
    numels = [max(1, round(numel * scale)) for numel in sizes]
    tensors = [gpu.empty(numel) for numel in numels]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    offsets = [0]
    for numel in numels:
        offsets.append(offsets[-1] + align_up(4 * numel) // 4)
    end = offsets[-1]
    buffer, target = gpu.empty(end), gpu.empty(end)
    gpu.synchronize()
    stream = _native.DeviceStream(gpu.ordinal)
    listed = _native.TensorList([tensor.data_ptr() for tensor in tensors], numels, offsets[:-1])
    ways: Ways = {
        "copy": lambda: stream.copy(target.data_ptr(), buffer.data_ptr(), 4 * end),
        "pack": lambda: stream.pack(listed, buffer.data_ptr(), 0, end, DType.FLOAT32, DType.FLOAT32),
        "unpack": lambda: stream.unpack(listed, buffer.data_ptr(), 0, end, DType.FLOAT32, DType.FLOAT32),
    }

    def settle() -> None:
        _native.Moment(gpu.ordinal, stream.handle).wait()

    ways["pack"]()
    settle()
    for i, (start, numel) in enumerate(zip(offsets, numels, strict=False)):
        assert bool((buffer[start : start + numel] == i).all()), f"pack, tensor {i}"
    buffer.add_(1)
    gpu.synchronize()
    ways["unpack"]()
    settle()
    assert all(bool((tensor == i + 1).all()) for i, tensor in enumerate(tensors)), "unpack"
    times = timed(ways, settle, None, rounds, calls=20)
    return {
        "bytes": 4 * end,
        "tensors": len(tensors),
        "ways": {
            label: {
                **row(own),
                "gbps": 8 * end / float(np.median(own)) / 1e9,  # read and written
                "of_copy": estimate(median_ratio, times["copy"], own),
            }
            for label, own in times.items()
        },
    }


# A step of one rank, beside plain torch's.


def on_gpu(task: Task, gpu: Gpu, batches: int) -> Task:
    """``task`` there, with ``batches`` times its batch."""

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        made = [task.batch() for _ in range(batches)]
        inputs, targets = (torch.cat(parts).to(gpu.where) for parts in zip(*made, strict=True))
        return inputs, targets

    return replace(task, build=lambda: task.build().to(gpu.where), batch=batch)


def step(gpu: Gpu, tasks: Sequence[Task], batches: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    rows = []
    for task in tasks:
        comm: Any = _OneRank()
        alone, hvdlite_way = (way(on_gpu(task, gpu, batches), comm) for way in (Alone, Hvdlite))
        alone.step()
        hvdlite_way.step()
        for one, other in zip(alone.model.parameters(), hvdlite_way.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3, msg=f"{task.name}: parameters after a step")
        times = timed(
            {"plain torch": alone.step, "hvdlite": hvdlite_way.step}, gpu.synchronize, None, rounds, calls=steps
        )
        relative = estimate(median_ratio, times["hvdlite"], times["plain torch"])
        rows.append({"model": task.name, **{label: row(own) for label, own in times.items()}, "relative": relative})
    return rows


class _OneRank:
    """As much of a communicator as ways of training ask for."""

    rank, size = 0, 1


# An allreduce between ranks of a node, beside as many bytes copied.


def node(gpu: Gpu, comm: MPI.Comm, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """In place. Every rank reads and writes as many bytes for it as for a copy of its own tensor: that is the bound."""
    _, own_node = discover(comm, 30.0)
    memory = DeviceMemory(own_node, gpu.ordinal)
    backend = DirectBackend(own_node, memory, hvdlite.runtime().recorder)
    average = Reduction(ReduceOp.SUM, 1.0, 1.0 / comm.size)
    rows = []

    def settle() -> None:
        memory.moment().wait()
        gpu.synchronize()

    for nbytes in sizes:
        numel = nbytes // 4
        fusion_buffer = memory.allocate(nbytes)
        part = fusion_buffer.buffer(0, numel, DType.FLOAT32)
        elsewhere, target = gpu.empty(numel), gpu.empty(numel)
        where = Now().on_device(elsewhere)
        assert where is not None
        own = allocate_on_device(hvdlite.runtime().group, nbytes, where, f"benchmark.{nbytes}")
        assert own is not None, "the GPUs of these ranks cannot share memory"
        in_slot, behind = (_floats(region.region, numel) for region in (own, fusion_buffer))
        places = {"hvdlite backend": behind, "hvd, in its slot": in_slot, "hvd, elsewhere": elsewhere}
        pattern = torch.arange(numel, dtype=torch.float32).remainder_(1000)
        settle()  # new memory is zeroed by then
        for place in places.values():
            place.copy_(pattern * (comm.rank + 1))
        gpu.synchronize()
        ways: Ways = {
            "copy": lambda t=target, p=part: memory.copy(t.data_ptr(), p.address, p.nbytes),
            "hvdlite backend": lambda p=part: backend.allreduce(p, average).wait(),
            "hvd, in its slot": lambda t=in_slot: hvd.allreduce_(t, op=hvd.Average, name="in its slot"),
            "hvd, elsewhere": lambda t=elsewhere: hvd.allreduce_(t, op=hvd.Average, name="elsewhere"),
        }

        times = timed(ways, settle, comm, rounds, calls=20 if nbytes <= 64 * MIB else 5)
        expected = pattern * ((comm.size + 1) / 2)
        for label, place in places.items():
            torch.testing.assert_close(place.cpu(), expected, rtol=1e-5, atol=1e-3, msg=f"{label}, {size(nbytes)}")
        rows += [_bandwidth_row(label, nbytes, comm.size, taken, times["copy"]) for label, taken in times.items()]
    return rows


def _floats(region: Any, numel: int) -> torch.Tensor:
    storage = storage_of(region)
    return torch.empty(0, device=storage.device).set_(storage, 0, (numel,))  # type: ignore[call-overload, no-any-return]


def _bandwidth_row(label: str, nbytes: int, ranks: int, seconds: np.ndarray, bound: np.ndarray) -> dict[str, Any]:
    """algbw and busbw as nccl-tests define them."""
    algbw = nbytes / float(np.median(seconds)) / 1e9
    return {
        "way": label,
        "bytes": nbytes,
        **row(seconds),
        "algbw_gbps": algbw,
        "busbw_gbps": algbw * 2 * (ranks - 1) / ranks,
        "of_first": estimate(median_ratio, seconds, bound),
    }


# What hides behind backward.


def hidden(gpu: Gpu, comm: MPI.Comm, layers: int, width: int, rows: int | None, gbit: float, rounds: int) -> Any:
    """Between two nodes whose wire takes as long for the gradients as backward takes."""
    torch.set_default_device(gpu.where)
    nbytes = layers * width**2 * 4
    wire_s = nbytes * 8 / (gbit * 1e9)  # 2 (N - 1) / N of them, and N is 2
    rows = rows or _rows_for(gpu, comm, layers, width, wire_s)
    steps = make_steps(lambda: computing(layers, width), width, rows)
    ways: Ways = {label: _until_done(own, gpu) for label, own in steps.items()}
    times = timed(ways, gpu.synchronize, comm, rounds, calls=2)
    found = summarize({label: own[:, None] * 1e3 for label, own in times.items()}, WAYS)
    torch.set_default_device("cpu")
    return {
        "gradient_mib": nbytes / MIB,
        "rows": rows,
        "wire_gbit": gbit,
        "wire_ms": wire_s * 1e3,
        "schedule_bound": schedule_bound(layers, wire_s, wire_s),
        **found,
    }


def _until_done(one: Step, gpu: Gpu) -> Callable[[], None]:
    def call() -> None:
        one()
        gpu.synchronize()

    return call


def _rows_for(gpu: Gpu, comm: MPI.Comm, layers: int, width: int, seconds: float) -> int:
    """Of a batch whose backward takes so long, where all ranks compute at the same time."""
    rows = 4096
    for _ in range(2):
        alone = make_steps(lambda: computing(layers, width), width, rows)["no communication"]
        taken = float(np.median(timed({"": _until_done(alone, gpu)}, gpu.synchronize, comm, 3, 2)[""]))
        rows = min(1 << 17, max(64, round(rows * 1.5 * seconds / taken / 64) * 64))  # backward is two thirds of a step
    return rows


# Several GPUs, beside NCCL.


def beside_nccl(gpu: Gpu, comm: MPI.Comm, sizes: Sequence[int], rounds: int, simulate: bool) -> list[dict[str, Any]]:
    address = comm.bcast(("127.0.0.1", 29400 + os.getpid() % 1000))
    store = dist.TCPStore(*address, comm.size, comm.rank == 0)
    dist.init_process_group("gloo" if simulate else "nccl", store=store, rank=comm.rank, world_size=comm.size)
    rows = []
    for nbytes in sizes:
        numel = nbytes // 4
        ours, theirs = gpu.empty(numel), torch.empty(numel, device=gpu.where)
        for tensor in (ours, theirs):
            tensor.fill_(comm.rank + 1)
        gpu.synchronize()

        def reduce_theirs(tensor: torch.Tensor = theirs) -> None:
            dist.all_reduce(tensor)
            tensor.div_(comm.size)

        ways: Ways = {
            "ProcessGroupNCCL": reduce_theirs,
            "hvdlite": lambda t=ours: hvd.allreduce_(t, op=hvd.Average, name="beside NCCL"),
        }
        times = timed(ways, gpu.synchronize, comm, rounds, calls=20)
        for label, tensor in (("hvdlite", ours), ("ProcessGroupNCCL", theirs)):
            torch.testing.assert_close(tensor.cpu(), torch.full((numel,), (comm.size + 1) / 2), msg=label)
        bound = times["ProcessGroupNCCL"]
        rows += [_bandwidth_row(label, nbytes, comm.size, own, bound) for label, own in times.items()]
    dist.destroy_process_group()
    return rows


def print_report(report: dict[str, Any]) -> None:
    if "pack" in report:
        found = report["pack"]["ways"]
        lines = [
            [way, f"{own['median_us']:.1f}", f"{own['gbps']:.0f}", show(own["of_copy"], 3)]
            for way, own in found.items()
        ]
        print("\n" + table([f"{size(report['pack']['bytes'])}", "median us", "GB/s", "bandwidth / copy's"], lines))
    if "step" in report:
        lines = [
            [own["model"], f"{own['plain torch']['median_us'] / 1e3:.2f}", show(own["relative"], 3)]
            for own in report["step"]
        ]
        print("\n" + table(["step of one rank", "plain torch, ms", "hvdlite / plain torch"], lines))
    for part, first in (("node", "copy"), ("nccl", "ProcessGroupNCCL")):
        lines = [
            [
                f"{size(own['bytes'])}, {own['way']}",
                f"{own['median_us']:.1f}",
                f"{own['busbw_gbps']:.1f}",
                show(own["of_first"], 3),
            ]
            for own in report.get(part, ())
        ]
        if lines:
            print("\n" + table(["allreduce", "median us", "busbw, GB/s", f"time / {first}'s"], lines))
    if "hidden" in report:
        found = report["hidden"]
        lines = [[way, f"{own['median_ms']:.2f}", show(own["exposed_ms"], 2)] for way, own in found["steps"].items()]
        print("\n" + table([f"{found['wire_ms']:.0f} ms on the wire", "median ms", "exposed ms"], lines))
        share = found["hidden_share"]
        print(f"hidden share: {'too little is exposed to tell' if share is None else show(share, 3)}")


def main() -> None:
    parser = parser_for(__doc__, rounds=10)
    parser.add_argument("parts", nargs="+", choices=["pack", "step", "node", "hidden", "nccl"])
    parser.add_argument("--simulate", action="store_true", help="on tiny sizes, over the simulated driver")
    parser.add_argument("--mib", type=float, nargs="+", default=[1 / 256, 1, 16, 64, 256], help="and 4 KiB by default")
    parser.add_argument("--gbit", type=float, default=10.0, help="of the slow wire (default: %(default)s)")
    options = parser.parse_args()
    simulate = options.simulate
    if not simulate and not torch.cuda.is_available():
        print("gpu.py: torch sees no GPU here; --simulate proves the program without one", file=sys.stderr)
        sys.exit(SKIPPED)
    if "hidden" in options.parts:
        if len(options.parts) > 1:
            parser.error("hidden goes alone, since it makes two nodes of this machine")
        os.environ["HVDLITE_GPU_MPI"] = "pinned"  # the slow wire carries memory of the host
        os.environ["HVDLITE_SMALL_BYTES"] = "0"  # and all of it: what is early does not come by it
        with machines([0, 1], options.gbit * 1e9 / 8):
            hvd.init()
    else:
        hvd.init()
    gpu = SimulatedGpu() if simulate else Gpu()
    comm = _communicator(parser, options.parts)
    has_nccl = simulate or gpu.count >= hvd.local_size() or nccl_library.load().shares_gpus
    if "nccl" in options.parts and not has_nccl:
        print(f"gpu.py: NCCL needs a GPU per rank, and here are {gpu.count} for {hvd.local_size()}", file=sys.stderr)
        sys.exit(SKIPPED)
    keep_collector_out()
    facts = provenance(comm, len(hvdlite.runtime().topology.nodes)) | gpu.facts() | {"simulated": simulate}
    if hvd.rank() == 0:
        print(describe(facts), flush=True)
        print(f"{facts['gpus']} x {facts['gpu']}, CUDA {facts['driver_cuda']}, kernels: {facts['kernels']}", flush=True)
    report = {"benchmark": "gpu", **facts, **measure(options, gpu, comm)}
    if hvd.rank() == 0:
        print_report(report)
        write_json(options.json, report)


def _communicator(parser: argparse.ArgumentParser, parts: Sequence[str]) -> MPI.Comm | None:
    """None for one rank, which needs no MPI."""
    alone = hvd.size() == 1
    if alone != ({*parts} <= {"pack", "step"}):
        parser.error("pack and step are of one rank, and the others of several")
    if "hidden" in parts and hvd.size() != 2:
        parser.error("hidden is of two ranks")
    if alone:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


def measure(options: argparse.Namespace, gpu: Gpu, comm: MPI.Comm | None) -> dict[str, Any]:
    simulate, rounds = options.simulate, options.rounds
    sizes = [4096, 65536] if simulate else [round(mib * MIB) for mib in options.mib]
    found: dict[str, Any] = {}
    if "pack" in options.parts:
        found["pack"] = pack(gpu, 1 << 16 if simulate else 256 * MIB, rounds)
    if "step" in options.parts:
        tasks = SHORT[2:3] if simulate else LONG + SHORT
        found["step"] = step(gpu, tasks, 1 if simulate else BATCHES, rounds, 1 if simulate else 10)
    if comm is None:
        return found
    if "node" in options.parts:
        found["node"] = node(gpu, comm, sizes, rounds)
    if "hidden" in options.parts:
        layers, width, rows = (3, 32, 8) if simulate else (24, 1024, None)
        found["hidden"] = hidden(gpu, comm, layers, width, rows, options.gbit, rounds)
    if "nccl" in options.parts:
        found["nccl"] = beside_nccl(gpu, comm, sizes, rounds, simulate)
    return found


if __name__ == "__main__":
    main()
