"""`python -m hvdlite run` whose output nobody takes any more: the job does not end because of what hvdliterun says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from run_lab import executable

RUN = [sys.executable, "-m", "hvdlite", "run"]


@pytest.fixture
def mpirun(tmp_path: Path) -> Path:
    """MPICH's, whose output passes through hvdliterun; it runs its last argument under a shell."""
    version = 'printf "HYDRA build details:\\n    Version: 5.0.2\\n"'
    script = f'[ "$1" = --version ] && {version} && exit\nfor last; do :; done; eval "$last"'
    return executable(tmp_path / "mpirun", script)


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


def test_a_full_disk(mpirun: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = [*RUN, "--mpirun", str(mpirun), "-np", "1", "sh", f"echo words; sleep 0.1; echo more; touch {done}"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 0 and done.exists(), ended.stderr
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
