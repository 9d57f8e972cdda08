"""tests/gpu/run.sh, for machines with a GPU: its syntax, its pieces, and what a simulated driver can show of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launching import mpirun_of

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "run.sh"


def run(out: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OUT": str(out), "PYTHON": sys.executable} | environ
    command = ["bash", str(SCRIPT), *options]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)


def test_syntax() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_a_machine_without_a_gpu_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "--built", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "sees no GPU" in done.stderr


@pytest.mark.thorough
def test_simulated(tmp_path: Path) -> None:
    mpirun_of(sys.executable)
    done = run(tmp_path, "--simulate", "--built")
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads((tmp_path / "stages.json").read_text())
    assert [stage["stage"] for stage in stages] == [
        "what is here",
        "MPI",
        "driver",
        "operations and training, 2 ranks",
        "tensor parallelism, 2 ranks",
        "benchmark: pack, step",
        "benchmark: node, 2 ranks",
        "benchmark: hidden",
    ]
    assert all(stage["status"] == 0 for stage in stages)
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert sum(entry["outcome"] == "passed" for entry in outcomes if "test_operations.py" in entry["test"]) > 50
    names = sorted(path.name for path in tmp_path.iterdir())
    reports = [f"{name}.json" for name in ("gpu", "gpu_hidden", "gpu_node_2")]
    assert names == sorted([*reports, "log.txt", "outcomes.jsonl", "stages.json"])


@pytest.mark.parametrize("name", [path.name for path in sorted(SCRIPT.parent.glob("*.py"))])
def test_pieces_are_programs(name: str) -> None:
    compile((SCRIPT.parent / name).read_text(), name, "exec")
