"""`hvdliterun --elastic --mpi` where MPI survives deaths: the ranks that live go on, and each sample counts once."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from hvdlite.cli.mpirun import Mpi
from launching import Result, launch, mpirun_of

# Gradients are counts of samples: the weights say how often each sample went into them. `MISHAP` happens once in the
# life of the job, to the ranks that mpirun has called so, at batch 5: between backward and step, or within the commit.
TRAINING = """
import os, pathlib, signal, sys, time
import torch
import hvdlite.torch as hvd

SAMPLES, BATCH = 240, 2

hvd.init()
me = int(os.environ["OMPI_COMM_WORLD_RANK"])
weights = torch.nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
optimizer = torch.optim.SGD([weights], lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, [("weights", weights)], op=hvd.Sum)
sampler = hvd.elastic.ElasticSampler(range(SAMPLES))

def say(*words):
    print(*words, flush=True)

def mishap(where):
    done = pathlib.Path(sys.argv[1], str(me))
    if state.batch == 5 and me in {victims} and where == "{where}" and not done.exists():
        done.touch()
        {mishap}

class State(hvd.elastic.TorchState):
    def keep(self):
        mishap("commit")
        super().keep()

state = State(torch.nn.ParameterList([weights]), optimizer, sampler=sampler, batch=0)

@hvd.elastic.run
def train(state):
    say("starts on rank", hvd.rank(), "of", hvd.size(), "at batch", state.batch, "as", os.getpid())
    for number, batch in enumerate(torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=sampler)):
        optimizer.zero_grad()
        (-weights[batch].sum()).backward()
        mishap("step")
        optimizer.step()
        sampler.record_batch(number, BATCH)
        state.batch += 1
        state.commit()

train(state)
say("counts", sorted(set(weights.tolist())), "rank", hvd.rank(), "of", hvd.size())
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
RAISES = "raise ArithmeticError('of one rank')"


@pytest.fixture(autouse=True)
def _survives() -> None:
    mpirun = mpirun_of(sys.executable)
    if mpirun.mpi is not Mpi.OPEN_MPI or mpirun.version < (5,):
        pytest.skip(f"{mpirun} does not survive deaths")


def run(directory: Path, mishap: str, victims: set[int], *options: str, where: str = "step") -> Result:
    """Train on 3 ranks."""
    script = TRAINING.replace("{victims}", str(victims)).replace("{where}", where).replace("{mishap}", mishap)
    env = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "3"}
    return launch(3, script, str(directory), mpi="none", options=["--elastic", "--mpi", *options], env=env, timeout=200)


def starts(result: Result) -> list[tuple[int, int, int]]:
    """The size, the batch and the process of each."""
    found = re.findall(r"starts on rank \d+ of (\d+) at batch (\d+) as (\d+)", result.stdout)
    return [(int(size), int(batch), int(pid)) for size, batch, pid in found]


def check_went_on(result: Result, size: int, *batches: int) -> None:
    """``size`` of 3 processes have gone on at one of ``batches``, and counted each sample once."""
    result.check()
    assert sorted(re.findall(r"counts (\[.*?\]) rank (\d+) of (\d+)", result.stdout)) == [
        ("[1.0]", str(rank), str(size)) for rank in range(size)
    ], result
    began = starts(result)
    assert {began_at[:2] for began_at in began} - {(3, 0)} <= {(size, batch) for batch in batches}, result
    assert sorted(Counter(pid for _, _, pid in began).values()) == [1] * (3 - size) + [2] * size, result
    assert f"{size} go on from the last commit" in result.launcher_output


@pytest.mark.parametrize(
    "victims", [pytest.param({0}, marks=pytest.mark.thorough), pytest.param({1}, marks=pytest.mark.thorough), {0, 2}]
)
def test_survivors_go_on_in_their_processes(tmp_path: Path, victims: set[int]) -> None:
    result = run(tmp_path, KILLED, victims, "--restarts", "0")
    check_went_on(result, 3 - len(victims), 5)


@pytest.mark.parametrize("victims", [{1}, pytest.param({0}, marks=pytest.mark.thorough)])
def test_a_death_within_a_commit(tmp_path: Path, victims: set[int]) -> None:
    """Some ranks may have committed, and others not; all go on from the newest."""
    check_went_on(run(tmp_path, KILLED, victims, "--restarts", "0", where="commit"), 2, 5)


@pytest.mark.thorough
def test_a_rank_that_raises_says_why_and_is_left_out(tmp_path: Path) -> None:
    result = run(tmp_path, RAISES, {2}, "--restarts", "0")
    check_went_on(result, 2, 5)
    assert "ArithmeticError: of one rank" in result.stderr


def test_a_stopped_rank_is_ended_and_left_out(tmp_path: Path) -> None:
    check_went_on(run(tmp_path, STOPPED, {0}, "--restarts", "0"), 2, 5)


@pytest.mark.thorough
def test_a_stopped_rank_holds_nothing_up_though_all_others_are_killed(tmp_path: Path) -> None:
    """As soon as they have given it up: nobody is left to end it then."""
    killed = f"state.register_reset_callbacks([lambda: {KILLED}])"
    result = run(tmp_path, f"({STOPPED}) if me == 0 else {killed}", {0, 1, 2}).check()
    assert {began[:2] for began in starts(result)} in ({(3, 0), (3, 5)}, {(3, 0), (3, 4)}), result
    assert "2 go on from the last commit" in result.launcher_output
    assert result.stdout.count("counts [1.0]") == 3


def test_too_few_begin_anew(tmp_path: Path) -> None:
    result = run(tmp_path, KILLED, {1}, "--min-np", "3").check()
    assert {began[:2] for began in starts(result)} == {(3, 0), (3, 5)}, result
    assert "hvdliterun does not let 2 ranks go on" in result.stderr
    assert "goes on from commit 5, which is kept in memory" in result.launcher_output


@pytest.mark.thorough
def test_a_job_all_of_whose_ranks_are_killed_begins_anew(tmp_path: Path) -> None:
    """mpirun takes that for a success. Nobody is left to hand over the last commit, if it was on its way."""
    result = run(tmp_path, KILLED, {0, 1, 2}).check()
    assert {began[:2] for began in starts(result)} in ({(3, 0), (3, 5)}, {(3, 0), (3, 4)}), result


@pytest.mark.parametrize("mishap", [KILLED, pytest.param(RAISES, marks=pytest.mark.thorough)])
def test_a_rank_that_fails_where_nobody_trains_is_no_success(mishap: str) -> None:
    """mpirun takes that for one."""
    script = f"import hvdlite, os, signal\nhvdlite.init()\nif hvdlite.rank():\n    {mishap}\n"
    result = launch(2, script, mpi="none", options=["--elastic", "--mpi", "--restarts", "0"])
    assert result.returncode == 1
    assert "the job ends: it has failed 1 time (--restarts 0)" in result.launcher_output
    assert "rank 1 (pid" in result.stderr
    assert "died without a word" in result.stderr
