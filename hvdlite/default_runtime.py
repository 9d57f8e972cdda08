"""The default runtime: started, ended and found here, and asked who this process is among others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hvdlite.config import Config
from hvdlite.errors import NotInitializedError, ShutDownError, StartupError
from hvdlite.logs import configure_logging
from hvdlite.peers import Peers, start_deadline
from hvdlite.process import Companion, InitArguments, ProcessHooks
from hvdlite.runtime import Runtime

if TYPE_CHECKING:
    from mpi4py import MPI

_FORKED = (
    "this process was forked from one that runs hvdlite (a DataLoader worker, for example) and cannot take part; "
    "communicate in the parent only"
)

_hooks = ProcessHooks()  # holds the default runtime, and all else that changes


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None,
    *,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Start hvdlite on the ranks of ``comm``; a collective call. Does nothing where hvdlite runs already.

    Args:
        comm: an mpi4py communicator (duplicated), a list of ranks, or None for all ranks that the launcher started;
            without a launcher that is this process alone. MPI is touched only where the launcher is MPI's.
        versions: of packages that must be the same on every rank.

    Raises:
        StartupError: says what is wrong and the way out.
    """
    with _hooks.lock:
        if not is_initialized():
            _start(InitArguments(list(comm) if isinstance(comm, Sequence) else comm, dict(versions or {})))


def restart() -> None:
    """Shut down, and start again with what init() was called with last; a collective call of the same ranks.

    Process sets are gone, and must be added again.

    Raises:
        NotInitializedError: init() was never called.
        StartupError: says what is wrong and the way out; the communicator that init() was given has been freed.
    """
    with _hooks.lock:
        if _hooks.arguments is None:
            raise NotInitializedError
        shutdown()
        _start(_hooks.arguments)


def _start(arguments: InitArguments) -> None:
    if _hooks.in_child:
        raise StartupError(_FORKED)
    _hooks.install()
    config = Config.from_env()
    deadline = start_deadline(config)
    try:
        with _hooks.peers.of(arguments.comm, config) as ranks:
            configure_logging(config, 0 if ranks is None else ranks.rank)
            _hooks.started(Runtime(ranks, config, versions=arguments.versions), arguments)
    except BaseException:
        _hooks.startup_failed()
        raise
    finally:
        deadline.cancel()


def peers() -> Peers:
    """The processes that were started together with this one."""
    return _hooks.peers


def accompany(companion: Companion) -> None:
    """From here on ``companion`` ends with this process, or fails with it, as the default runtime does."""
    with _hooks.lock:
        _hooks.install()
        _hooks.companions.add(companion)


def shutdown() -> None:
    """Stop hvdlite; operations in flight, and later ones, fail on every rank. init() starts hvdlite again."""
    with _hooks.lock:
        if _hooks.runtime is not None and not _hooks.in_child:
            _hooks.runtime.close()
            if _hooks.runtime.failure is None:
                _hooks.runtime = None


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() was not, in this process."""
    current = _hooks.runtime
    return current is not None and not _hooks.in_child and not current.closed


def runtime() -> Runtime:
    """The default runtime.

    Raises:
        NotInitializedError: init() was not called, or shutdown() was.
        ShutDownError: this process was forked from one that runs hvdlite.
    """
    current = _hooks.runtime
    if current is None:
        raise NotInitializedError
    if _hooks.in_child:
        raise ShutDownError(_FORKED)
    return current


def _identity() -> Runtime:
    if not is_initialized():
        raise NotInitializedError
    return runtime()


def rank() -> int:
    """This process's number among all."""
    return _identity().rank


def size() -> int:
    """Number of processes."""
    return _identity().size


def local_rank() -> int:
    """This process's number among those of its node."""
    return _identity().topology.local_rank


def local_size() -> int:
    """Number of processes on this node."""
    return _identity().topology.local_size


def cross_rank() -> int:
    """This node's number among those that have a process with this local rank."""
    return _identity().topology.cross_rank


def cross_size() -> int:
    """Number of nodes that have a process with this local rank."""
    return _identity().topology.cross_size


def is_homogeneous() -> bool:
    """Whether every node has the same number of processes."""
    return _identity().topology.is_homogeneous


def statistics() -> dict[str, int]:
    """What this rank has done since init(), over all process sets that it is or was a member of.

    Counted always, at the cost of additions; each count only grows, so two calls tell what lies between them.
    docs/statistics.md says what is counted, and what to expect.

    Raises:
        ShutDownError: see `runtime`.
    """
    return runtime().statistics()
