"""Accelerate and Lightning, as they are, over a process group of hvdlite: the same weights as over Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from solve import results_of

JOB = Path(__file__).with_name("torch_distributed_job.py")


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
HVDLITERUN = ("hvdlite", "run", "-np", "2", sys.executable)  # without MPI


def weights(backend: str, library: str, launcher: Sequence[str] = TORCHRUN) -> list[float]:
    """Of two ranks."""
    ranks = [sys.executable, "-m", *launcher]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*ranks, str(JOB), backend, library]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[float] = results_of(done.stdout)
    return found


@pytest.mark.parametrize(
    ("library", "launcher"), [("accelerate", TORCHRUN), ("accelerate", HVDLITERUN), ("lightning", TORCHRUN)]
)
def test_weights_are_those_over_gloo(library: str, launcher: Sequence[str]) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: tests/run.py integrations installs it")
    assert weights("hvdlite", library, launcher) == pytest.approx(weights("gloo", library), rel=1e-12, abs=1e-12)
