"""`python -m hvdlite run` whose output nobody takes any more: the job does not end because of what hvdliterun says."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from run_lab import executable

RUN = [sys.executable, "-m", "hvdlite", "run"]


OPEN_MPI, MPICH = "mpirun (Open MPI) 5.0.11", "HYDRA build details:\\n    Version: 5.0.2"


def mpirun_that_is(version: str, directory: Path) -> Path:
    """One that runs its last argument under a shell."""
    script = f'[ "$1" = --version ] && printf "{version}\\n" && exit\nfor last; do :; done; eval "$last"'
    return executable(directory / "mpirun", script)


@pytest.fixture
def mpirun(tmp_path: Path) -> Path:
    return mpirun_that_is(MPICH, tmp_path)


@pytest.mark.parametrize("options", [["--elastic", "--restarts", "1"], ["--restarts", "1"]])
def test_a_job_goes_on_where_its_stderr_takes_nothing(options: list[str], tmp_path: Path) -> None:
    """What hvdliterun has to say then is that a rank has failed, for which it has started another one."""
    tries = tmp_path / "tries"
    program = executable(tmp_path / "program", f"echo >>{tries}; [ $(wc -l <{tries}) = 2 ]")
    with open("/dev/full", "w") as full:
        done = subprocess.run([*RUN, *options, "-np", "1", str(program)], stderr=full, timeout=60)
    assert (done.returncode, tries.read_text()) == (0, "\n\n")


def test_a_closed_stdout(mpirun: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = [*RUN, "--mpirun", str(mpirun), "-np", "1", "sh", f"echo words; touch {done}"]
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    ended = subprocess.run(closing, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 0 and done.exists(), ended.stderr


def test_closed_descriptors_are_the_null_device_for_ranks(tmp_path: Path) -> None:
    """Else the next file that mpirun or a rank opens is its stdin or stdout."""
    found = tmp_path / "found"
    program = executable(tmp_path / "program", f'all=$(readlink /proc/$$/fd/[012]); echo "$all" >{found}')
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *RUN, "-np", "1", str(program)]
    assert subprocess.run(closing, timeout=60).returncode == 0
    assert found.read_text() == 3 * f"{os.devnull}\n"


@pytest.mark.parametrize("version", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
@pytest.mark.parametrize(("then", "status"), [("true", 1), ("exit 3", 3)])
def test_a_full_disk(version: str, then: str, status: int, tmp_path: Path) -> None:
    """The job goes on to its end, is not started again for that, and fails if it has not already."""
    tries, mpirun = tmp_path / "tries", mpirun_that_is(version, tmp_path)
    options = ["--restarts", "1"] if then == "true" else []
    program = f"echo words; sleep 0.1; echo more; echo >>{tries}; {then}"
    command = [*RUN, "--mpirun", str(mpirun), *options, "-np", "1", "sh", program]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, tries.read_text()) == (status, "\n"), ended.stderr
    assert ended.stderr.count("output of ranks is lost: [Errno 28] No space left on device") == 1


def test_a_reader_that_has_gone_ends_the_launcher(mpirun: Path) -> None:
    """As `| head` does where mpirun writes there itself."""
    command = [*RUN, "--mpirun", str(mpirun), "-np", "1", "sh", "while sleep 0.01; do echo word || exit 5; done"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stderr is not None
        assert job.stdout.readline() == "word\n"
        job.stdout.close()
        said = job.stderr.read()
        assert job.wait(60) != 0 and "Traceback" not in said, said


@pytest.fixture
def unread() -> Iterator[tuple[int, int]]:
    """A pipe that is full: the end to read, and the one to write."""
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    with suppress(BlockingIOError):
        while True:
            os.write(ends[1], bytes(4096))
    os.set_blocking(ends[1], True)
    yield ends
    for end in ends:
        os.close(end)


def wait_for(path: Path, job: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 30.0
    while not path.exists():
        if job.poll() is not None or time.monotonic() > deadline_s:
            job.kill()
            raise AssertionError(f"{path} is not there")
        time.sleep(0.05)


@pytest.mark.parametrize("options", [["--elastic", "--restarts", "1"], ["--restarts", "1"]])
def test_a_job_goes_on_where_nobody_reads_its_stderr(
    options: list[str], unread: tuple[int, int], tmp_path: Path
) -> None:
    """It does what it has to say a rank has failed for; once somebody reads, all is there."""
    reader, writer = unread
    tries, done = tmp_path / "tries", tmp_path / "done"
    program = executable(
        tmp_path / "program", f"echo >>{tries}; [ $(wc -l <{tries}) = 2 ] && touch {done} && kill -9 $$; exit 3"
    )
    with subprocess.Popen([*RUN, *options, "-np", "1", str(program)], stderr=writer) as job:
        wait_for(done, job)
        said = b""
        while job.poll() is None or select.select([reader], [], [], 0.0)[0]:
            if select.select([reader], [], [], 0.1)[0]:
                said += os.read(reader, 1 << 16)
    assert job.returncode in (3, 128 + signal.SIGKILL)  # of an elastic job that of the first failure
    assert b"ended with exit status 3" in said and b"was killed by signal 9" in said


@pytest.mark.parametrize("ignored", [False, True], ids=["in the foreground", "in the background of a script"])
@pytest.mark.parametrize("by", ["", "--elastic", "--mpirun"])
def test_ctrl_c_ends_a_job_whose_stderr_nobody_reads(
    by: str, ignored: bool, unread: tuple[int, int], mpirun: Path, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    options = {"": [], "--elastic": [by], "--mpirun": [by, str(mpirun)]}[by]
    program = executable(tmp_path / "program", f"trap 'exit 0' TERM; touch {started}; while :; do sleep 0.05; done")
    command = [*RUN, *options, "-np", "1", str(program)]

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)

    with subprocess.Popen(command, stderr=unread[1], preexec_fn=prepare) as job:
        wait_for(started, job)
        while job.poll() is None:  # the first ends the ranks, another one does not wait for who reads
            job.send_signal(signal.SIGINT)
            time.sleep(0.5)
    assert job.returncode in (128 + signal.SIGINT, -signal.SIGINT)


def test_all_output_of_a_launcher_arrives_however_late_it_is_read(mpirun: Path) -> None:
    count = 3 << 16
    command = [*RUN, "--mpirun", str(mpirun), "-np", "1", "sh", f"yes | head -c {count}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
        assert job.stdout is not None
        time.sleep(1.0)
        assert len(job.stdout.read()) == count
    assert job.returncode == 0
