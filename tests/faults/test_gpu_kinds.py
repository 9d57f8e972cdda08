"""Ranks on simulated GPUs of other kinds: whose streams may be as late as can be, or without virtual memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TIME_LIMIT_S = 120


@pytest.mark.parametrize(
    "setting", ["GPUSIM_PCT=1", pytest.param("GPUSIM_PCT=2", marks=pytest.mark.thorough), "GPUSIM_NO_VMM=1"]
)
def test_runtimes_compute_the_same(setting: str) -> None:
    """GPUSIM_PCT is the seed of streams' priorities, by turns.

    By what NCCL does not do: its simulation waits inside of a stream's turn, and takes virtual memory only.
    """
    name, value = setting.split("=")
    pytest_options = ["-p", "no:cacheprovider", "-q", "-k", "direct or cuda_aware", "mpi/test_device_runtime.py"]
    launch = [sys.executable, "-m", "hvdlite", "run", "--mpi", "-np", "2"]
    command = [*launch, sys.executable, "-m", "pytest", *pytest_options]
    environ = {**os.environ, name: value, "PYTHONPATH": os.pathsep.join(sys.path)}
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
