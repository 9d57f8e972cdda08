"""`python -m hvdlite run`, with each MPI and without: exit status, interruption, and what is left of who was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hvdlite.cli.children import end_with_parent
from hvdlite.processes import is_stopped
from launching import processes_with, python_of

START = """
import os, pathlib, signal, sys, time
from hvdlite.launched import launched_rank
rank = launched_rank()
if "ignore" in sys.argv:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
if "mpi" in sys.argv:
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
else:
    import hvdlite
    hvdlite.init()
pathlib.Path(sys.argv[1], str(rank)).touch()
"""
DEATH = """
if rank == 1:
    pathlib.Path(sys.argv[1], "maps").write_text(pathlib.Path("/proc/self/maps").read_text())
    os.kill(os.getpid(), 9)
time.sleep(60)
"""


@pytest.fixture(params=["openmpi", "mpich", "none"])
def mpi(request: pytest.FixtureRequest) -> str:
    """Each MPI in turn, and none."""
    name: str = request.param
    python_of(name)
    return name


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Of the test's job, also where the test has failed; where the tests themselves are killed, see `Job`."""
    yield
    for pid in processes_with(f"HVDLITE_TEST_JOB={tmp_path}"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Job:
    """A script under `python -m hvdlite run` with 2 ranks, which end with these tests; ``mark`` finds its processes."""

    def __init__(
        self, directory: Path, mpi: str, body: str, *args: str, initializes: bool = False, stdin: int | None = None
    ) -> None:
        self.ranks = directory / "ranks"
        self.ranks.mkdir()
        script = directory / "script.py"
        script.write_text(START + body)
        self.mark = f"HVDLITE_TEST_JOB={directory}"
        name, value = self.mark.split("=")
        front = [python_of(mpi), "-m", "hvdlite", "run", "-np", "2", *([] if mpi == "none" else ["--mpi"])]
        command = [*front, str(script), str(self.ranks), *args, *([] if mpi == "none" or initializes else ["mpi"])]
        environ = {**os.environ, name: value}
        self.process = subprocess.Popen(
            command, stdin=stdin, env=environ, cwd="/", start_new_session=True, preexec_fn=end_with_parent
        )

    def wait_until_started(self) -> None:
        while len(list(self.ranks.iterdir())) < 2:
            assert self.process.poll() is None
            time.sleep(0.01)

    def left(self) -> dict[int, str]:
        return processes_with(self.mark)


def test_success(tmp_path: Path, mpi: str) -> None:
    assert Job(tmp_path, mpi, "").process.wait(60) == 0


def test_exit_status(tmp_path: Path, mpi: str) -> None:
    job = Job(tmp_path, mpi, "sys.exit(3)")
    assert job.process.wait(60) == 3
    assert job.left() == {}


def test_rank_0_that_reads_finds_that_there_is_no_input(tmp_path: Path, mpi: str) -> None:
    body = "sys.exit(0 if rank == 1 or sys.stdin.read() == '' else 3)"
    assert Job(tmp_path, mpi, body, stdin=subprocess.DEVNULL).process.wait(60) == 0


LEAVING = """
import subprocess
from hvdlite import TensorView
from hvdlite.operations.allreduce import allreduce_async
import numpy as np
view = TensorView.of_numpy(np.zeros(1000, np.float32))
def leave(how):
    if how == "sys.exit":
        sys.exit(3)
    if how == "unseen":
        launcher = os.getppid()
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {launcher}"], start_new_session=True)
        os.kill(launcher, signal.SIGSTOP)
    os._exit(3)
for step in range(10_000):
    if rank == 1 and step == 5:
        time.sleep(0.3)  # the other waits in an allreduce
        leave(sys.argv[2])
    allreduce_async(hvdlite.runtime().group, [view], [view], name="gradient").wait()
"""


@pytest.mark.parametrize("mpi", ["openmpi", "mpich", "intelmpi"], indirect=True)
@pytest.mark.parametrize("how", ["sys.exit", "os._exit", "unseen"])
def test_the_exit_status_is_that_of_the_rank_that_leaves(
    tmp_path: Path, mpi: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not that of those who fail for lack of it, nor of those who are ended because of it; and the others name it.

    Also where it leaves unseen, as its launcher looks a while later: MPICH's tells no more than the first end it finds.
    Intel's mpirun kills the others, and says 255 then.
    """
    job = Job(tmp_path, mpi, LEAVING, how, initializes=True)
    assert job.process.wait(60) == 3
    said = "".join(capfd.readouterr())
    by_mpirun = r",1\]\s+Exit code: +3"  # that of Open MPI, before others can say a word
    assert re.search(rf"rank 1 (\(pid \d+.*\) died|has shut down|.*ended with exit status 3)|{by_mpirun}", said), said
    assert job.left() == {}


def test_a_killed_rank_leaves_nothing(tmp_path: Path, mpi: str) -> None:
    job = Job(tmp_path, mpi, DEATH)
    assert job.process.wait(60) != 0
    assert job.left() == {}
    mapped = (job.ranks / "maps").read_text()  # MPICH's files, which MPICH leaves to whoever cleans up
    assert [name for name in os.listdir("/dev/shm") if name in mapped] == []


@pytest.mark.parametrize("stubborn", [False, True], ids=["", "ranks ignore signals"])
@pytest.mark.parametrize("to_group", [False, True], ids=["kill -INT", "Ctrl-C"])
def test_interruption_ends_everything(tmp_path: Path, mpi: str, stubborn: bool, to_group: bool) -> None:
    job = Job(tmp_path, mpi, "time.sleep(60)", *["ignore"] * stubborn)
    job.wait_until_started()
    assert len(job.left()) >= (3 if mpi == "none" else 4)
    start = time.monotonic()
    if to_group:  # as a terminal does: mpirun gets it as well
        os.killpg(job.process.pid, signal.SIGINT)
    else:
        job.process.send_signal(signal.SIGINT)
    assert job.process.wait(30) == 130
    assert time.monotonic() - start < 10
    assert job.left() == {}


SAVES = """
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(pathlib.Path(sys.argv[1], f"saved by {rank}").touch()))
pathlib.Path(sys.argv[1], f"ready {rank}").touch()
time.sleep(60)
"""


def test_usr1_reaches_the_ranks(tmp_path: Path, mpi: str) -> None:
    """By which batch systems announce the end of the time; mpirun alone passes it on, too."""
    job = Job(tmp_path, mpi, SAVES)
    while not all((job.ranks / f"ready {rank}").exists() for rank in range(2)):
        assert job.process.poll() is None
        time.sleep(0.01)
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.wait(60) == 0
    assert all((job.ranks / f"saved by {rank}").exists() for rank in range(2))


@pytest.mark.parametrize("stubborn", [False, True], ids=["", "ranks ignore signals"])
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path, stubborn: bool) -> None:
    """Without MPI; with one, mpirun sees to it."""
    job = Job(tmp_path, "none", "time.sleep(60)", *["ignore"] * stubborn)
    job.wait_until_started()
    job.process.kill()
    job.process.wait()
    deadline = time.monotonic() + 10
    while job.left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert job.left() == {}


def test_ctrl_z_stops_ranks_as_well_until_the_launcher_goes_on(tmp_path: Path) -> None:
    """Without MPI: ranks are in process groups of their own. Else they would miss rank 0, which a terminal stops."""
    job = Job(tmp_path, "none", "time.sleep(60)")
    job.wait_until_started()
    for number, stopped in ((signal.SIGTSTP, True), (signal.SIGCONT, False)):
        job.process.send_signal(number)
        deadline = time.monotonic() + 10
        while any(is_stopped(pid) is not stopped for pid in job.left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [is_stopped(pid) for pid in job.left()] == [stopped] * 3
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(30) == 130


def test_the_doctor_runs_two_ranks() -> None:
    command = [sys.executable, "-m", "hvdlite", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["check"]
    assert found["wrong elements"] == 0
    assert found["allreduce GB/s"] > 0
    assert found["memcpy GB/s"] > 0
