"""`hvdliterun --elastic --mpi` when ranks are to begin anew, and one of the old ones does not come to its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launching import launch

# Once there is room for a third rank, all end at a commit to begin anew; one is stopped after that commit.
TRAINING = """
import os, pathlib, signal, sys, time
import torch
import hvdlite.torch as hvd

directory, victim = pathlib.Path(sys.argv[1]), int(sys.argv[2])
hvd.init()

class State(hvd.elastic.ObjectState):
    def keep(self):
        super().keep()
        if self.is_end and hvd.rank() == victim and not (directory / "stopped").exists():
            (directory / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)

state = State(batch=0)
state.is_end = False

@hvd.elastic.run
def train(state):
    print("starts on rank", hvd.rank(), "of", hvd.size(), "at batch", state.batch, flush=True)
    while state.batch < 10 or hvd.size() < 3:
        hvd.allreduce(torch.ones(10), name="gradient")
        state.batch += 1
        if hvd.rank() == 0 and state.batch == 10:
            (directory / "new").write_text("localhost:3")
            os.replace(directory / "new", directory / "hosts")
        time.sleep(0.02)
        try:
            state.commit()
        except hvd.HostsUpdatedInterrupt:
            state.is_end = True
            raise

train(state)
print("done", flush=True)
"""
QUICK = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "2", "HVDLITE_FAILURE_GRACE_SECONDS": "1"}


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_rank_that_is_stopped_meanwhile_is_not_waited_for(tmp_path: Path, victim: int) -> None:
    """The first of the node, which speaks to hvdliterun for the others, or not.

    Either mpirun waits for it, and hvdliterun ends both, or mpirun ends without it, and hvdliterun ends it.
    """
    (tmp_path / "hosts").write_text("localhost:2")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {tmp_path / 'hosts'}\n")
    script.chmod(0o755)
    options = ["--elastic", "--mpi", "--min-np", "1", "--restarts", "0", "--host-discovery-script", str(script)]
    settings = QUICK | {"HVDLITE_TIMELINE": str(tmp_path / "trace.json")}
    result = launch(2, TRAINING, str(tmp_path), str(victim), mpi="none", options=options, env=settings, timeout=100)
    result.check()
    assert result.stdout.count("done") == 2, result  # of the ranks that there were in the beginning
    assert "the ranks have ended at a commit, and begin anew" in result.launcher_output
    began = {(int(size), int(batch)) for size, batch in re.findall(r"of (\d) at batch (\d+)", result.stdout)}
    assert len(began) == 2 and (2, 0) in began, result  # nothing was lost
    assert max(began)[0] == 3 and max(began)[1] >= 10, result
    assert {path.name for path in tmp_path.glob("trace*")} == {"trace.json", "trace.start2.json"}


UNLIKE = """
import hvdlite
from hvdlite.launched import launched_rank
print("came", flush=True)
hvdlite.init(versions={"torch": "2.13.0" if launched_rank() == 1 else "2.12.1"})
print("went on", flush=True)
"""


def test_ranks_of_different_versions_are_not_started_again() -> None:
    result = launch(2, UNLIKE, mpi="none", options=["--elastic", "--mpi"])
    assert result.returncode == 1 and result.stdout.split() == ["came"] * 2, result
    assert "the ranks run different versions of torch: 2.12.1 on rank 0" in result.ranks[0].stderr
    assert "the job ends: its ranks run different versions, which no restart changes" in result.launcher_output
