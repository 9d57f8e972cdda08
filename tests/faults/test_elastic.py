"""A rank that dies under hvd.elastic.run: the others get back to their last commit, and say that they cannot go on."""

from __future__ import annotations

import pytest

from fault_lab import check_end, run

TRAINING = """
import torch
import hvdlite.torch as hvd

hvd.init()
state = hvd.elastic.ObjectState(batch=0)

@hvd.elastic.run
def train(state):
    while True:
        hvd.allreduce(torch.ones(1000), name="gradient")
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()
        if state.batch == 12:
            if hvd.rank() == 1:
                say("dying at", time.time())
                os.kill(os.getpid(), signal.SIGKILL)
            state.batch = 1000

try:
    train(state)
except hvd.HorovodInternalError as error:
    say("checkpoint of batch", state.batch)
    raise
"""


def _leaving_slowly() -> str:
    """Rank 1 leaves with exit status 3, and takes 4 s to end."""
    leaving = TRAINING.replace("os.kill(os.getpid(), signal.SIGKILL)", "wait_s = 4.0\n                sys.exit(3)")
    slowly = f"import atexit\nwait_s = 0.0\natexit.register(lambda: time.sleep(wait_s))\n{leaving}"
    return slowly.replace("def train(state):", "def train(state):\n    global wait_s")


@pytest.mark.parametrize("mpi", ["current", "none"])
def test_the_exit_status_is_that_of_the_rank_that_leaves(mpi: str) -> None:
    """Not that of those who cannot go on without it, though they have nothing left to do and it takes its time."""
    result = run(_leaving_slowly(), n=3, mpi=mpi)
    check_end(result, "hvd.elastic.run cannot go on: a rank has ended by itself")
    assert result.returncode == 3, result


# Rank 2 reads of it in the log when it knows already that rank 0 ends for lack of the rank that leaves.
LATE = """
from hvdlite.coordinator.coordinator import Coordinator
from hvdlite.launched import launched_rank

take = Coordinator._take_notice

def take_late(coordinator, content):
    if content["kind"] == "shutdown" and launched_rank() == 2:
        hvdlite.runtime().wait_for_failure(30)
    take(coordinator, content)

Coordinator._take_notice = take_late
"""


@pytest.mark.parametrize("mpi", ["current", "none"])
def test_also_who_hears_late_of_the_rank_that_leaves_lets_it_end_first(mpi: str) -> None:
    """As on a busy machine, from a rank that cannot go on either."""
    result = run(LATE + _leaving_slowly(), n=3, mpi=mpi)
    check_end(result, "hvd.elastic.run cannot go on: a rank has ended by itself")
    assert "a rank has ended by itself" in result.ranks[2].stderr, result
    assert result.returncode == 3, result


@pytest.mark.parametrize("mpi", ["current", "none"])
def test_who_leaves_after_an_exception_of_his_own_is_not_waited_for(mpi: str) -> None:
    """Also by hvd.shutdown(), after which another rank may come back: the others can save at once."""
    kill, end = "os.kill(os.getpid(), signal.SIGKILL)", "raise\n"
    assert TRAINING.count(kill) == TRAINING.count(end) == 1
    leaving = TRAINING.replace(kill, 'raise ValueError("handled below")')
    leaving = leaving.replace(end, "raise\nexcept ValueError:\n    hvd.shutdown()\n    time.sleep(3)\n")
    result = run(leaving, n=3, mpi=mpi)
    check_end(result, "hvd.elastic.run cannot go on: a rank has ended by itself", "rank 1 has shut down hvdlite")
    assert "checkpoint of batch 10" in result.stdout, result


@pytest.mark.parametrize("mpi", ["current", "none"])
def test_a_rank_that_dies_leaves_the_last_commit(mpi: str) -> None:
    result = run(TRAINING, n=3, alone=True, mpi=mpi)
    check_end(result, "hvd.elastic.run cannot go on", "rank 1 (pid", "died without a word")
    assert "checkpoint of batch 10" in result.stdout
