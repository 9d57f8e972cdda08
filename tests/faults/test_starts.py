"""Starts that cannot succeed: one clear sentence with the way out, and an end in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fault_lab import PREAMBLE, run
from hvdlite.cli.mpirun import Launch, Mpi, build
from launching import Result, launch, mpirun_of, python_of

INIT = """
hvdlite.init()
step()
say("went on")
"""


def check_refused(result: Result, *words: str) -> str:
    """It failed, left nothing, and rank 0, which all look at, has said all of ``words`` in its first line."""
    assert result.returncode != 0, result
    assert not result.leftovers, result
    assert "went on" not in result.stdout, result
    text = result.ranks[0].stderr
    first = text.strip().splitlines()[0]
    assert all(word in first for word in words), text
    return text


LOW_LEVEL = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
MPI.Get_library_version()
"""


def test_an_mpi_without_threads_is_refused() -> None:
    result = run(LOW_LEVEL + INIT, n=2)
    check_refused(
        result, "StartupError: MPI runs at MPI_THREAD_", "needs MPI_THREAD_MULTIPLE", "HVDLITE_MPI_THREADS_DISABLE"
    )


def test_an_mpi_without_threads_is_accepted_where_the_user_says_so() -> None:
    result = run(LOW_LEVEL + INIT, n=2, env={"HVDLITE_MPI_THREADS_DISABLE": "true"}).check()
    assert result.stdout.count("went on") == 2


VERSIONS = """
import mpi4py.MPI
hvdlite.init(versions={"torch": "2.13.0" if mpi4py.MPI.COMM_WORLD.rank == 2 else "2.12.1"})
say("went on")
"""


def test_mixed_versions_are_refused() -> None:
    result = run(VERSIONS, n=3)
    text = check_refused(
        result,
        "HorovodVersionMismatchError: the ranks run different versions of torch: 2.12.1 on rank 0",
        "2.13.0 on rank 2",
    )
    assert "Install the same version on every host." in text
    assert not any(rank.stderr.strip() for rank in result.ranks[1:]), result  # once is enough


def test_a_setting_that_makes_no_sense_is_named() -> None:
    result = run(INIT, n=2, env={"HOROVOD_FUSION_THRESHOLD": "64MB"})
    check_refused(result, "ConfigError: HOROVOD_FUSION_THRESHOLD='64MB'")


def test_an_interface_that_does_not_exist_is_named() -> None:
    result = run(INIT, n=2, env={"HVDLITE_NETWORK_INTERFACES": "ib7"})
    check_refused(result, "'ib7': no interface that is up matches")


ONE_RANK_ONLY = """
import mpi4py.MPI
if mpi4py.MPI.COMM_WORLD.rank == 1:
    os.environ["HVDLITE_NETWORK_INTERFACES"] = "ib7"
hvdlite.init()
say("went on")
"""


def test_what_is_wrong_on_one_host_only_is_said() -> None:
    result = run(ONE_RANK_ONLY, n=3)
    assert result.returncode != 0
    assert not result.leftovers
    assert "'ib7': no interface that is up matches" in result.stderr
    assert "went on" not in result.stdout


ABSENT = """
if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))) == 1:
    time.sleep(60)
hvdlite.init()
say("went on")
"""


def test_a_rank_that_does_not_start_is_not_waited_for_for_ever() -> None:
    result = run(ABSENT, n=3, env={"HVDLITE_START_TIMEOUT": "3"})
    assert result.returncode != 0
    assert not result.leftovers
    assert result.elapsed_s < 15
    for words in [
        "init() was not through after 3 s",
        "A rank did not start",
        "HVDLITE_NETWORK_INTERFACES",
        "HVDLITE_START_TIMEOUT",
    ]:
        assert words in result.stderr, result
    assert "went on" not in result.stdout


def test_a_slow_start_within_the_time_is_no_error() -> None:
    late = ABSENT.replace("time.sleep(60)", "time.sleep(2)")
    assert run(late, n=3, env={"HVDLITE_START_TIMEOUT": "20"}).check().stdout.count("went on") == 3


def test_the_mpirun_of_another_mpi_is_recognised(tmp_path: Path) -> None:
    """Every process is alone then; without a word, each would train on its own."""
    other = "openmpi" if mpirun_of(sys.executable).mpi is Mpi.MPICH else "mpich"
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + INIT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = build(mpirun_of(python_of(other)), Launch((sys.executable, str(script)), 2), environ)
    done = subprocess.run(command.argv, env=environ | command.environment, capture_output=True, text=True, timeout=40)
    assert done.returncode != 0
    assert "went on" not in done.stdout
    for words in ["started 2 processes, but each is alone", "Use the mpirun of the same MPI", "MPI4PY_LIBMPI"]:
        assert words in done.stderr, done.stderr


def test_processes_of_torchrun_do_not_train_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + INIT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start = time.monotonic()
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - start < 20
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert "StartupError: torchrun started 2 processes, but each is alone" in done.stderr
    assert "`hvdliterun -np 2 python train.py`" in done.stderr


def test_a_program_alone_needs_no_mpi(tmp_path: Path) -> None:
    """Not even importable: neither mpirun nor a library has to be there."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nsys.modules['mpi4py'] = None\n"
        + PREAMBLE
        + INIT
        + "assert hvdlite.size() == 1\nsay(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, done.stderr
    assert "went on" in done.stdout
    assert "'mpi4py.MPI'" not in done.stdout
    assert done.stderr == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting another /dev/shm needs root")
def test_a_small_dev_shm_is_enough() -> None:
    """64 MB is what a container gets by default; what hvdlite shares is not there, however large."""
    fill = "buffer = allocate(hvdlite.runtime().group, 200 << 20); buffer.memory[:] = 1; step()"
    script = INIT.replace("step()", fill)
    enter = ("unshare", "--mount", "sh", "-ec", 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$@"', "sh")
    result = launch(3, PREAMBLE + script, enter=enter, timeout=45).check()
    assert result.stdout.count("went on") == 3
