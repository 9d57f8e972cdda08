"""Which launcher a process has, by environments as the launchers make them, and that nobody trains alone by mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.config import told_number
from hvdlite.errors import ConfigError, StartupError
from hvdlite.launched import LAUNCHERS, Launched, Launcher, Meeting, find, launcher_process, without_launcher
from hvdlite.start.torch_store import InStore


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


# What an allocation of 4 tasks sets in the shell of salloc and in the script of sbatch, before any step.
ALLOCATION = variables("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_JOB_NUM_NODES=2")
SCRIPT = ALLOCATION | variables("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASK_PID=99")
# What srun sets for a step of 2 tasks; and for the step of 1 task in which some clusters run the shell of salloc.
STEP = ALLOCATION | variables("SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1")
SHELL = ALLOCATION | variables("SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_PTY_PORT=34889")
PMIX = variables("PMIX_RANK=1 PMIX_NAMESPACE=slurm.pmix.7.0 PMIX_HOSTNAME=node16")
PMI2 = variables("PMI_RANK=1 PMI_SIZE=2 PMI_FD=13 PMI_JOBID=7.0")
OPEN_MPI = variables("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=1 PMIX_NAMESPACE=prterun-a-9@1")
HYDRA = variables("PMI_RANK=1 PMI_SIZE=2 PMI_FD=9 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1")
TORCHRUN = variables(
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 MASTER_ADDR=localhost TORCHELASTIC_RUN_ID=none"
)
BY_HAND = variables("RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500")
HVDLITERUN = variables("HVDLITE_RANK=1 HVDLITE_SIZE=2 HVDLITE_MEETING_POINT=x")
RAY = HVDLITERUN | variables("HVDLITE_RAY_JOB=1")
JSRUN = variables("JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=1 PMIX_RANK=1")
CRAY = STEP | variables("PALS_RANKID=1 PALS_APID=8 PMI_CONTROL_PORT=20000")


@pytest.mark.parametrize(
    ("environ", "name", "meeting"),
    [
        (OPEN_MPI, "mpirun of Open MPI", Meeting.MPI),
        (HYDRA, "mpirun of MPICH or Intel MPI", Meeting.MPI),
        (STEP | PMI2, "a launcher with PMI (as srun --mpi=pmi2)", Meeting.MPI),
        (STEP | PMIX, "a launcher with PMIx (as srun --mpi=pmix)", Meeting.MPI),
        (CRAY, "srun or mpiexec of a Cray", Meeting.MPI),
        (JSRUN, "jsrun", Meeting.MPI),
        (TORCHRUN, "torchrun", Meeting.STORE),
        (BY_HAND, "a launcher for torch.distributed (MASTER_ADDR, RANK, WORLD_SIZE)", Meeting.STORE),
        (STEP, "srun", Meeting.NOWHERE),
        (HVDLITERUN, "hvdliterun", Meeting.POINT),
        (RAY, "RayExecutor", Meeting.POINT),
    ],
)
def test_launchers(environ: dict[str, str], name: str, meeting: Meeting) -> None:
    launched = find(environ)
    assert launched is not None
    assert (launched.launcher.name, launched.rank, launched.size) == (name, 1, 2)
    assert launched.launcher.meeting is meeting


@pytest.mark.parametrize("inner", [OPEN_MPI, HYDRA, TORCHRUN])
def test_the_inner_launcher_counts(inner: dict[str, str]) -> None:
    """Where mpirun has several hosts, srun starts a daemon on each, whose processes see the step of these daemons."""
    daemon = STEP | variables("SLURM_STEP_NUM_TASKS=7 SLURM_PROCID=5")
    assert find(daemon | inner) == find(inner)
    assert find(HVDLITERUN | inner) == find(inner)


@pytest.mark.parametrize("outer", [OPEN_MPI, HYDRA, STEP | PMIX, CRAY, JSRUN, TORCHRUN, BY_HAND, STEP, HVDLITERUN, RAY])
def test_hvdliterun_inside_another_launcher_counts(outer: dict[str, str]) -> None:
    cleared = without_launcher(outer | {"PATH": "/bin"})
    assert find(cleared) is None
    assert cleared["PATH"] == "/bin"


def test_a_job_that_a_rank_starts_has_no_numbers_of_that_rank() -> None:
    """Which that has known since it met the others in init_process_group()."""
    numbers = variables("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
    assert not without_launcher(HVDLITERUN | numbers).keys() & numbers.keys()


def test_what_is_no_launchers_stays() -> None:
    environ = variables("MASTER_ADDR=localhost MASTER_PORT=29500 SLURM_PROCID=0")
    assert without_launcher(environ) == environ


@pytest.mark.parametrize("environ", [{}, ALLOCATION, SCRIPT, variables("WORLD_SIZE=8 RANK=3")])
def test_without_a_launcher(environ: dict[str, str]) -> None:
    assert find(environ) is None


@pytest.mark.parametrize("environ", [SHELL, TORCHRUN | variables("WORLD_SIZE=1"), SHELL | PMIX])
def test_one_process_may_be_alone(environ: dict[str, str]) -> None:
    launched = find(environ)
    assert launched is not None
    launched.check_not_alone(1)


def test_a_shell_of_srun_may_start_one_process_by_hand() -> None:
    """``srun -n 2 --pty bash``: srun gives no other process a terminal."""
    assert find(STEP, has_terminal=True) is None
    assert find(TORCHRUN, has_terminal=True) == find(TORCHRUN)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_the_error_names_the_launcher_and_a_command_that_works(launcher: Launcher) -> None:
    launched = Launched(launcher, 3, 16)
    with pytest.raises(StartupError) as caught:
        launched.check_not_alone(1, "Some MPI v1.0")
    text = str(caught.value)
    assert text.startswith(f"{launcher.name} started 16 processes, but each is alone: ")
    mpi = "" if launcher.meeting in (Meeting.MPI, Meeting.NOWHERE) else "--mpi "
    assert f"`hvdliterun {mpi}-np 16 python train.py`" in text
    assert ("has loaded Some MPI v1.0" in text) is (launcher.meeting is not Meeting.NOWHERE)
    launched.check_not_alone(16)


def test_numbers_of_launchers_are_those_that_python_reads() -> None:
    launched = find({"OMPI_COMM_WORLD_RANK": "²", "OMPI_COMM_WORLD_SIZE": "²"})
    assert launched is not None
    assert (launched.rank, launched.size) == (0, 1)


@pytest.mark.parametrize("name", ["HVDLITE_WORKER", "HVDLITE_START"])
def test_what_hvdliterun_tells_is_a_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert told_number(name) is None
    monkeypatch.setenv(name, "12")
    assert told_number(name) == 12
    monkeypatch.setenv(name, "abc")
    with pytest.raises(ConfigError, match=f"^{name}='abc': must be a number; hvdliterun sets it, so unset it$"):
        told_number(name)


def test_a_store_that_is_not_there_is_named() -> None:
    environ = TORCHRUN | {"MASTER_PORT": "1"}
    launched = find(environ)
    assert launched is not None
    words = "^rank 1 cannot reach the store of torch.distributed at MASTER_ADDR=localhost and MASTER_PORT=1, where"
    with pytest.raises(StartupError, match=words):
        InStore(launched, environ, 0.1)


INIT = "import hvdlite, sys; hvdlite.init(); print(hvdlite.rank(), hvdlite.size(), 'mpi4py.MPI' in sys.modules)"


def init(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", INIT], env=os.environ | environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TORCHRUN | variables("MASTER_PORT=70000"), "MASTER_PORT=70000: must be between 1 and 65535"),
        (BY_HAND | variables("RANK=2"), "this process has RANK=2, WORLD_SIZE=2: ranks are numbered from 0 to 1"),
        (BY_HAND | variables("WORLD_SIZE=abc"), "this process has WORLD_SIZE=abc: must be a number"),
        (HVDLITERUN, "rank 1 cannot reach the hvdliterun that has started it"),
        (STEP, "srun started 2 processes, but each is alone: srun has told MPI nothing of them. Use `srun --mpi=pmix"),
    ],
    ids=["torchrun", "a rank too many", "no number", "hvdliterun", "srun"],
)
def test_init_refuses_to_train_alone(environ: dict[str, str], words: str) -> None:
    done = init(environ)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"hvdlite.errors.StartupError: {words}" in done.stderr


@pytest.mark.parametrize(
    "environ",
    [
        ALLOCATION,
        SCRIPT,
        SHELL,
        TORCHRUN | variables("WORLD_SIZE=1 RANK=0"),
        HVDLITERUN | variables("HVDLITE_SIZE=1 HVDLITE_RANK=0"),
    ],
    ids=["salloc", "sbatch", "salloc with an interactive step", "torchrun of one", "hvdliterun of one"],
)
def test_init_of_one_process_needs_no_mpi(environ: dict[str, str]) -> None:
    done = init(environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1 False\n", "")


def test_the_launcher_is_the_nearest_ancestor_that_is_no_part_of_the_rank(tmp_path: Path) -> None:
    """Shells and the like between it and the program have the rank's environment."""
    program = "from hvdlite.launched import launcher_process; print(launcher_process())"
    script = tmp_path / "launcher.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "environ = {**os.environ, 'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_RANK': '1'}\n"
        "print(os.getpid(), flush=True)\n"
        f"subprocess.run(['sh', '-c', '{sys.executable} -c \"$0\"; true', {program!r}], env=environ)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    pid, found = done.stdout.splitlines()
    assert found.startswith("LauncherProcess(name='") and found.endswith(f"pid={pid})")


def test_a_program_without_mpi_has_no_launcher_to_watch() -> None:
    assert launcher_process() is None
