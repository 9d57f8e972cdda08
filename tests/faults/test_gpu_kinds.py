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
    output_of(setting, "mpi/test_device_runtime.py", "direct or cuda_aware")


@pytest.mark.parametrize("setting", ["GPUSIM_NO_PEER=1", pytest.param("GPUSIM_PCT=1", marks=pytest.mark.thorough)])
def test_process_groups_compute_the_same(setting: str) -> None:
    """GPUs that do not reach one another have NCCL."""
    output = output_of(setting, "mpi/test_cuda_distributed_calls.py", "float32 or uneven")
    assert "pass through memory of the host" not in output


def output_of(setting: str, file: str, expression: str) -> str:
    """What the tests of ``file`` say that ``expression`` selects, with two ranks."""
    name, value = setting.split("=")
    pytest_options = ["-p", "no:cacheprovider", "-q", "-s", "-k", expression, file]
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
    return result.stdout
