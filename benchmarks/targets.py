"""What hvdlite should reach, beside what was measured: ratios within one run, from the reports of the benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from figures import Estimate, Figure, Target, figure, inverse
from measure import size

KIB, MIB = 1 << 10, 1 << 20
BACKEND, IN_SLOT, ELSEWHERE = "hvdlite backend", "hvd, in its slot", "hvd, elsewhere"
COMPUTE_BOUND = ("ResNet-50", "small GPT")
HARDER = ("convolutional", "transformer")  # communicate twice as much per time of compute
TINY = "400 tiny parameters"
COUNTS = 1.02  # simple MPI is to be beaten where it makes a step so much longer
MEMORY_SHARE, MEMORY_BYTES = 0.05, 16 * MIB  # of the gradients, and besides

Report = dict[str, Any]
Reports = dict[str, Report]


def targets(reports: Reports) -> list[Target]:
    """Every target, with all that the reports, by the name of the benchmark, can tell."""
    return [Target(what, tuple(figures(reports))) for what, figures in _TARGETS.items()]


# Allreduce.


def _of(report: Report, way: str, nbytes: int) -> dict[str, Any] | None:
    return next((row for row in report["rows"] if row["way"] == way and row["bytes"] == nbytes), None)


def _against(
    report: Report, own: str, peers: Collection[str], low: int, below: float = math.inf
) -> tuple[int, Estimate] | None:
    """The size in [low, below) where ``own`` is least ahead of the fastest of ``peers``; how many times as fast."""
    found = []
    for row in report["rows"]:
        ratios = [ratio for peer, ratio in row.get("times_as_fast", {}).items() if peer in peers]
        if row["way"] == own and low <= row["bytes"] < below and ratios:
            found.append((row["bytes"], min(ratios, key=lambda ratio: ratio["value"])))
    return min(found, key=lambda pair: pair[1]["value"], default=None)


MPI, PIECES, GLOO = ("MPI", "MPI coll/sm"), ("MPI", "MPI, pieces", "MPI coll/sm"), ("Gloo",)


def _faster(
    reports: Reports,
    own: str,
    peers: Collection[str],
    low: int,
    limit: float | None,
    called: str,
    below: float = math.inf,
) -> Iterator[Figure]:
    for name, mpi in (("allreduce", "Open MPI"), ("allreduce_mpich", "MPICH")):
        found = _against(reports[name], own, peers, low, below) if name in reports else None
        if found is not None:
            label = called if peers is GLOO else f"{called}, {mpi}"
            yield figure(f"{label}, least at {size(found[0])}", found[1], limit, at_most=False)


def _memcpy(own: str, limit: float) -> Callable[[Reports], Iterator[Figure]]:
    def figures(reports: Reports) -> Iterator[Figure]:
        row = _of(reports["allreduce"], own, 64 * MIB) if "allreduce" in reports else None
        if row is not None:
            yield figure("time / memcpy's", inverse(row["times_as_fast"]["memcpy"]), limit)

    return figures


def _backend(reports: Reports) -> Iterator[Figure]:
    yield from _faster(reports, BACKEND, MPI, 16 * KIB, 3.0, "one call")
    yield from _faster(reports, BACKEND, PIECES, 16 * KIB, None, "or in 4 MiB pieces")


def _intel(reports: Reports) -> Iterator[Figure]:
    # The node backend as users reach it, by one native call; `Backend.allreduce` of so few bytes is mostly Python.
    for low, below, limit, called in ((4, 4 * KIB, 0.5, "below 4 KiB"), (4 * KIB, math.inf, 1.0, "from 4 KiB")):
        report = reports.get("allreduce_intelmpi", {"rows": []})
        found = _against(report, IN_SLOT, MPI, low, below)
        if found is not None:
            yield figure(f"{called}, least at {size(found[0])}", found[1], limit, at_most=False)


# (where the tensor is, from how many bytes on, up to what, how many times as fast as the fastest of all MPIs)
_USER = (
    (IN_SLOT, 32 * KIB, 256 * KIB, 1.0),
    (IN_SLOT, 256 * KIB, 64 * MIB, 2.0),
    (IN_SLOT, 16 * MIB, 64 * MIB, 3.0),
    (IN_SLOT, 64 * MIB, math.inf, 2.0),  # which memory does not give: it is what the backend is limited by
    (ELSEWHERE, 64 * KIB, 1 * MIB, 1.0),
    (ELSEWHERE, 1 * MIB, math.inf, 1.3),
)


def _user(reports: Reports) -> Iterator[Figure]:
    for own, low, below, limit in _USER:
        yield from _faster(reports, own, PIECES, low, limit, f"{own}, from {size(low)}", below)


def _gloo(reports: Reports) -> Iterator[Figure]:
    for own, limit in ((IN_SLOT, 5.0), (ELSEWHERE, 2.5)):
        yield from _faster(reports, own, GLOO, 256 * KIB, limit, own)


def _types(reports: Reports) -> Iterator[Figure]:
    for label, way in reports.get("slot", {}).get("ways", {}).items():
        if label.startswith(("float16", "bfloat16")):
            yield figure(label.split(",")[0], inverse(way["time_of_first"]), 0.8, at_most=False)


def _oversubscribed(reports: Reports) -> Iterator[Figure]:
    if "slot" in reports:
        report = reports["slot"]
        way = report["ways"].get(f"float32, {report['ranks']} ranks")
        if way is not None and report["ranks"] > report["few"]:
            label = f"time of {report['ranks']} ranks / of {report['few']}"
            yield figure(label, way["time_of_first"], 2.5)


# Small operations.


def _latency(reports: Reports) -> Iterator[Figure]:
    if "latency" in reports:
        for way, limit in (("hvd.allreduce_", 10), ("hvd.allreduce", 15)):
            blocking = reports["latency"]["blocking, 4 B"][way]
            yield figure(f"{way}, median, us", blocking["median_us"], limit)
            yield figure(f"{way}, 99th percentile, us", blocking["p99_us"], 200)


def _burst(reports: Reports) -> Iterator[Figure]:
    for title, rows in reports.get("latency", {}).items():
        if title.endswith("at once, 4 KiB"):
            ours = rows["hvd.allreduce_async_"]
            yield figure(f"{title}, each, us", ours["median_us"] / int(title.split()[0]), 4)
            yield figure(f"{title}, times as fast as Gloo", ours["times_as_fast"]["Gloo"], 5.0, at_most=False)


def _two_orders(reports: Reports) -> Iterator[Figure]:
    if "two orders" in reports.get("latency", {}):
        turns = reports["latency"]["two orders"]
        yield figure(f"{turns['in_turns_us']:.2f} us per operation, time / of one order", turns["relative"], 1.1)


def _crowded(reports: Reports) -> Iterator[Figure]:
    report = reports.get("allreduce_8", {"rows": []})
    found = _against(report, ELSEWHERE, ("MPI",), 4 * KIB, 8 * KIB)
    if found is not None:
        yield figure(f"8 ranks, {size(found[0])}, time / MPI's", inverse(found[1]), 3.0)


# Steps.


def _models(reports: Reports, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for found in reports.get(name, {}).get("models", ()):
        yield found["model"], found


def _exposed(reports: Reports) -> Iterator[Figure]:
    for model, found in _models(reports, "train_step"):
        ddp = found["against_best"]["DDP"]
        if found["ways"][ddp["way"]]["exposed_ms"]["low"] > 0:
            yield figure(f"{model}, exposed / DDP's", ddp["exposed"], 0.5)
        else:
            exposed = found["ways"]["hvdlite"]["exposed_ms"]
            yield figure(f"{model}, where what DDP exposes is within the noise, exposed ms", exposed)
    for model, found in _models(reports, "train_step"):
        mpi = found["against_best"]["simple MPI"]
        relative = found["ways"][mpi["way"]]["relative"]["value"]
        if relative > COUNTS:
            yield figure(f"{model}, step / that of {mpi['way']}", mpi["step"], 1.0)
        else:
            yield figure(f"{model}, where {mpi['way']} costs {100 * (relative - 1):.1f} %", mpi["step"])


def _tiny(reports: Reports) -> Iterator[Figure]:
    for model, found in _models(reports, "train_step"):
        if model == TINY:
            for name, limit in (("simple MPI", 0.5), ("DDP", 0.25)):
                best = found["against_best"][name]
                yield figure(f"that of {best['way']}", best["exposed"], limit)


def _compute_bound(reports: Reports) -> Iterator[Figure]:
    for model, found in _models(reports, "train_step"):
        if model in COMPUTE_BOUND + HARDER:
            limit = 1.015 if model in COMPUTE_BOUND else None
            yield figure(model, found["ways"]["hvdlite"]["relative"], limit)


def _one_rank(reports: Reports) -> Iterator[Figure]:
    for model, found in _models(reports, "one_rank"):
        yield figure(model, found["ways"]["hvdlite"]["relative"], 1.10 if model == TINY else 1.01)


def _timeline(reports: Reports) -> Iterator[Figure]:
    for model, found in reports.get("timeline_cost", {}).get("models", {}).items():
        yield figure(model, found["relative"], 1.02)


def _checks(reports: Reports) -> Iterator[Figure]:
    """Of state, at every 10th step: ten times what it costs at every 100th."""
    for model, found in reports.get("checks_cost", {}).get("models", {}).items():
        yield figure(f"{model}, NaN and Inf", found["numerics"], None)
        yield figure(f"{model}, state every 10 steps", found["state, every 10"], 1.10)


# What is lost, and found again.

_RECOVERY_S = {
    "one node, without MPI": 5.0,
    "one node, Open MPI": 5.0,
    "a host lost, Open MPI": 15.0,
    "begins anew, MPICH": 30.0,
    "a host lost, MPICH": 30.0,
}


def _recovery(reports: Reports) -> Iterator[Figure]:
    """The longest of each kind."""
    for name in ("recovery", "recovery_mpich"):
        for what, found in reports.get(name, {}).get("seconds", {}).items():
            yield figure(f"{what}, s", max(found), _RECOVERY_S[what])


def _examined(reports: Reports) -> Iterator[Figure]:
    report = reports.get("links_examined", {})
    for key, label, limit in (("doctor_s", "hvdliterun --doctor, s", 10.0), ("probe_s", "in hvd.init(), s", 0.2)):
        if key in report:
            yield figure(label, max(report[key]), limit)


# Costs.

_WHERE = {"costs": "one node", "costs_hosts": "two hosts"}


def _idle(reports: Reports) -> Iterator[Figure]:
    for name, where in _WHERE.items():
        if "idle" in reports.get(name, {}):
            yield figure(f"{where}, %", 100 * max(reports[name]["idle"]), 0.03)


def _waiting(reports: Reports) -> Iterator[Figure]:
    for name, where in _WHERE.items():
        if "waiting" in reports.get(name, {}):
            yield figure(f"{where}, %", 100 * max(max(each["shares"]) for each in reports[name]["waiting"]), 0.2)


def _memory(reports: Reports) -> Iterator[Figure]:
    models = reports.get("costs", {}).get("memory", {})
    for key, when in (("at_rest_bytes", "between steps"), ("at_peak_bytes", "during a step")):
        shares = {
            model: found[key] / (MEMORY_SHARE * found["gradient_bytes"] + MEMORY_BYTES)
            for model, found in models.items()
        }
        if shares:
            most = max(shares, key=lambda model: shares[model])
            label = f"{when}, {models[most][key] / MIB:.1f} MiB for {most}: of what is allowed"
            yield figure(label, shares[most], 1.0)


# Across hosts.


def _hosts(name: str, limit: float) -> Callable[[Reports], Iterator[Figure]]:
    def figures(reports: Reports) -> Iterator[Figure]:
        report = reports.get(name)
        if report is None:
            return
        for way, wanted in ((IN_SLOT, limit), (BACKEND, None), ("TCP", None)):
            row = _of(report, way, 64 * MIB)
            if row is not None:
                yield figure(f"{way}, time / bound", row["of_bound"], wanted)
        row = _of(report, IN_SLOT, 64 * MIB)
        hosts, ranks = report["nodes"], report["ranks"]
        if row is not None and ranks > hosts:
            # A flat ring sends 2 (n - 1) / n of the bytes over each host's link, hvdlite's 2 (N - 1) / N.
            theory = (ranks - 1) / ranks / ((hosts - 1) / hosts)
            yield figure("times as fast as MPI", row["times_as_fast"]["MPI"], theory, at_most=False)

    return figures


def _small(reports: Reports) -> Iterator[Figure]:
    for way in (IN_SLOT, ELSEWHERE, BACKEND):
        found = _against(reports["hosts_small"], way, ("MPI",), 0) if "hosts_small" in reports else None
        if found is not None:
            yield figure(f"{way}, time / MPI's, most at {size(found[0])}", inverse(found[1]), 2.0)


def _hidden(reports: Reports) -> Iterator[Figure]:
    report = reports.get("overlap", {})
    besides = (("plain TCP, which adds nothing", "tcp"), ("hidden behind a backward that sleeps", "asleep"))
    share = report.get("hidden_share")
    if share is not None:
        yield figure("hidden share", share, 0.85, at_most=False)
    for label, key in besides:
        share = (report.get(key) or {}).get("hidden_share")
        if share is not None:
            yield figure(label, share)


# Tensor parallelism. Its reports say what is wanted of each shape.


def _split(name: str, what: str, keys: Collection[str]) -> Callable[[Reports], Iterator[Figure]]:
    """Of each kind of ``what``, told apart by ``keys``, the shape that is farthest from what is wanted of it."""

    def figures(reports: Reports) -> Iterator[Figure]:
        kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in reports.get(name, {}).get("rows", ()):
            if "limit" in row and what in (row.get("what"), row.get("direction")):
                kinds.setdefault(tuple(row[key] for key in keys), []).append(row)
        for kind, rows in kinds.items():
            worst = max(rows, key=lambda row: row["over_alone"]["value"] / row["limit"])
            label = f"{', '.join(kind)}, most at {worst['rows']} rows of {worst['hidden']}"
            yield figure(label, worst["over_alone"], worst["limit"])

    return figures


def _best_unfused(reports: Reports) -> Iterator[Figure]:
    for name in ("tensor_parallel", "tensor_parallel_layer"):
        rows = [row for row in reports.get(name, {}).get("rows", ()) if "limit" in row]
        if rows:
            worst = max(rows, key=lambda row: row["over_unfused"]["value"])
            what = worst.get("what") or f"{worst['direction']} of a layer"
            shape = f"{worst['dtype']}, {worst['rows']} rows of {worst['hidden']}"
            yield figure(f"{what}, time / {worst['best_unfused']}, most at {shape}", worst["over_unfused"], 1.0)


# torch.distributed.

_TORCH_REPORTS = {"torch_distributed": "2 ranks", "torch_distributed_4": "4 ranks"}


def _torch_collectives(reports: Reports) -> Iterator[Figure]:
    for name, ranks in _TORCH_REPORTS.items():
        rows = [row for row in reports.get(name, {}).get("collectives", ()) if row["bytes"] >= 256 * KIB]
        if rows:
            worst = min(rows, key=lambda row: row["times_as_fast"]["value"])
            label = f"{ranks}, least of {worst['collective']} at {size(worst['bytes'])}"
            yield figure(label, worst["times_as_fast"], 5.0, at_most=False)


def _torch_latency(reports: Reports) -> Iterator[Figure]:
    for name, ranks in _TORCH_REPORTS.items():
        rows = [row for row in reports.get(name, {}).get("collectives", ()) if row["bytes"] == 4]
        if rows:
            worst = min(rows, key=lambda row: row["times_as_fast"]["value"])
            yield figure(f"{ranks}, most of {worst['collective']}", inverse(worst["times_as_fast"]), 0.2)


def _torch_steps(key: str, what: str, limit: float) -> Callable[[Reports], Iterator[Figure]]:
    def figures(reports: Reports) -> Iterator[Figure]:
        for name, ranks in _TORCH_REPORTS.items():
            for found in reports.get(name, {}).get(key, ()):
                yield figure(f"{ranks}, {found['model']}", found[what], limit)

    return figures


# GPUs.

_GPU_REPORTS = {"gpu_node_2": "2 ranks", "gpu_node_4": "4 ranks"}


def _gpu_pack(reports: Reports) -> Iterator[Figure]:
    ways = reports.get("gpu", {}).get("pack", {}).get("ways", {})
    for way in ("pack", "unpack"):
        if way in ways:
            yield figure(way, ways[way]["of_copy"], 0.85, at_most=False)


def _gpu_step(reports: Reports) -> Iterator[Figure]:
    for found in reports.get("gpu", {}).get("step", ()):
        yield figure(found["model"], found["relative"], 1.01 if found["model"] in COMPUTE_BOUND else None)


def _gpu_node(reports: Reports) -> Iterator[Figure]:
    for name, ranks in _GPU_REPORTS.items():
        for row in reports.get(name, {}).get("node", ()):
            if row["bytes"] >= 64 * MIB and row["way"] != "copy":
                limit = 1.3 if row["way"] == BACKEND else None
                yield figure(f"{ranks}, {size(row['bytes'])}, {row['way']}", row["of_first"], limit)


def _gpu_hidden(reports: Reports) -> Iterator[Figure]:
    share = reports.get("gpu_hidden", {}).get("hidden", {}).get("hidden_share")
    if share is not None:
        yield figure("hidden share", share, 0.85, at_most=False)


def _gpu_nccl(reports: Reports) -> Iterator[Figure]:
    for row in reports.get("gpu_nccl", {}).get("nccl", ()):
        if row["way"] == "hvdlite":
            yield figure(f"{size(row['bytes'])}, time / NCCL's", row["of_first"])


_TARGETS: dict[str, Callable[[Reports], Iterator[Figure]]] = {
    "allreduce of 64 MiB in its slot, against a memcpy on all ranks": _memcpy(IN_SLOT, 1.1),
    "the same from elsewhere: pack, reduce, unpack": _memcpy(ELSEWHERE, 3.0),
    "node backend, times as fast as MPI's best, 16 KiB to 256 MiB": _backend,
    "hvd.allreduce_ in its slot, times as fast as Intel MPI": _intel,
    "hvd.allreduce_, times as fast as MPI's best": _user,
    "hvd.allreduce_, times as fast as Gloo, 256 KiB to 256 MiB": _gloo,
    "16-bit floats of 64 MiB in their slot, bytes per second of float32's": _types,
    "more ranks than cores, 64 MiB in its slot": _oversubscribed,
    "one blocking allreduce of 4 B": _latency,
    "many small ones at once": _burst,
    "two orders of operations in turns": _two_orders,
    "small ones of more ranks than cores": _crowded,
    "step time, against DDP and against MPI after backward": _exposed,
    "400 tiny parameters: exposed communication / ": _tiny,
    "step of compute-bound models / without communication": _compute_bound,
    "step with 1 rank / plain torch's": _one_rank,
    "processor time of an idle runtime": _idle,
    "processor time while a rank is late": _waiting,
    "memory beyond gradients": _memory,
    "2 hosts x 2 ranks, 1 Gbit/s, 64 MiB": _hosts("hosts_2x2", 1.08),
    "4 hosts x 1 rank, 1 Gbit/s, 64 MiB": _hosts("hosts_4x1", 1.10),
    "4 hosts, 4 B to 4 KiB": _small,
    "2 hosts, 1 Gbit/s: communication hidden behind backward": _hidden,
    "step with the timeline on / off": _timeline,
    "step with checks / without": _checks,
    "elastic: from a death to the next step": _recovery,
    "network of 4 hosts examined": _examined,
    "tensor parallelism: all-gather and matmul / the matmul alone": _split(
        "tensor_parallel", "all-gather, matmul", ("dtype",)
    ),
    "tensor parallelism: matmul and reduce-scatter / the matmul alone": _split(
        "tensor_parallel", "matmul, reduce-scatter", ("dtype",)
    ),
    "tensor parallelism: forward of a layer / its compute alone": _split(
        "tensor_parallel_layer", "forward", ("dtype", "form")
    ),
    "tensor parallelism: backward of a layer / its compute alone": _split(
        "tensor_parallel_layer", "backward", ("dtype", "form")
    ),
    "tensor parallelism, against the best unfused way": _best_unfused,
    "torch.distributed: collectives from 256 KiB, times as fast as Gloo": _torch_collectives,
    "torch.distributed: time of 4 B / Gloo's": _torch_latency,
    "torch.distributed: exposed communication of DDP / that over Gloo": _torch_steps("ddp", "exposed", 0.35),
    "torch.distributed: step of FSDP2 / that over Gloo": _torch_steps("fsdp2", "step", 0.8),
    "GPU: bandwidth of pack and unpack / that of a copy": _gpu_pack,
    "GPU: step with 1 rank / plain torch's": _gpu_step,
    "GPU: allreduce within a node / a copy of as many bytes on all ranks": _gpu_node,
    "GPU: communication over a slow wire hidden behind backward": _gpu_hidden,
    "GPUs: allreduce beside ProcessGroupNCCL": _gpu_nccl,
}
