"""Launchers that do not do their work: a script plays the mpirun of Open MPI."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launching import processes_with

# It starts ranks with the marks of Open MPI's, and neither asks how they ended nor ends after them.
STUCK = """\
#!PYTHON
import os, signal, subprocess, sys, time
if sys.argv[1] == "--version":
    print("mpirun (Open MPI) 5.0.11")
    sys.exit()
ranks = [
    subprocess.Popen(["sh", "-c", "sleep 1; exit STATUS"], env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)})
    for rank in range(2)
]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""


@pytest.mark.parametrize("status", [0, 7])
def test_an_mpirun_that_outlives_its_ranks_is_ended(tmp_path: Path, status: int) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(STUCK.replace("PYTHON", sys.executable).replace("STATUS", str(status)))
    mpirun.chmod(0o755)
    mark = f"HVDLITE_TEST_JOB={tmp_path}"
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "hvdlite", "run", "-np", "2", "--mpirun", str(mpirun), "true"],
        env={**os.environ, "HVDLITE_TEST_JOB": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    assert time.monotonic() - start < 30
    assert "hvdlite run: ended: mpirun has not ended 3 s after its last rank" in done.stderr
    assert processes_with(mark) == {}
