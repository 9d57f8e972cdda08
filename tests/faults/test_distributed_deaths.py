"""A rank of a process group of torch.distributed that dies, raises, or forgets to end: the others end, and say why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fault_lab import check_end, run

SCRIPT = """
import torch, torch.distributed as dist
import hvdlite.distributed.creation

kind = sys.argv[1]
if "1" in machines:
    from mpi4py import MPI
    hvdlite.distributed.creation.machine = lambda: (machines[MPI.COMM_WORLD.rank], "", 0)
if kind == "hvdlite first":
    hvdlite.init()
dist.init_process_group("hvdlite")
rank = dist.get_rank()
if kind == "group first":
    hvdlite.init()
dist.barrier()
large = torch.ones(1_000_000)

def die():
    say("dying at", time.time())
    os.kill(os.getpid(), signal.SIGKILL)

if kind == "in a collective":
    if rank == 1:
        threading.Timer(0.3, die).start()
    while True:
        dist.all_reduce(large, async_op=True).wait()
if kind == "in a message":
    if rank == 1:
        time.sleep(0.2)
        die()
    dist.recv(large, 1)
if kind == "in messages of others":
    if rank == 1:
        time.sleep(0.2)
        die()
    dist.recv(large, 2 if rank == 0 else None)
if kind == "in a monitored barrier":
    if rank == 1:
        time.sleep(0.2)
        die()
    while rank == 2 and not dist.group.WORLD.membership.failure:  # late, and alive
        time.sleep(0.01)
    dist.monitored_barrier(wait_all_ranks=True)
if kind == "before a new group":
    if rank == 1:
        die()
    try:
        dist.new_group([1, 2] if rank == 2 else [0, 1], use_local_synchronization=True)
        say("went on")
    except hvdlite.errors.RankFailedError as error:
        say("no new group:", error)
        raise
if kind == "by an exception":
    if rank == 1:
        say("dying at", time.time())
        raise KeyError("oh")
    dist.all_reduce(large)
if kind == "forgetting":
    group = dist.new_group(range(dist.get_world_size()))
    dist.all_reduce(large, async_op=True).get_future().then(lambda done: None)
    dist.isend(torch.ones(3), (rank + 1) % dist.get_world_size(), group=group)
    dist.irecv(torch.ones(3), (rank - 1) % dist.get_world_size(), group=group)
if kind in ("hvdlite first", "group first"):
    upper = dist.new_group([1, 2])
    lower = dist.new_group([0, 1])
    others = dist.new_group([0, 2])
    if rank == 1:
        time.sleep(0.2)
        die()
    health = hvdlite.runtime().world.health
    while not health.failure:  # nobody calls hvdlite's runtime, or waits in one of the groups
        time.sleep(0.01)
    for failed in (dist.group.WORLD, upper if rank == 2 else lower):
        try:
            dist.barrier(failed)
            say("went on")
        except hvdlite.errors.RankFailedError as error:
            assert error.rank == 1, error.rank
            say("the group knows", error)
    dist.barrier(others)  # the living
    say("the others live")
    hvdlite.runtime().check()
say("end")
"""


@pytest.mark.parametrize("kind", ["in a collective", pytest.param("in a message", marks=pytest.mark.thorough)])
def test_a_killed_rank_is_named(kind: str) -> None:
    check_end(run(SCRIPT, kind, n=3, mpi="none"), "rank 1 (pid", "died without a word")


@pytest.mark.parametrize("kind", ["in a collective", pytest.param("in a message", marks=pytest.mark.thorough)])
def test_a_killed_rank_is_named_on_another_node(kind: str) -> None:
    check_end(run(SCRIPT, kind, n=3, machines="001"), "rank 1 (pid", "died without a word")


def test_a_killed_rank_is_named_to_those_that_wait_for_messages_of_the_living() -> None:
    check_end(run(SCRIPT, "in messages of others", n=3, mpi="none"), "RankFailedError: rank 1 (pid")


def test_a_monitored_barrier_names_the_killed_rank_and_none_that_is_only_late() -> None:
    result = run(SCRIPT, "in a monitored barrier", n=3, mpi="none")
    check_end(result, "RankFailedError: rank 1 (pid", "in monitored_barrier")
    assert "failed to pass" not in result.ranks[0].stderr, result


@pytest.mark.parametrize("mpi", ["none", pytest.param("current", marks=pytest.mark.thorough)])
def test_a_new_group_does_not_wait_for_a_rank_that_has_died(mpi: str) -> None:
    result = run(SCRIPT, "before a new group", n=3, mpi=mpi, machines="" if mpi == "none" else "001")
    check_end(result, "RankFailedError: rank 1 (pid", "in new_group")
    assert any("no new group: rank 1 (pid" in rank.stdout for rank in result.ranks), result


def test_an_exception_reaches_the_others() -> None:
    check_end(run(SCRIPT, "by an exception", n=3, mpi="none"), "rank 1 raised KeyError: 'oh'")


@pytest.mark.parametrize("order", ["hvdlite first", "group first"])
def test_a_dead_rank_is_known_to_all_that_it_belonged_to_and_to_nobody_else(order: str) -> None:
    result = run(SCRIPT, order, n=3, mpi="none")
    check_end(result, "rank 1 (pid", "died without a word")
    for rank in (0, 2):
        assert result.ranks[rank].stdout.count("the group knows rank 1 (pid") == 2, result
        assert "the others live" in result.ranks[rank].stdout, result


@pytest.mark.parametrize("mpi", ["none", pytest.param("current", marks=pytest.mark.thorough)])
def test_a_program_that_forgets_destroy_process_group_ends_in_order(mpi: str) -> None:
    result = run(SCRIPT, "forgetting", n=3, mpi=mpi)
    assert result.returncode == 0, result
    assert result.stdout == "end\n" * 3
    assert not result.leftovers


GLOO = """
import os
import torch
import torch.distributed as dist

os.environ.update(RANK="1", WORLD_SIZE="3")  # of a rank that has started this job
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")), flush=True)
dist.destroy_process_group()
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
dist.barrier()
"""


@pytest.mark.parametrize("mpi", ["current", "none"])
def test_ranks_that_meet_for_a_group_of_another_backend_know_who_they_are_and_end_in_order(mpi: str) -> None:
    assert run(GLOO, n=2, mpi=mpi).check().stdout == "0 2 0 2\n1 2 1 2\n"


RESTARTED = """
import os, signal
import torch, torch.distributed as dist
import hvdlite.distributed

dist.init_process_group("hvdlite")
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))
tensor = torch.ones(3)
dist.all_reduce(tensor)
os.write(1, f"{tensor.tolist()}\\n".encode())
dist.destroy_process_group()
"""


def test_torchrun_starts_the_ranks_anew_after_a_death(tmp_path: Path) -> None:
    """Which meet in the same store; torchrun ends the others, perhaps before they have said whom they miss."""
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, str(script)], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2.0, 2.0, 2.0]\n" * 2
