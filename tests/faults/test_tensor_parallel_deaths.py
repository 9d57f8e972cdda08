"""A rank that goes wrong while the others of its team wait for it in shared memory."""

from __future__ import annotations

import pytest

from fault_lab import check_end, run

TEAM = """
import torch
import hvdlite.torch as hvd, hvdlite.tensor_parallel as tp

kind, victim = sys.argv[1], int(sys.argv[2])
hvd.init()
team = tp.init(hvd.size(), method=sys.argv[3]).tp
x, weight = torch.ones(hvd.size(), 4), torch.ones(4, 4)

def work():
    tp.matmul_reduce_scatter(tp.all_gather_matmul(x, weight, team), weight, team)

work()
if hvd.rank() == victim:
    time.sleep(0.2)  # the others wait for it by now
    say("dying at", time.time())
    if kind == "raise":
        raise ValueError("the loss is not a number")
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    work()
"""


@pytest.mark.parametrize(("victim", "method"), [(0, "auto"), (2, "auto"), (1, "unfused")])
def test_a_killed_rank(victim: int, method: str) -> None:
    result = run(TEAM, "SIGKILL", str(victim), method, n=3, alone=True)
    check_end(result, f"rank {victim} (pid", "died without a word")


def test_an_exception() -> None:
    result = run(TEAM, "raise", "1", "auto", n=2, alone=True)
    check_end(result, "rank 1 raised ValueError: the loss is not a number")


def test_a_rank_that_has_shut_down() -> None:
    script = """
import torch
import hvdlite.torch as hvd, hvdlite.tensor_parallel as tp

hvd.init()
team = tp.Team()
tp.gather_rows(torch.ones(1, 1), team)
try:
    if hvd.rank() == 1:
        raise ValueError("a bad sample")
    tp.gather_rows(torch.ones(1, 1), team)
except hvd.HorovodInternalError as error:
    say("said:", str(error).splitlines()[0])
except ValueError:
    time.sleep(0.2)  # the others wait for it by now
finally:
    hvd.shutdown()
say("ended in order")
"""
    result = run(script, n=3, alone=True)
    assert result.stdout.count("said: rank 1 has shut down hvdlite (it called shutdown()), so this operation") == 2, (
        str(result)
    )
    assert result.stdout.count("ended in order") == 3, str(result)


def test_a_rank_that_does_not_come() -> None:
    """Every rank raises the same, the late one as well once it comes."""
    script = """
import torch
import hvdlite.torch as hvd, hvdlite.tensor_parallel as tp

hvd.init()
team = tp.Team()
tp.gather_rows(torch.ones(1, 1), team)
if hvd.rank() == 1:
    time.sleep(2)
try:
    tp.gather_rows(torch.ones(1, 1), team)
except hvd.HorovodInternalError as error:
    say("said:", str(error).splitlines()[0])
    if hvd.rank() != 1:
        time.sleep(3)  # the launcher ends all once one has ended
"""
    result = run(script, n=3, env={"HVDLITE_UB_TIMEOUT_SECONDS": "0.5", "HVDLITE_FAILURE_GRACE_SECONDS": "20"})
    said = {line for line in result.stdout.splitlines() if line.startswith("said:")}
    assert result.stdout.count("said:") == 3, str(result)
    assert len(said) == 1, str(result)
    assert "[1] did not come within 0.5 s; if they are only slow, raise HVDLITE_UB_TIMEOUT_SECONDS" in said.pop()
