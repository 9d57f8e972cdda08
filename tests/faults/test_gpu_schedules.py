"""Ranks on simulated GPUs whose streams take turns by random priorities, so that one may be as late as can be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TIME_LIMIT_S = 120


@pytest.mark.parametrize("seed", [1, 2])
def test_runtimes_compute_the_same(seed: int) -> None:
    """By what NCCL does not do: its simulation waits inside of a stream's turn."""
    pytest_options = ["-p", "no:cacheprovider", "-q", "-k", "direct", "mpi/test_device_runtime.py"]
    command = [
        sys.executable,
        "-m",
        "hvdlite",
        "run",
        "--mpi",
        "-np",
        "2",
        sys.executable,
        "-m",
        "pytest",
        *pytest_options,
    ]
    environ = {**os.environ, "GPUSIM_PCT": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        command,
        cwd=TESTS,
        env=environ,
        timeout=TIME_LIMIT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "passed" in result.stdout
