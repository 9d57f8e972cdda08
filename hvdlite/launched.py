"""Who started this process, and as one of how many: the launchers that are known, by the variables that they set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hvdlite import environment
from hvdlite.config import MEETING_POINT, RANK, RAY_JOB, SIZE
from hvdlite.errors import StartupError
from hvdlite.processes import state_of


class Meeting(Enum):
    """Where the processes of a launcher find one another."""

    MPI = "in COMM_WORLD"
    POINT = "at a meeting point of ours"
    STORE = "in a store of torch.distributed"
    NOWHERE = "nowhere"


@dataclass(frozen=True)
class Launcher:
    """A program that starts processes. Names of variables are separated by blanks.

    Attributes:
        name: what an error calls it.
        marks: variables that show its processes, which have at least one each. ``A&B``: both of them.
        rank: variables that may hold a process's number.
        size: variables that may hold how many processes there are.
        way_out: why each process may find itself alone, and the command that works. ``{size}`` and ``{library}``, the
            MPI that was tried, are filled in.
        meeting: where its processes find one another.
        has_terminals: whether its processes may have a terminal. If not, a process that has one was started by hand,
            from a shell that has the launcher's marks.
    """

    name: str
    marks: str
    rank: str
    size: str
    way_out: str
    meeting: Meeting = Meeting.MPI
    has_terminals: bool = True


_OTHER_MPI = (
    "mpi4py has loaded {library}, which is not the MPI of that mpirun. Use the mpirun of the same MPI, which "
    "`hvdliterun -np {size} python train.py` takes where it needs one, or point MPI4PY_LIBMPI at the library of this "
    "mpirun."
)
_OTHER_PMI = (
    "mpi4py has loaded {library}, which does not understand this launcher. Of srun's, Open MPI understands "
    "`srun --mpi=pmix -n {size} python train.py`, and MPICH --mpi=pmi2; in an allocation "
    "`hvdliterun -np {size} python train.py` does as well."
)
_OTHER_JSRUN = (
    "mpi4py has loaded {library}, which is not jsrun's MPI. Point MPI4PY_LIBMPI at the library of Spectrum MPI, or use "
    "`hvdliterun -np {size} python train.py`."
)
_NO_PMI = (
    "srun has told MPI nothing of them. Use `srun --mpi=pmix -n {size} python train.py` with Open MPI, --mpi=pmi2 with "
    "MPICH (`srun --mpi=list` names what this Slurm has), or, in the allocation, "
    "`hvdliterun -np {size} python train.py`."
)
_NO_MPI = (
    "the program has imported mpi4py, which has loaded {library}, and this launcher does not serve MPI. Import nothing "
    "of mpi4py, or start the ranks with `hvdliterun --mpi -np {size} python train.py`."
)

GROUP_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})
"""By which libraries over torch.distributed know a rank; also of ranks that have met in init_process_group()."""
_LOCAL_SIZES = "OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS"

OPEN_MPI = Launcher(
    "mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", _OTHER_MPI
)
# In this order: mpirun in a Slurm allocation leaves its own marks beside srun's.
LAUNCHERS = (
    OPEN_MPI,
    Launcher("mpirun of MPICH or Intel MPI", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", _OTHER_MPI),
    Launcher("srun or mpiexec of a Cray", "PALS_RANKID", "PALS_RANKID", "PMI_SIZE SLURM_STEP_NUM_TASKS", _OTHER_PMI),
    Launcher(
        "a launcher with PMI (as srun --mpi=pmi2)", "PMI_RANK PMI_SIZE PMI_FD", "PMI_RANK", "PMI_SIZE", _OTHER_PMI
    ),
    Launcher("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", _OTHER_JSRUN),
    Launcher("a launcher with PMIx (as srun --mpi=pmix)", "PMIX_RANK", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", _OTHER_PMI),
    Launcher("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", _NO_MPI, Meeting.STORE),
    Launcher(
        "a launcher for torch.distributed (MASTER_ADDR, RANK, WORLD_SIZE)",
        "MASTER_ADDR&MASTER_PORT&RANK&WORLD_SIZE",
        "RANK",
        "WORLD_SIZE",
        _NO_MPI,
        Meeting.STORE,
    ),
    Launcher(
        "srun",
        "SLURM_STEP_NUM_TASKS",  # which salloc and sbatch do not set
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        _NO_PMI,
        Meeting.NOWHERE,
        has_terminals=False,  # but the first one with --pty
    ),
    # The last: they take the marks of others from their ranks, so whose marks these have was started by them.
    Launcher("RayExecutor", f"{MEETING_POINT}&{RAY_JOB}", RANK, SIZE, _NO_MPI, Meeting.POINT),
    Launcher("hvdliterun", MEETING_POINT, RANK, SIZE, _NO_MPI, Meeting.POINT),
)


@dataclass(frozen=True)
class Launched:
    """What ``launcher`` says of a process.

    Attributes:
        rank: the number of the process; 0 where the launcher does not say.
        size: how many processes there are; 1 where the launcher does not say.
        local_size: how many of them are on its host; likewise.
    """

    launcher: Launcher
    rank: int
    size: int
    local_size: int = 1

    def check_not_alone(self, found: int, library: str = "") -> None:
        """Refuse to let one process of several train alone.

        Args:
            found: how many processes MPI knows; 1 where MPI was not started.
            library: the MPI, if one was loaded.

        Raises:
            StartupError: names the launcher, what it has started, and the command that works.
        """
        if found == 1 and self.size > 1:
            way_out = self.launcher.way_out.format(size=self.size, library=library)
            raise StartupError(f"{self.launcher.name} started {self.size} processes, but each is alone: {way_out}")

    def check_number(self, environ: Mapping[str, str]) -> None:
        """Raises StartupError where there is no such rank, or ``environ``, the process's, has no numbers."""
        for name in (self.launcher.rank, self.launcher.size):
            if not (environ.get(name) or "0").isdecimal():
                raise StartupError(f"this process has {name}={environ[name]}: must be a number")
        if self.rank >= self.size:
            numbers = f"{self.launcher.rank}={self.rank}, {self.launcher.size}={self.size}"
            raise StartupError(f"this process has {numbers}: ranks are numbered from 0 to {self.size - 1}")


@dataclass(frozen=True)
class LauncherProcess:
    """The process that has started this one: mpirun, or its daemon on this host."""

    name: str
    pid: int


def launcher_process() -> LauncherProcess | None:
    """The nearest ancestor that is no part of this rank, as its environment lacks the launcher's marks.

    None where MPI's launcher has not started this process; all others see to it themselves that ranks end with them.
    """
    environ = environment.at_start()
    process = find(environ)
    if process is None or process.launcher.meeting is not Meeting.MPI:
        return None
    pid = os.getpid()
    with suppress(OSError):  # it is another user's, or of another container
        while _is_marked(process.launcher, environ):
            pid = int(state_of(pid)[1])
            environ = environment.of_process(pid)
        if pid > 1:  # else its ancestors have ended: it was detached on purpose
            return LauncherProcess(Path(f"/proc/{pid}/comm").read_text().strip(), pid)
    return None


def told(rank: int, count: int) -> dict[str, str]:
    """Variables that say to a process who it is, of ``count`` that hvdliterun has started on one machine."""
    numbers = {"RANK": rank, "SIZE": count, "LOCAL_RANK": rank, "LOCAL_SIZE": count, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    return {RANK: str(rank), SIZE: str(count)} | {f"HOROVOD_{name}": str(n) for name, n in numbers.items()}


def find(environ: Mapping[str, str], *, has_terminal: bool = False) -> Launched | None:
    """What the launcher has said of the process that has ``environ``; None without a launcher.

    Args:
        has_terminal: whether the process's stdin is a terminal.
    """
    for launcher in LAUNCHERS:
        by_hand = has_terminal and not launcher.has_terminals
        if _is_marked(launcher, environ) and not by_hand:
            rank, size = _number(environ, launcher.rank, 0), _number(environ, launcher.size, 1)
            return Launched(launcher, rank, size, _number(environ, _LOCAL_SIZES, 1))
    return None


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what launchers have said of this process, for processes that are started anew."""
    theirs = [launcher for launcher in LAUNCHERS if _is_marked(launcher, environ)]
    texts = [text for launcher in theirs for text in (launcher.marks, launcher.rank, launcher.size)]
    names = {name for text in texts for name in text.replace("&", " ").split()}
    if theirs:
        names |= GROUP_VARIABLES
    return {name: value for name, value in environ.items() if name not in names}


def _is_marked(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    return any(environ.keys() >= {*mark.split("&")} for mark in launcher.marks.split())


def _number(environ: Mapping[str, str], names: str, default: int) -> int:
    return next((int(environ[name]) for name in names.split() if environ.get(name, "").isdecimal()), default)


def this_process() -> Launched | None:
    """What the launcher has said of this process; None without a launcher."""
    return find(environment.variables(), has_terminal=os.isatty(0))


def launched_rank() -> int:
    """The number that the launcher gave this process, whether or not MPI runs by now; 0 without a launcher."""
    launched = this_process()
    return 0 if launched is None else launched.rank
