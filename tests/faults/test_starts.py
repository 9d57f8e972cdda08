"""Starts that cannot succeed: one clear sentence with the way out, and an end in time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fault_lab import PREAMBLE, run
from hvdlite.cli.job import Launch
from hvdlite.cli.mpirun import Mpi, build
from launching import Result, launch, mpirun_of, on_one_mpi, python_of

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
from hvdlite.launched import launched_rank

if launched_rank() == 1:
    time.sleep(60)
hvdlite.init()
say("went on")
"""
GROUP = 'import torch.distributed; torch.distributed.init_process_group("hvdlite")'


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
        "no connection of this rank is stuck",
    ]:
        assert words in result.stderr, result
    assert "went on" not in result.stdout


@pytest.mark.parametrize("mpi", ["current", "none"])
def test_a_slow_start_within_the_time_is_no_error(mpi: str) -> None:
    late = ABSENT.replace("time.sleep(60)", "time.sleep(2)")
    assert run(late, n=3, env={"HVDLITE_START_TIMEOUT": "20"}, mpi=mpi).check().stdout.count("went on") == 3


def check_lonely(result: Result, *words: str) -> None:
    """Rank 0 has waited in vain, and its last line has ``words``; it left nothing, and nobody went on."""
    check_refused(result, "StartupError: rank 0 has waited in hvd.init(), but rank 1 ", *words)
    assert result.elapsed_s < 15


def test_without_mpi_a_rank_that_does_not_come_is_named() -> None:
    check_lonely(
        run(ABSENT, n=3, env={"HVDLITE_START_TIMEOUT": "2.5"}, mpi="none"),
        "did not come within 2.0 s; if the start is only slow, raise HVDLITE_START_TIMEOUT",
    )


def test_without_mpi_a_rank_that_does_not_come_to_a_process_group_is_named_with_the_timeout_that_it_was_given() -> None:
    grouped = "import torch.distributed as dist\nfrom datetime import timedelta\n" + ABSENT.replace(
        "hvdlite.init()", 'dist.init_process_group("hvdlite", timeout=timedelta(seconds=2))'
    )
    result = run(grouped, n=3, env={"HVDLITE_START_TIMEOUT": "0.5"}, mpi="none")
    late = "rank 1 did not come within 2.0 s; if the start is only slow, raise the timeout that the process group"
    assert f"StartupError: rank 0 has waited in init_process_group(), but {late}" in result.stderr, result
    assert result.returncode != 0 and not result.leftovers and "went on" not in result.stdout


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("sys.exit(0)", "ended with exit status 0"),
        ("sys.exit(3)", "ended with exit status 3"),
        ("os.kill(os.getpid(), 9)", "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_without_mpi_a_rank_that_ends_before_its_start_is_named(end: str, words: str) -> None:
    result = run(ABSENT.replace("time.sleep(60)", end), n=3, mpi="none")
    check_lonely(result, words)
    if "0" not in words[-1]:
        assert "hvdlite run: rank 1 (pid " in result.launcher_output and words in result.launcher_output


@on_one_mpi("mpich")
@pytest.mark.parametrize(
    ("start", "end", "status"),
    [("hvdlite.init()", "sys.exit(3)", 3), (GROUP, "sys.exit(0)", 1)],
    ids=["init", "process group"],
)
def test_under_mpirun_a_rank_that_ends_before_its_start_is_named(
    start: str, end: str, status: int, mpi: str, tmp_path: Path
) -> None:
    """Open MPI's mostly ends the others by itself, MPICH's and Intel's do not."""
    script = tmp_path / "script.py"
    absent = ABSENT.replace("time.sleep(60)", f"time.sleep(1); {end}").replace("hvdlite.init()", start)
    script.write_text(PREAMBLE + absent)
    command = [python_of(mpi), "-m", "hvdlite", "run", "--mpi", "-np", "3", str(script)]
    environ = {**os.environ, "HVDLITE_START_TIMEOUT": "300"}  # longer than the test
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == status and "went on" not in done.stdout, done.stdout + done.stderr
    if mpi != "openmpi":
        assert "ended: rank 1 has ended before it was through hvd.init()" in done.stderr


WITHOUT_THREADS = """
from hvdlite.launched import launched_rank

start_thread, has_started = threading.Thread.start, []

def start(thread):
    if launched_rank() == 1 and len(has_started) == {most}:
        raise RuntimeError("can't start new thread")
    has_started.append(thread)
    start_thread(thread)

threading.Thread.start = start
hvdlite.init()
step()
hvdlite.shutdown()
"""


@pytest.mark.parametrize("most", [0, 1, 2], ids="{} threads".format)
def test_a_rank_that_gets_too_few_threads_says_so(most: int) -> None:
    """Those of the meeting in the node, of the sentinel and of the coordinator."""
    result = run(WITHOUT_THREADS.replace("{most}", str(most)), n=2, mpi="none")
    assert result.returncode != 0 and not result.leftovers, result
    assert "StartupError: no thread can be started: raise the limit" in result.ranks[1].stderr, result
    assert "died without a word" not in result.stderr, result
    assert most == 0 or "hvdlite run: rank 1 (pid" in result.launcher_output, result


def test_without_mpi_a_program_that_imports_mpi4py_is_refused() -> None:
    result = run("import mpi4py.MPI\n" + INIT, n=2, mpi="none")
    check_refused(result, "the program has imported mpi4py", "`hvdliterun --mpi -np 2 python train.py`")


def test_without_mpi_several_machines_are_refused() -> None:
    result = run(INIT, n=3, machines="001", mpi="none")
    check_refused(result, "hvdliterun started ranks on 2 machines", "needs MPI", "`hvdliterun -np 3 -H ")


ANOTHER = """
import subprocess
if len(sys.argv) == 1 and __name__ == "__main__":
    hvdlite.init()
    if hvdlite.rank() == 1:
        child = subprocess.run([sys.executable, __file__, "again"], capture_output=True, text=True)
        say(child.returncode, child.stderr.splitlines()[0])
    barrier_async(hvdlite.runtime().group).wait()
else:
    hvdlite.init()
"""


def test_without_mpi_a_program_that_a_rank_starts_is_no_rank() -> None:
    result = run(ANOTHER, n=2, env={"HVDLITE_START_TIMEOUT": "5"}, mpi="none").check()
    assert "rank 1 has come twice: a program that it has started calls hvd.init() as well" in result.stdout


def test_a_job_that_a_rank_of_an_elastic_job_starts_is_its_own() -> None:
    of_the_other = {"HVDLITE_WORKER": "7", "HVDLITE_KEEPER": f"gone:{'00' * 32}", "HVDLITE_NOTICES": "gone"}
    assert run(INIT, n=2, env=of_the_other, mpi="none").check().stdout.count("went on") == 2


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


TORCHRUN = """
hvdlite.init()
step()
sys.stdout.write(f"{hvdlite.rank()} of {hvdlite.size()} {'mpi4py.MPI' in sys.modules}\\n")  # a line at once
"""


def test_ranks_of_torchrun_meet_in_its_store(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + TORCHRUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2 False", "1 of 2 False"]


def test_a_rank_that_does_not_come_to_a_store_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed\n" + PREAMBLE + TORCHRUN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}
    environ = {**os.environ, **store, "HVDLITE_START_TIMEOUT": "5"}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "StartupError: rank 0 has waited in hvd.init(), but rank 1 did not come within " in done.stderr


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


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting another file system needs root")


@NEEDS_ROOT
@pytest.mark.parametrize(
    ("mpi", "ranks", "fill", "wants", "has"),
    [
        ("MPICH", 3, "", "18 MiB", "0.0625 MiB"),
        ("MPICH", 16, "head -c 4m /dev/zero >/dev/shm/full", "96 MiB", "60 MiB"),
        ("Intel MPI", 2, "", "0.312 MiB", "0.0625 MiB"),
    ],
    ids=["small", "64 MiB, in part taken", "Intel MPI"],
)
def test_an_mpi_in_a_dev_shm_without_room_is_refused(mpi: str, ranks: int, fill: str, wants: str, has: str) -> None:
    """It would crash without a word."""
    mount = f'mount -t tmpfs -o size={"64m" if fill else "64k"} tmpfs /dev/shm; {fill}\nexec "$@"'
    enter, environment = ("unshare", "--mount", "sh", "-ec", mount, "sh"), mpi.lower().replace(" ", "")
    result = launch(ranks, PREAMBLE + INIT, enter=enter, timeout=45, mpi=environment)
    needs = f"StartupError: {mpi} needs {wants} of /dev/shm for {ranks} ranks on {socket.gethostname()}"
    check_refused(result, needs, f"{has} are free", "--shm-size=1g")


@pytest.mark.parametrize("mpi", ["openmpi", "mpich", "none"])
def test_neither_home_nor_user_has_to_be_set(tmp_path: Path, mpi: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + INIT)
    environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    options = ["--mpi"] if mpi != "none" else []
    command = [python_of(mpi), "-m", "hvdlite", "run", *options, "-np", "2", str(script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("went on")) == (0, 2), done.stdout + done.stderr


def test_a_directory_for_temporary_files_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    command = [python_of("openmpi"), "-m", "hvdlite", "run", "--mpi", "-np", "2", "true"]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": nowhere}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"keeps files in {nowhere}, which cannot be written (No such file or directory): set TMPDIR" in done.stderr


@NEEDS_ROOT
def test_a_small_dev_shm_is_enough() -> None:
    """64 MB is what a container gets by default; what hvdlite shares is not there, however large."""
    fill = "buffer = allocate(hvdlite.runtime().group, 200 << 20); buffer.memory[:] = 1; step()"
    script = INIT.replace("step()", fill)
    enter = ("unshare", "--mount", "sh", "-ec", 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$@"', "sh")
    result = launch(3, PREAMBLE + script, enter=enter, timeout=45).check()
    assert result.stdout.count("went on") == 3


SHORT_OF_FILES = """
import errno
hvdlite.init()

def short(*_):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

if hvdlite.rank() == 1:
    hvdlite.node.connect_unix = short
hvdlite.runtime().add_group([0, 1])
"""


def test_why_a_process_set_could_not_start_is_said_before_others_give_up() -> None:
    result = run(SHORT_OF_FILES, n=3, env={"HVDLITE_START_TIMEOUT": "4"}, mpi="none")
    assert result.returncode != 0, result
    assert "rank 1 cannot connect to rank 0 on its own machine: [Errno 24]" in result.stderr, result
    assert "has waited in hvd.init()" not in result.stderr, result
