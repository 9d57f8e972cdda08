"""`python -m hvdlite run` without enough open files: one sentence, and nothing that it has started is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from run_lab import executable, gone

RANKS = 4
ENOUGH = 17  # open files, for so many ranks


@pytest.mark.parametrize("by", ["", "--elastic", "--mpirun"])
def test_open_files_run_out(by: str, tmp_path: Path) -> None:
    version = 'printf "HYDRA build details:\\n    Version: 5.0.2\\n"'
    mpirun = executable(
        tmp_path / "mpirun", f'[ "$1" = --version ] && {version} && exit\nfor last; do :; done; exec $last'
    )
    program = executable(tmp_path / "program", f"echo $$ >>{tmp_path}/pids; sleep 0.5")
    options = {"": [], "--elastic": [by], "--mpirun": [by, str(mpirun)]}[by]
    command = [sys.executable, "-m", "hvdlite", "run", *options, "-np", str(RANKS), str(program)]
    statuses = []
    for most in range(6, ENOUGH + 1):
        limited = ["sh", "-c", 'ulimit -n "$1"; shift; exec "$@"', "sh", str(most), *command]
        done = subprocess.run(limited, stderr=subprocess.PIPE, text=True, timeout=60)
        statuses.append(done.returncode)
        assert "Traceback" not in done.stderr, (most, done.stderr)
        said = done.stderr.rpartition("hvdlite run: ")[2]  # in the middle of a rank's words, perhaps
        is_told = "open files" in said or "is not the mpirun of" in said
        assert done.returncode == 0 or (done.returncode == 2 and is_told), (most, done.stderr)
    assert statuses[0] == 2 and statuses[-1] == 0, statuses
    assert gone(tmp_path / "pids")
