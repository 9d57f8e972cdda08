"""Start a script with several ranks from a test, and know at the end what every rank said and that nothing is left.

For tests that start mpirun or hvdliterun themselves (tests/faults, tests/hosts); they run under plain pytest.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from hvdlite.cli.job import Host, Launch
from hvdlite.cli.mpirun import FORWARDED_PREFIXES, Mpi, Mpirun, build, identify

MARK = "HVDLITE_TEST_LAUNCH"
_MPIS = {"openmpi": Mpi.OPEN_MPI, "mpich": Mpi.MPICH, "intelmpi": Mpi.INTEL}
_OUTLIVES_S = 3.0  # a launcher its ranks
# The libraries' own: MPICH's stay when a rank is killed, and hvdlite cannot know when it may remove them.
_MPI_FILES = ("mpich_shm_", "sm_segment.", "vader_segment.", "ucx_shm_")
# Of an MPI job or a singleton that this process may be part of; mpirun would take them for its own.
_MPI_VARIABLES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "PMI2_", "MPI_LOCAL", "HYDI_", "HYDRA_", "MPIR_", "OPAL_")
# Each rank's output goes to files of its own, so that nothing is interleaved or lost with a launcher that is killed.
# They are appended to, as a rank may be replaced.
_RANK_SHELL = (
    'r=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$HVDLITE_RANK}}; exec >>"$1/$r.out" 2>>"$1/$r.err"; shift; exec "$@"'
)


@dataclass(frozen=True)
class RankOutput:
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Result:
    """How a launch ended. ``leftovers`` names processes that survived it and files that it left in /dev/shm."""

    returncode: int
    ranks: tuple[RankOutput, ...]
    launcher_output: str
    elapsed_s: float
    leftovers: tuple[str, ...]

    @property
    def stdout(self) -> str:
        """All ranks' stdout, in order of rank."""
        return "".join(rank.stdout for rank in self.ranks)

    @property
    def stderr(self) -> str:
        return "".join(rank.stderr for rank in self.ranks)

    def check(self) -> Result:
        """This result, if all ranks succeeded and nothing is left; fails the test with all output otherwise."""
        if self.returncode or self.leftovers:
            pytest.fail(f"{self}", pytrace=False)
        return self

    def __str__(self) -> str:
        left = ", ".join(self.leftovers) or "nothing"
        parts = [f"launcher: exit status {self.returncode} after {self.elapsed_s:.1f} s; left behind: {left}"]
        for number, rank in enumerate(self.ranks):
            parts += [f"--- rank {number} stdout\n{rank.stdout}", f"--- rank {number} stderr\n{rank.stderr}"]
        return "\n".join([*parts, f"--- launcher\n{self.launcher_output}"])


class LaunchTimeoutError(AssertionError):
    """The ranks did not end in time; the text has their output, with the stacks of all their threads."""


def on_one_mpi(usual: str) -> pytest.MarkDecorator:
    """Runs a test by MPI ``usual`` alone, and with --thorough by the others too; for what depends little on it."""
    names = [name if name == usual else pytest.param(name, marks=pytest.mark.thorough) for name in _MPIS]
    return pytest.mark.parametrize("mpi", names, indirect=True)


@cache
def python_of(mpi: str) -> str:
    """The Python of the environment with ``mpi``: "current", or of `_MPIS`; skips the test where there is none.

    "none", which needs no environment of its own, has this one.

    The environments stand side by side, as .venv, .venv-mpich and .venv-intelmpi.
    """
    if mpi in ("current", "none") or mpirun_of(sys.executable).mpi is _MPIS[mpi]:
        return sys.executable
    base = sys.prefix.removesuffix("-mpich").removesuffix("-intelmpi")
    python = Path(base if mpi == "openmpi" else f"{base}-{mpi}") / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment with {_MPIS[mpi].value} ({python} does not exist; python3 tests/run.py makes it)")
    return str(python)


@cache
def mpirun_of(python: str) -> Mpirun:
    path = shutil.which("mpirun", path=f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip("no mpirun beside this Python and none in PATH")
    return identify(path)


def launch(
    n: int,
    script: str | Path,
    *args: str,
    mpi: str = "current",
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    options: Sequence[str] = (),
    hosts: Sequence[Host] = (),
    enter: Sequence[str] = (),
    shm_directories: Sequence[str] = ("/dev/shm",),
) -> Result:
    """Run ``script`` with ``n`` ranks under mpirun, or under hvdliterun without MPI, to its end.

    Args:
        script: a path, or the text of a Python program.
        args: its arguments.
        mpi: "current" (this environment's), or one of `_MPIS`; "none" for hvdliterun.
        env: variables to add.
        timeout: seconds; then every thread's stack is dumped, everything is killed, and LaunchTimeoutError raised.
        options: more options for mpirun, or hvdliterun.
        hosts, enter, shm_directories: for emulated hosts; see tests/hosts.

    Raises:
        LaunchTimeoutError: see above.
    """
    python = python_of(mpi)
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="hvdlite-launch-") as directory:
        path = script if isinstance(script, Path) else Path(directory) / "script.py"
        if not isinstance(script, Path):
            path.write_text(script)
        program = ("sh", "-c", _RANK_SHELL, "sh", directory, python, str(path), *args)
        # Unbuffered, so that a rank that is killed has said all; a dump of stacks needs PYTHONFAULTHANDLER.
        added = {MARK: mark, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1", **(env or {})}
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_VARIABLES)} | added
        if mpi == "none":
            assert not hosts
            argv, may_outlive = [python, "-m", "hvdlite", "run", "-np", str(n), *options, *program], False
        else:
            mpirun = mpirun_of(python)
            is_open_mpi = mpirun.mpi is Mpi.OPEN_MPI
            if hosts and is_open_mpi:  # which forwards nothing unasked
                unknown = [name for name in env or {} if not name.startswith(FORWARDED_PREFIXES)]
                options = [*options, *(word for name in unknown for word in ("-x", name))]
            command = build(mpirun, Launch(program, n, tuple(hosts), options=tuple(options)), environ)
            environ |= command.environment
            argv, may_outlive = command.argv, is_open_mpi and not hosts
        files = files_in(shm_directories)
        start = time.monotonic()
        output = Path(directory) / "launcher"
        with output.open("wb") as sink:
            child = subprocess.Popen(
                [*enter, *argv],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            timed_out = False
            try:
                _wait(child, mark, timeout, may_outlive=may_outlive)
            except subprocess.TimeoutExpired:
                timed_out = True
                _dump_stacks(mark)
            finally:
                elapsed = time.monotonic() - start
                if child.returncode is None:
                    child.kill()
                    child.wait()
                processes = _end(mark)
        ranks = tuple(RankOutput(_read(directory, f"{rank}.out"), _read(directory, f"{rank}.err")) for rank in range(n))
        leftovers = (*processes, *_new_files(shm_directories, files))
        result = Result(child.returncode, ranks, output.read_text(errors="replace"), elapsed, leftovers)
    if timed_out:
        raise LaunchTimeoutError(f"not at its end after {timeout:g} s\n{result}")
    return result


def _read(directory: str, name: str) -> str:
    path = Path(directory) / name
    return path.read_text(errors="replace") if path.exists() else ""


def processes_with(variable: str) -> dict[int, str]:
    """The living processes that have ``variable``, "NAME=value", in their environment: process id and command."""
    wanted = variable.encode()
    found = {}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and wanted in Path(f"/proc/{entry}/environ").read_bytes():
                found[int(entry)] = Path(f"/proc/{entry}/comm").read_text().strip()
        except OSError:  # it ended meanwhile, or is not ours
            continue
    return found


def _wait(child: subprocess.Popen[bytes], mark: str, timeout: float, *, may_outlive: bool) -> None:
    """Return once ``child``, a launcher, has ended; or was killed here because no rank is left.

    Of some 60 jobs whose ranks end with errors at the same moment, prterun (Open MPI 5.0.11) does not end after one,
    which says nothing about hvdlite. Its exit status is -9 then, so a job that should end in order fails its test.

    Raises:
        subprocess.TimeoutExpired: after ``timeout`` seconds.
    """
    start = seen_s = time.monotonic()
    had_ranks = False
    while True:
        try:
            child.wait(0.5)
            return
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if processes_with(f"{MARK}={mark}").keys() - {child.pid}:
                had_ranks, seen_s = True, now
            if may_outlive and had_ranks and now - seen_s > _OUTLIVES_S:
                child.kill()
                child.wait()
                return
            if now - start > timeout:
                raise


def _dump_stacks(mark: str) -> None:
    # faulthandler answers SIGABRT from C: a rank that holds the GIL in a loop dumps its stacks all the same.
    for pid, command in processes_with(f"{MARK}={mark}").items():
        if command.startswith("python"):
            os.kill(pid, signal.SIGABRT)
    time.sleep(1)


def _end(mark: str, patience_s: float = 2.0) -> list[str]:
    """Names the processes that are still there after ``patience_s``, and kills them."""
    deadline = time.monotonic() + patience_s
    while (left := processes_with(f"{MARK}={mark}")) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return [f"process {pid} ({command})" for pid, command in left.items()]


def files_in(directories: Sequence[str]) -> set[str]:
    """But those that other tests may have: semaphores of Python's multiprocessing, which hvdlite does not use, and
    directories of tests/fuzz."""
    paths = {path for directory in directories for path in Path(directory).iterdir()}
    return {str(path) for path in paths if not path.name.startswith(("sem.mp-", "fuzz-"))}


def _new_files(directories: Sequence[str], before: set[str], patience_s: float = 2.0) -> list[str]:
    """Files that appeared and stay for ``patience_s``, but those that a living process has mapped.

    Those are another job's, and so are some that are seen before they are mapped. An MPI library's are removed.
    """
    deadline = time.monotonic() + patience_s
    new = _unmapped([*files_in(directories) - before])
    while new and time.monotonic() < deadline:
        time.sleep(0.1)
        new = _unmapped([path for path in new if Path(path).exists()])
    for path in new:
        if Path(path).name.startswith(_MPI_FILES):
            Path(path).unlink(missing_ok=True)
    return [path for path in new if not Path(path).name.startswith(_MPI_FILES)]


def _unmapped(paths: Sequence[str]) -> list[str]:
    """Those of ``paths`` that no living process has mapped."""
    left = set(paths)
    for entry in Path("/proc").glob("[0-9]*/maps") if left else []:
        try:
            maps = entry.read_text()
        except OSError:  # it ended meanwhile, or is not ours
            continue
        left = {path for path in left if Path(path).name not in maps}
    return sorted(left)
