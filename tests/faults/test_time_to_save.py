"""`hvdliterun --elastic --mpi` when no restart is left: the program can save the last commit, which takes a while."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from launching import on_one_mpi, processes_with, python_of

# Rank 1 is killed at batch 12, when batch 10 has been committed.
TRAINING = """
import os, pathlib, signal, sys, time
import torch
import hvdlite.torch as hvd

hvd.init()
state = hvd.elastic.ObjectState(batch=0)

@hvd.elastic.run
def train(state):
    print("trains from", state.batch, flush=True)
    while True:
        hvd.allreduce(torch.ones(1000), name="gradient")
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()
        if state.batch == 12 and hvd.rank() == 1:
            time.sleep(0.5)  # the commit has been handed over
            os.kill(os.getpid(), signal.SIGKILL)

try:
    train(state)
except hvd.HorovodInternalError as error:
    time.sleep(2)
    pathlib.Path(sys.argv[1], f"rank{hvd.rank()}").write_text(f"{state.batch} {error}")
    raise
"""


@on_one_mpi("openmpi")
def test_the_last_commit_can_be_saved(tmp_path: Path, mpi: str) -> None:
    """Open MPI's mpirun leaves the survivors their time; others kill them, so ranks are started once more to save."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    options = ["--elastic", "--mpi", "-np", "3", "--min-np", "3", "--restarts", "0"]
    done = subprocess.run(
        [python_of(mpi), "-m", "hvdlite", "run", *options, str(script), str(tmp_path)],
        env={**os.environ, "HVDLITE_TEST_JOB": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0 and said.count("trains from") == 3, said
    saved = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    ranks, why = ({0, 2}, "these ranks end") if mpi == "openmpi" else ({0, 1, 2}, "the job ends: it has failed 1 time")
    assert saved.keys() == {f"rank{rank}" for rank in ranks}, said
    assert all(text.startswith("10 ") and why in text for text in saved.values()), saved
    is_once_more = re.search(r"ranks are started once more, only to save commit 2, which is kept in memory", said)
    assert bool(is_once_more) is (mpi != "openmpi"), said
    assert processes_with(f"HVDLITE_TEST_JOB={tmp_path}") == {}
