"""Under `hvdliterun --elastic` mpirun says nothing of a rank that dies while others wait for it in hvd.init()."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdlite.cli.mpirun import Mpi
from launching import Result, launch, mpirun_of

# Rank 1 does `{first}` the first time that it starts.
SCRIPT = """
import os, pathlib, signal, subprocess, sys, time

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
done = pathlib.Path(sys.argv[1], "done")

def first():
    if rank == 1 and not done.exists():
        done.touch()
        {first}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if {when} == "before the import":
    first()
import torch
import hvdlite.mpi
import hvdlite.torch as hvd

world = hvdlite.mpi.world

def starts_mpi(*args):
    if {when} == "in init":
        first()
    return world(*args)

hvdlite.mpi.world = starts_mpi
hvd.init()
state = hvd.elastic.ObjectState(batch=0)

@hvd.elastic.run
def train(state):
    state.commit()
    print("trained on", hvd.rank(), "of", hvd.size(), flush=True)

train(state)
"""
BELOW = """
import subprocess, sys, time
if sys.argv[-1] != "below" and subprocess.call([sys.executable, __file__, *sys.argv[1:], "below"]):
    time.sleep(1000)
if sys.argv[-1] != "below":
    sys.exit()
"""
WAITS = {"HVDLITE_START_TIMEOUT": "300"}  # longer than the test


@pytest.fixture(autouse=True)
def _lets_ranks_go_on() -> None:
    mpirun = mpirun_of(sys.executable)
    if mpirun.mpi is not Mpi.OPEN_MPI:
        pytest.skip(f"{mpirun} ends all ranks when one dies")


def run(directory: Path, when: str, first: str, script: str = SCRIPT) -> Result:
    script = script.replace("{when}", repr(when)).replace("{first}", first)
    return launch(3, script, str(directory), mpi="none", options=["--elastic", "--mpi"], env=WAITS, timeout=100)


def check_began_anew(result: Result, who: str) -> None:
    result.check()
    assert sorted(result.stdout.splitlines()) == [f"trained on {rank} of 3" for rank in range(3)], result
    reason = f"ended: {who} has ended before it was through hvd.init()"
    assert reason in result.launcher_output, result
    assert "as no host that answers has a commit (1 of 10 restarts)" in result.launcher_output, result


@pytest.mark.parametrize("when", [pytest.param("before the import", marks=pytest.mark.thorough), "in init"])
def test_a_rank_that_is_killed_while_it_starts(tmp_path: Path, when: str) -> None:
    check_began_anew(run(tmp_path, when, "time.sleep(2); die()"), "rank 1")


@pytest.mark.thorough
def test_a_rank_that_is_killed_before_anybody_has_seen_it(tmp_path: Path) -> None:
    result = run(tmp_path, "before the import", "die()").check()
    assert "has ended before it was through hvd.init()" in result.launcher_output, result


@pytest.mark.thorough
def test_a_rank_below_a_program_that_goes_on(tmp_path: Path) -> None:
    """Its link to the keeper tells of its end."""
    check_began_anew(run(tmp_path, "in init", "die()", BELOW + SCRIPT), "rank 1")


def test_what_a_rank_has_started_may_end(tmp_path: Path) -> None:
    first = "subprocess.run(['sleep', '1']); subprocess.Popen(['sh', '-c', 'sleep 1 & sleep 0.5']); time.sleep(5)"
    result = run(tmp_path, "in init", first).check()
    assert result.stdout.count("trained on") == 3 and "restarts" not in result.launcher_output, result


@pytest.mark.thorough
def test_a_program_without_init_may_end_when_it_likes(tmp_path: Path) -> None:
    script = "import os, time\ntime.sleep(2 + 4 * int(os.environ['OMPI_COMM_WORLD_RANK']))\nprint('done')"
    result = run(tmp_path, "", "", script).check()
    assert result.stdout.count("done") == 3 and "restarts" not in result.launcher_output, result
