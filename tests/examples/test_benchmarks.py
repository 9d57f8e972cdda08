"""The benchmarks run, and check their own results; not how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("ranks", [2, 3])
def test_allreduce(launch: Launch, tmp_path: Path, ranks: int) -> None:
    sizes = ("--rounds=1", "--max-bytes=1048576", "--factor=512")
    report = run(launch, ranks, "allreduce.py", tmp_path / "a.json", *sizes)
    found = {(row["way"], row["bytes"]) for row in report["rows"] if row["median_us"] > 0}
    ways = ("memcpy", "hvdlite backend", "hvd, in its slot", "hvd, elsewhere", "MPI", "Gloo")
    assert found >= {(way, nbytes) for way in ways for nbytes in (4, 2048, 1 << 20)}


def test_train_step(launch: Launch, tmp_path: Path) -> None:
    options = ("--rounds=1", "--steps=1", "--models", "400 tiny parameters", "transformer")
    rows = run(launch, 2, "train_step.py", tmp_path / "t.json", *options)["rows"]
    ways = ["no communication", "hvdlite", "DDP", "DDP, views", "MPI"]
    assert [row["way"] for row in rows] == 2 * ways
    assert {row["model"]: row["parameters"] for row in rows}["400 tiny parameters"] == 400


def test_overlap(launch: Launch, tmp_path: Path) -> None:
    small = ("--layers=3", "--width=64", "--rows=8", "--rounds=1", "--steps=2", f"--timelines={tmp_path / 'traces'}")
    report = run(launch, 2, "overlap.py", tmp_path / "o.json", *small)
    assert set(report["steps"]) == {"no communication", "serial", "overlapped"}
    assert all(row["communication_ms"] > 0 for row in report["timeline"].values())
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["overlapped.json", "serial.json"]


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
