"""Interrupts, children of a rank that dies, and what is left of a job that was killed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from fault_lab import check_end, run

INTERRUPTED = """
def launcher():
    pid = os.getppid()
    while True:
        stat = open(f"/proc/{pid}/stat").read()
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        if name in ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun"):
            return pid
        pid = int(stat[stat.rindex(")") + 2 :].split()[1])

hvdlite.init()
step()
if hvdlite.rank() == 1:
    say("dying at", time.time())
    os.kill(launcher() if sys.argv[1] == "mpirun" else os.getpid(), getattr(signal, sys.argv[2]))
while True:
    step()
"""


def test_an_interrupted_mpirun_leaves_nothing() -> None:
    """What Ctrl-C does where it reaches mpirun only."""
    result = run(INTERRUPTED, "mpirun", "SIGINT", machines="0011")
    check_end(result)


def test_an_interrupted_rank_ends_the_job() -> None:
    result = run(INTERRUPTED, "rank", "SIGINT", machines="0011", alone=True)
    check_end(result, "rank 1 raised KeyboardInterrupt")


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_ranks_do_not_outlive_an_mpirun_that_is_killed(mpi: str) -> None:
    result = run(INTERRUPTED, "mpirun", "SIGKILL", n=3, machines="001", mpi=mpi)
    assert result.returncode == -signal.SIGKILL, result
    assert result.leftovers == (), result


ENDS_MPI_ITSELF = """
hvdlite.init()
step()
if hvdlite.rank() == 1:
    hvdlite.shutdown()
    from mpi4py import MPI
    MPI.Finalize()
    say("works on")
"""


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_rank_whose_program_ends_mpi_itself_meets_the_others(mpi: str) -> None:
    result = run(ENDS_MPI_ITSELF, n=3, mpi=mpi)
    assert result.returncode == 0, result
    assert result.stdout == "works on\n", result


CHILD = """
hvdlite.init()
step()
if hvdlite.rank() == int(sys.argv[1]):
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    say("dying at", time.time())
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        step()
except hvdlite.RankFailedError:
    say("noticed at", time.time())
"""


@pytest.mark.parametrize("rank", [1, 2])
def test_a_child_of_a_rank_that_dies_hides_nothing(rank: int) -> None:
    """It has the parent's sockets no more, so the others see them close: unix sockets, or TCP to another leader."""
    result = run(CHILD, str(rank), n=3, machines="001", alone=True)
    died, noticed = (re.search(rf"^{word} at ([\d.]+)$", result.stdout, re.MULTILINE) for word in ("dying", "noticed"))
    assert died is not None, result
    assert noticed is not None, result
    assert float(noticed[1]) - float(died[1]) < 3, result


CHILD_OF_A_LEADER = """
import hvdlite.bootstrap, hvdlite.world

def sockets():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # by which they were listed
            pass
    return found

def seen(*args):
    links = connect_leaders(*args)
    between_leaders.update(os.readlink(f"/proc/self/fd/{link.fileno()}") for link in links.values())
    return links

between_leaders = set()
connect_leaders = hvdlite.world.connect_leaders
hvdlite.world.connect_leaders = hvdlite.bootstrap.connect_leaders = seen
hvdlite.init()
step()
if hvdlite.rank() == int(sys.argv[1]):
    say("parent:", len(between_leaders & sockets()))
    child = os.fork()
    if child == 0:
        say("child:", len(between_leaders & sockets()))
        os._exit(0)
    os.waitpid(child, 0)
    say("parent:", len(between_leaders & sockets()))
step()
"""


@pytest.mark.parametrize("rank", [0, 2])
def test_a_child_of_a_leader_has_no_connection_to_other_leaders(rank: int) -> None:
    """Neither that of the tree nor that of the sentinels; the parent goes on with both."""
    result = run(CHILD_OF_A_LEADER, str(rank), n=3, machines="001").check()
    assert result.stdout == "parent: 2\nchild: 0\nparent: 2\n", result


KILLED = """
from hvdlite.operations.allocate import allocate

hvdlite.init()
step()
buffer = allocate(hvdlite.runtime().group, 1 << 20)
if hvdlite.rank() == 1:
    say("dying at", time.time())
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    step()
"""


def test_a_killed_job_leaves_no_files_of_ours(tmp_path: Path) -> None:
    """In /dev/shm `run` looks itself; here the directory for temporary files."""
    check_end(run(KILLED, machines="0011", env={"TMPDIR": str(tmp_path)}, alone=True), "rank 1 (pid")
    assert not [path for path in tmp_path.rglob("*") if "hvdlite" in path.name.lower()]
