"""A rank that does not submit what others wait for: who, what, and where it stands; and the end, if it is wanted."""

from __future__ import annotations

import pytest

from fault_lab import check_end, run

# Rank 3 takes a branch in which it forgets layer3.bias for a while.
BRANCH = """
patience_s, machines = float(sys.argv[1]), sys.argv[2]

def slow_branch():
    time.sleep(patience_s)  # here it stands

hvdlite.init()
reduce("layer2.bias", tensor()).wait()
if hvdlite.rank() == 3:
    say("dying at", time.time())
    slow_branch()
reduce("layer3.bias", tensor()).wait()
say("done")
"""


@pytest.mark.parametrize("machines", ["0000", "0011", "0123"])
def test_a_warning_says_what_is_missing_where(machines: str) -> None:
    result = run(BRANCH, "2.5", machines, machines=machines, env={"HVDLITE_STALL_CHECK_TIME_SECONDS": "1"}).check()
    (warning,) = [line for line in result.stderr.splitlines() if "StallWarning" in line]
    for words in [
        "hvdlite [0] WARNING: StallWarning: allreduce 'layer3.bias' has waited ",
        " s for rank 3 (3 of 4 are ready)",
        "Rank 3 last submitted 'layer2.bias'",
        "script.py:",
        "in slow_branch: time.sleep(patience_s)  # here it stands",
    ]:
        assert words in warning, warning
    assert result.stdout.count("done") == 4


def test_the_job_ends_where_that_is_wanted() -> None:
    result = run(
        BRANCH, "60", "0011", machines="0011",
        env={
            "HVDLITE_STALL_CHECK_TIME_SECONDS": "1",
            "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "2",
            "HVDLITE_FAILURE_GRACE_SECONDS": "1",
        },
    )  # fmt: skip
    check_end(
        result, "StallError", "allreduce 'layer3.bias'", "rank 3", "slow_branch", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"
    )
    assert "done" not in result.stdout


# Every rank catches the error; rank 3 comes long after the others have given up.
CAUGHT = """
hvdlite.init()
reduce("layer2.bias", tensor()).wait()
if hvdlite.rank() == 3:
    say("dying at", time.time())
    time.sleep(float(sys.argv[1]))
try:
    reduce("layer3.bias", tensor()).wait()
except hvdlite.StallError as error:
    say("caught", "layer3.bias" in str(error))
hvdlite.shutdown()
if sys.argv[2:] == ["again"]:
    hvdlite.init()
    reduce("layer3.bias", tensor()).wait()
    say("done")
"""
GIVE_UP = {
    "HVDLITE_STALL_CHECK_TIME_SECONDS": "1",
    "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "1",
    "HVDLITE_FAILURE_GRACE_SECONDS": "3",  # for threads on a busy machine; rank 3 comes later still
}


@pytest.mark.parametrize("machines", ["0000", "0011", "0123"])
def test_a_job_that_catches_the_error_ends_in_order(machines: str) -> None:
    result = run(CAUGHT, "9", machines=machines, env=GIVE_UP).check()
    assert result.stdout.count("caught True") == 4


def test_a_job_that_catches_the_error_can_start_again() -> None:
    result = run(CAUGHT, "4", "again", machines="0011", env=GIVE_UP).check()
    assert (result.stdout.count("caught True"), result.stdout.count("done")) == (4, 4)


def test_a_rank_that_never_comes_is_not_waited_for_without_end() -> None:
    result = run(CAUGHT, "60", machines="0011", env={**GIVE_UP, "HVDLITE_COLLECTIVE_TIMEOUT_SECONDS": "2"})
    check_end(result, "has ended, but others have not", "HVDLITE_COLLECTIVE_TIMEOUT_SECONDS", "'layer3.bias'", "rank 3")


@pytest.mark.parametrize("setting", [{"HVDLITE_STALL_CHECK_DISABLE": "1"}, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0"}])
def test_nobody_is_warned_who_does_not_want_it(setting: dict[str, str]) -> None:
    result = run(BRANCH, "2", "0011", machines="0011", env={"HVDLITE_STALL_CHECK_TIME_SECONDS": "", **setting}).check()
    assert "Stall" not in result.stderr


# Rank 2 alone submits a tensor; rank 3 of its own node does not, and neither does the other node.
PARTIAL = """
hvdlite.init()
reduce("common", tensor()).wait()
if hvdlite.rank() == 2:
    reduce("of rank 2 only", tensor()).wait()
else:
    time.sleep(3)
    reduce("of rank 2 only", tensor()).wait()
say("done")
"""


def test_what_waits_in_a_part_of_one_node_is_reported_too() -> None:
    """The leader of the other node hears of it before the node is complete."""
    result = run(PARTIAL, machines="0011", env={"HVDLITE_STALL_CHECK_TIME_SECONDS": "1"}).check()
    assert "allreduce 'of rank 2 only' has waited" in result.stderr
    assert " s for ranks 0, 1 and 3 (1 of 4 are ready)" in result.stderr


BUCKETS = """
import torch
import hvdlite.torch as hvd

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for number in range(4):
    if number == 3 and hvd.rank() == 1:
        time.sleep(2.5)
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
say("done")
"""


def test_a_bucket_that_waits_is_known_by_its_parameters() -> None:
    result = run(BUCKETS, n=2, mpi="none", env={"HVDLITE_STALL_CHECK_TIME_SECONDS": "1"}).check()
    (warning,) = [line for line in result.stderr.splitlines() if "StallWarning" in line]
    assert "' of 1.bias to 0.weight (4 parameters) has waited " in warning, warning
