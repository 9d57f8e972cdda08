"""The benchmarks run, and check their own results; not how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launching import Result

Launch = Callable[..., Result]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(launch: Launch, ranks: int, script: str, path: Path, *options: str) -> dict[str, Any]:
    """The figures that a benchmark writes."""
    launch(ranks, BENCHMARKS / script, f"--json={path}", *options, timeout=240).check()
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["ranks"] == ranks
    assert report["command"].startswith(f"mpirun -np {ranks} python {script}")
    return report


def test_allreduce(launch: Launch, tmp_path: Path) -> None:
    sizes = (4, 2048, 5 << 20)  # the last in two pieces
    options = ("--rounds=1", "--bytes", *map(str, sizes))
    rows = run(launch, 2, "allreduce.py", tmp_path / "a.json", *options)["rows"]
    own = ["hvdlite backend", "hvd, in its slot", "hvd, elsewhere"]
    peers = {"MPI", "MPI, pieces", "Gloo"}
    assert {(row["way"], row["bytes"]) for row in rows if row["median_us"] > 0} >= {
        (way, nbytes) for way in ("memcpy", *own, *peers) for nbytes in sizes
    }
    for row in rows:
        assert ("times_as_fast" in row) == (row["way"] in own)
        assert row["way"] not in own or set(row["times_as_fast"]) >= {"memcpy", *peers}


@pytest.mark.thorough  # test_allreduce_across_hosts chooses ways as well
def test_allreduce_of_chosen_ways_on_three_ranks(launch: Launch, tmp_path: Path) -> None:
    ways = ["hvdlite backend", "hvd, in its slot", "MPI, pieces"]
    options = ("--rounds=1", "--bytes=1048576", "--ways", *reversed(ways))
    rows = run(launch, 3, "allreduce.py", tmp_path / "a.json", *options)["rows"]
    assert [row["way"] for row in rows] == ways


def test_slot(launch: Launch, tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    report = run(launch, 3, "slot.py", tmp_path / "s.json", "--rounds=1", "--bytes=100000")
    few = min(3, cores)
    labels = [f"{dtype}, {few} ranks" for dtype in ("float32", "float16", "bfloat16")]
    assert list(report["ways"]) == labels + ["float32, 3 ranks"] * (few < 3)
    assert report["ways"][labels[0]]["time_of_first"] == {"value": 1, "low": 1, "high": 1}


def test_tensor_parallel(launch: Launch, tmp_path: Path) -> None:
    small = ("--rows=8", "--hidden=16", "--outputs=12", "--rounds=1")
    rows = run(launch, 2, "tensor_parallel.py", tmp_path / "t.json", *small)["rows"]
    ways = {row["way"] for row in rows if row["what"] == "all-gather, matmul"}
    assert ways == {"matmul alone", "hvdlite, shared memory", "hvdlite, unfused", "hvdlite, chosen", "Gloo", "MPI"}
    assert "hvdlite, ring" in {row["way"] for row in rows if row["what"] == "matmul, reduce-scatter"}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert all(row["over_alone"]["value"] == 1 for row in rows if row["way"] == "matmul alone")
    assert {row["way"] for row in rows if "limit" in row} == {"hvdlite, chosen"}


@pytest.mark.thorough  # test_tensor_parallel measures the same exchanges
def test_a_tensor_parallel_layer(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "tensor_parallel_layer.json"
    small = ("--rows=8", "--context=4", "--hidden=16", "--rounds=1")
    rows = run(launch, 2, "tensor_parallel_layer.py", path, *small)["rows"]
    ways = {"compute alone", "hvdlite, chosen", "hvdlite, shared memory", "hvdlite, unfused", "DTensor, Gloo"}
    forms = [(dtype, form) for dtype in ("float32", "bfloat16") for form in ("rows", "whole")]
    assert {(row["direction"], row["dtype"], row["form"], row["way"]) for row in rows} == {
        (direction, *form, way) for direction in ("forward", "backward", "both") for form in forms for way in ways
    }
    assert all(row["over_alone"]["value"] == 1 for row in rows if row["way"] == "compute alone")


def test_costs(launch: Launch, tmp_path: Path) -> None:
    short = ("--idle-s=0.1", "--wait-s=0.1", "--models", "400 tiny parameters")
    report = run(launch, 2, "costs.py", tmp_path / "c.json", *short)
    assert all(0 <= share < 2 for share in report["idle"])
    assert [(each["in"], each["late"]) for each in report["waiting"]] == [
        (what, late) for what in ("hvd.allreduce", "optimizer.step") for late in (0, 1)
    ]
    assert report["memory"]["400 tiny parameters"]["gradient_bytes"] == 844800


@pytest.mark.thorough
def test_torch_distributed(launch: Launch, tmp_path: Path) -> None:
    few = ("--rounds=1", "--step-rounds=1", "--bytes", "4", "262144", "--models", "400 tiny parameters")
    report = run(launch, 2, "torch_distributed.py", tmp_path / "t.json", *few)
    assert {row["bytes"] for row in report["collectives"]} == {4, 262144}
    assert all(("bound" in row) == (row["bytes"] == 262144) for row in report["collectives"])
    assert {"all_reduce", "all_gather", "send and receive"} <= {row["collective"] for row in report["collectives"]}
    assert all(row["times_as_fast"]["value"] > 0 for row in report["collectives"])
    (ddp,), (fsdp2,) = report["ddp"], report["fsdp2"]
    assert set(ddp["ways"]) == {"no communication", "hvdlite", "Gloo"} and set(fsdp2["ways"]) == {"hvdlite", "Gloo"}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_train_step(launch: Launch, tmp_path: Path, ranks: int) -> None:
    options = ("--rounds=1", "--steps=1", "--models", "400 tiny parameters")
    (model,) = run(launch, ranks, "train_step.py", tmp_path / "t.json", *options)["models"]
    ways = ["no communication", "hvdlite", "DDP", "DDP, views", "MPI", "MPI, pieces", "MPI, one buffer"]
    assert list(model["ways"]) == (ways if ranks > 1 else ways[:2])
    assert set(model["against_best"]) == ({"DDP", "simple MPI"} if ranks > 1 else set())
    assert model["parameters"] == 400
    for way in model["ways"].values():
        assert way["relative"]["low"] <= way["relative"]["value"] <= way["relative"]["high"]


@pytest.mark.thorough  # test_across_hosts runs it as well
def test_overlap(launch: Launch, tmp_path: Path) -> None:
    small = ("--layers=3", "--width=64", "--rows=8", "--rounds=1", "--steps=2", f"--timelines={tmp_path / 'traces'}")
    report = run(launch, 2, "overlap.py", tmp_path / "o.json", *small)
    assert set(report["steps"]) == set(report["asleep"]["steps"]) == {"no communication", "serial", "overlapped"}
    assert report["tcp"] is None  # one node
    assert all(row["communication_ms"] > 0 for row in report["timeline"].values())
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["overlapped.json", "serial.json"]


@pytest.mark.parametrize("options", [[], ["--claims"]], ids=["frozen", "claimed"])
def test_scale_model(tmp_path: Path, options: list[str]) -> None:
    """Messages per bucket and rank do not depend on how many ranks there are, beyond the tree's first levels."""
    path = tmp_path / "s.json"
    schedule = tmp_path / "schedule.json"
    buckets = [{"bytes": nbytes, "ready_ms": 50 * i} for i, nbytes in enumerate([1 << 20, 1 << 10, 1 << 23], start=1)]
    schedule.write_text(json.dumps({"compute_ms": 150, "buckets": buckets}))
    command = [sys.executable, str(BENCHMARKS / "scale_model.py"), f"--model={schedule}", "--ranks=2,16,192,1024"]
    done = subprocess.run([*command, *options, f"--json={path}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    most = {row["ranks"]: row["most_counted"] for row in report["rows"]}
    sent = {n: [most[n][who]["tree_messages_sent"] for who in most[n] if who != "other ranks"] for n in most}
    assert sent == {2: [0], 16: [3, 3], 192: [12, 15], 1024: [12, 15]}
    others = {(most[n]["other ranks"]["claims_sent"], most[n]["other ranks"]["counted"]) for n in most}
    assert others == {(len(buckets), 0) if options else (0, len(buckets))}
    assert all(exposed_ms > 0 for row in report["rows"] for exposed_ms in row["exposed_ms"].values())


def test_scale_model_with_ranks_of_different_speed(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "scale_model.py"), "--ranks=64", "--across=hvdlite", "--jitter=0.05"]
    said = []
    for seed in (0, 0, 1):
        path = tmp_path / "s.json"
        subprocess.run([*command, f"--seed={seed}", f"--json={path}"], check=True, capture_output=True, timeout=120)
        (row,) = json.loads(path.read_text())["rows"]
        said.append((row["compute_ms"], row["exposed_ms"], row["most_counted"]))
    assert said[0] == said[1]
    assert said[0][:2] != said[2][:2]
    assert said[0][0] > 300  # the slowest of 64 ranks


def test_across_hosts(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    small = ["--layers=3", "--width=64", "--rows=8", "--rounds=1", "--steps=2", f"--json={path}"]
    command = [sys.executable, str(BENCHMARKS / "across_hosts.py"), str(BENCHMARKS / "overlap.py"), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert (report["ranks"], report["nodes"]) == (2, 2)
    assert set(report["tcp"]["steps"]) == {"no communication", "TCP, serial", "TCP, overlapped"}


def test_control_messages(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    command = [sys.executable, str(BENCHMARKS / "control_messages.py"), "--layouts", "1x2", "2x1", f"--json={path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    alone, two_hosts = json.loads(path.read_text())["rows"]
    assert (alone["ranks"], alone["nodes"], two_hosts["ranks"], two_hosts["nodes"]) == (2, 1, 2, 2)
    sent = [row["one at a time"]["root"]["tree_messages_sent"] for row in (alone, two_hosts)]
    assert sent == [0, two_hosts["buckets"]]
    assert 1 <= two_hosts["at once"]["other leaders"]["tree_messages_sent"] <= two_hosts["buckets"]


def test_pauses(launch: Launch, tmp_path: Path) -> None:
    report = run(launch, 2, "pauses.py", tmp_path / "p.json", "--pauses-ms", "0", "5", "--seconds=0.1")
    assert [row["pause_ms"] for row in report["rows"]] == [0, 5]
    assert all(0 < row["median_us"] <= row["p99_us"] for row in report["rows"])
    assert all(share >= 0 for share in report["share_of_a_core"].values())


@pytest.mark.thorough  # test_all_of_them_and_their_targets runs it as well
def test_latency(launch: Launch, tmp_path: Path) -> None:
    report = run(launch, 2, "latency.py", tmp_path / "l.json", "--rounds=2", "--calls=5", "--count=10")
    assert set(report["blocking, 4 B"]) == {"hvd.allreduce", "hvd.allreduce_", "MPI", "Gloo"}
    assert all(0 < row["median_us"] <= row["p99_us"] for row in report["10 at once, 4 KiB"].values())


def test_operations(launch: Launch, tmp_path: Path) -> None:
    report = run(launch, 2, "operations.py", tmp_path / "o.json", "--rounds=2", "--bytes", "4", "65536")
    rows = report["operations"]
    assert [(row["operation"], row["bytes"]) for row in rows[:3]] == [
        ("broadcast_", 4),
        ("broadcast_", 65536),
        ("allgather", 4),
    ]
    assert all(set(row["ways"]["hvd"]["times_as_fast"]) == {"MPI", "Gloo"} for row in rows) and len(rows) == 8
    assert report["steps"]["nothing"]["relative"]["value"] == 1
    assert report["steps"]["allgather"]["relative"]["value"] > 0


SIMULATED = ("--simulate", "--rounds=2")


def test_gpu_on_one_rank(launch: Launch, tmp_path: Path) -> None:
    report = run(launch, 1, "gpu.py", tmp_path / "g.json", "pack", "step", *SIMULATED)
    assert report["gpu"] == "Simulated GPU" and report["simulated"]
    ways = report["pack"]["ways"]
    assert list(ways) == ["copy", "pack", "unpack"]
    assert ways["copy"]["of_copy"]["value"] == 1 and all(way["gbps"] > 0 for way in ways.values())
    assert [step["model"] for step in report["step"]] == ["400 tiny parameters"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_gpu_within_a_node(launch: Launch, tmp_path: Path, ranks: int) -> None:
    rows = run(launch, ranks, "gpu.py", tmp_path / "g.json", "node", *SIMULATED)["node"]
    ways = ["copy", "hvdlite backend", "hvd, in its slot", "hvd, elsewhere"]
    assert [(row["bytes"], row["way"]) for row in rows] == [(nbytes, way) for nbytes in (4096, 65536) for way in ways]


def test_gpu_across_a_slow_wire(launch: Launch, tmp_path: Path) -> None:
    report = run(launch, 2, "gpu.py", tmp_path / "g.json", "hidden", *SIMULATED, "--gbit=0.002")
    assert report["nodes"] == 2
    found = report["hidden"]
    assert set(found["steps"]) == {"no communication", "serial", "overlapped"}
    # 12 KiB, of which each of two nodes must send as many bytes, in a step.
    assert found["wire_ms"] == pytest.approx(12288 * 8 / 0.002e9 * 1e3)
    assert found["steps"]["serial"]["exposed_ms"]["value"] > 0.9 * found["wire_ms"]


def test_gpu_beside_another_library(launch: Launch, tmp_path: Path) -> None:
    rows = run(launch, 2, "gpu.py", tmp_path / "g.json", "nccl", *SIMULATED)["nccl"]
    assert [row["way"] for row in rows] == ["ProcessGroupNCCL", "hvdlite"] * 2
    assert all(row["of_first"]["value"] == 1 for row in rows[::2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_without_one(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "pack"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 77 and "torch sees no GPU here" in done.stderr


def test_timeline_cost(launch: Launch, tmp_path: Path) -> None:
    short = ("--rounds=2", "--seconds=0.1", "--models", "400 tiny parameters")
    report = run(launch, 2, "timeline_cost.py", tmp_path / "t.json", *short)
    assert report["models"]["400 tiny parameters"]["events_per_step"] > 4


@pytest.mark.thorough
def test_checks_cost(launch: Launch, tmp_path: Path) -> None:
    short = ("--rounds=2", "--seconds=0.1", "--models", "400 tiny parameters")
    report = run(launch, 2, "checks_cost.py", tmp_path / "c.json", *short)
    assert report["models"]["400 tiny parameters"]["numerics"]


@pytest.mark.thorough
def test_recovery(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    command = [sys.executable, str(BENCHMARKS / "recovery.py"), "--rounds=1", f"--json={path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seconds = json.loads(path.read_text())["seconds"]
    assert {"one node, without MPI", "one node, Open MPI"} <= seconds.keys() and min(
        min(found) for found in seconds.values()
    ) > 0


def test_allreduce_across_hosts(tmp_path: Path) -> None:
    """How many bytes cross, and how long they take beside what the link allows."""
    path = tmp_path / "a.json"
    nbytes = 1 << 20
    ways = ["TCP", "hvdlite backend", "hvd, in its slot", "MPI"]
    small = ["--rounds=1", "--calls=1", f"--bytes={nbytes}", "--link-gbit=1", f"--json={path}", "--ways", *ways]
    command = [sys.executable, str(BENCHMARKS / "across_hosts.py"), str(BENCHMARKS / "allreduce.py"), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in rows] == ways
    assert all(nbytes < row["sent_by_host_bytes"] < 1.2 * nbytes for row in rows[:3])
    assert all(row["of_bound"]["value"] == pytest.approx(row["median_us"] / (nbytes * 8e-3)) for row in rows)


def test_all_of_them_and_their_targets(tmp_path: Path) -> None:
    """`python -m benchmarks`, of one program; the targets that it has figures for are printed."""
    command = [sys.executable, "-m", "benchmarks", "latency", "--rounds=1", "--results", str(tmp_path)]
    result = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "one blocking allreduce of 4 B" in result.stdout and "99th percentile, us" in result.stdout
    assert "not measured" not in result.stdout
    assert (tmp_path / "latency.json").exists()
    command = [sys.executable, "-m", "benchmarks", "latency", "speed"]
    wrong = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "no such program: speed" in wrong.stderr
    command = [sys.executable, "-m", "benchmarks", "allreduce_mpich", "--mpich-python=nowhere", f"--results={tmp_path}"]
    skipped = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=60)
    assert skipped.returncode == 0 and "skipped: there is no" in skipped.stdout
