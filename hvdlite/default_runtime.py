"""The default runtime: started, ended and found here, and asked who this process is among others."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdlite import environment
from hvdlite.config import Config, misspelt_settings
from hvdlite.errors import (
    CollectiveError,
    ConfigError,
    HorovodVersionMismatchError,
    NotInitializedError,
    ShutDownError,
    StartupError,
)
from hvdlite.job_runtime import Runtime
from hvdlite.logs import configure_logging
from hvdlite.peers import Peers, start_deadline
from hvdlite.process import Companion, InitArguments, ProcessHooks
from hvdlite.process_worlds import ProcessWorlds
from hvdlite.recovery.membership import Membership
from hvdlite.recovery.survivors import Survivors
from hvdlite.timeline.trace_file import anew_path

if TYPE_CHECKING:
    from mpi4py import MPI

_LOG = logging.getLogger("hvdlite")
_ELASTIC_STARTS = 3  # of the same ranks that may fail in a row; of those that die hvdliterun keeps count

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


def restart(*, follows_rank_0: bool = True) -> None:
    """Shut down, and start again with what init() was called with last; a collective call of the same ranks.

    In an elastic job, of those that live: dead ranks are left out or replaced, and new ones come. Process sets are
    gone, and must be added again.

    Args:
        follows_rank_0: all ranks will be given what rank 0 has, which therefore must not be new.

    Raises:
        NotInitializedError: init() was never called.
        StartupError: says what is wrong and the way out; the communicator that init() was given has been freed.
    """
    with _hooks.lock:
        if _hooks.arguments is None:
            raise not_running()
        ended = _hooks.runtime
        world = None if ended is None else ended.world
        failed = None if world is None else world.health.failed_rank
        if membership() is None or world is None or not (world.has_ended or world.health.failure):
            shutdown()  # so that the other ranks come
        earlier = {} if ended is None else ended.counted()
        del ended, world  # their memory is free before the next ones take theirs
        _start(_hooks.arguments, failed, follows_rank_0, earlier)


def _start(
    arguments: InitArguments,
    failed: int | None = None,
    follows_rank_0: bool = True,
    earlier: Mapping[str, int] | None = None,
) -> None:
    if _hooks.in_child:
        raise StartupError(_FORKED)
    _hooks.install()
    config = Config.from_env()
    member = membership()
    is_new = member is None or member.generation is None
    failures, workers = 0, None
    while True:
        generation = _hooks.peers.meet_anew(failed, follows_rank_0=follows_rank_0)
        if generation is not None and generation.workers != workers:
            failures, workers = 0, generation.workers
        shutdown()  # a world that has ended serves until there is a next one: who saves a checkpoint asks for its rank
        try:
            _build(arguments, recorded(config), earlier)
            break
        except (StartupError, CollectiveError) as error:
            # A rank may end while it starts, or not fit the others; those that live meet once more.
            own_fault = isinstance(error, ConfigError) or (is_new and isinstance(error, HorovodVersionMismatchError))
            failures += 1
            if own_fault or generation is None or failures == _ELASTIC_STARTS:
                raise
            _LOG.warning("a start has failed, and is tried again: %s", error)
            failed = None


def _build(arguments: InitArguments, config: Config, earlier: Mapping[str, int] | None) -> None:
    deadline = start_deadline(config)
    if not earlier:
        _hooks.counted_before = _hooks.worlds.statistics()
    try:
        with _hooks.peers.announced(arguments.comm), _hooks.peers.of(arguments.comm, config) as ranks:
            configure_logging(config, 0 if ranks is None else ranks.rank)
            if ranks is None or ranks.rank == 0:
                _warn_of_misspelt()
            made = Runtime(
                ranks,
                config,
                versions=arguments.versions,
                worlds=_hooks.worlds,
                earlier=earlier,
                recovers=membership() is not None,  # elastic.run sees to it, however late it is called
            )
            _hooks.started(made, arguments)
        if _hooks.peers.survivors is not None:
            runtime().world.health.add(_hooks.peers.survivors)
    except BaseException:
        _hooks.startup_failed()
        raise
    finally:
        deadline.cancel()


@functools.cache
def _warn_of_misspelt() -> None:
    """Once in a process."""
    for sentence in misspelt_settings(environment.variables()):
        _LOG.warning("%s", sentence)


def recorded(config: Config) -> Config:
    """``config``, with a timeline that leaves those of this job's earlier starts and generations where they are."""
    if not config.timeline:
        return config
    return replace(config, timeline=anew_path(config.timeline, _hooks.peers.start, _hooks.peers.generation))


def membership() -> Membership | Survivors | None:
    """That of this process in an elastic job; None in others."""
    return _hooks.peers.membership


def peers() -> Peers:
    """The processes that were started together with this one."""
    return _hooks.peers


def worlds() -> ProcessWorlds:
    """In which this process is, the default runtime's among them."""
    return _hooks.worlds


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


def leave() -> None:
    """Once this process ends hvdlite, it is not started again."""
    if _hooks.runtime is not None:
        _hooks.runtime.is_left = True


def expect_recovery(is_expected: bool) -> None:
    """Whether from here on this process of an elastic job goes on after a failure, or soon ends."""
    if _hooks.runtime is not None:
        _hooks.runtime.world.health.recovers = is_expected and membership() is not None


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() was not, in this process."""
    current = _hooks.runtime
    return current is not None and not _hooks.in_child and not current.closed


def not_running() -> NotInitializedError:
    """What to raise where hvdlite does not run."""
    _hooks.trim()  # who has forgotten init() sees his own line last
    return NotInitializedError()


def runtime() -> Runtime:
    """The default runtime.

    Raises:
        NotInitializedError: init() was not called, or shutdown() was.
        ShutDownError: this process was forked from one that runs hvdlite.
    """
    current = _hooks.runtime
    if current is None:
        raise not_running()
    if _hooks.in_child:
        raise ShutDownError(_FORKED)
    return current


def _identity() -> Runtime:
    """Of a forked child its parent's, by which DataLoader workers share out data."""
    current = _hooks.runtime
    if current is None or (current.closed and not _hooks.in_child):
        raise not_running()
    return current


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


def counted_before() -> Mapping[str, int]:
    """What `statistics` began with; another object each time that init() has begun anew, and not after `restart`."""
    return _hooks.counted_before


def statistics() -> dict[str, int]:
    """What this rank has done since init(), over all process sets that it is or was a member of.

    What it has done in process groups of torch.distributed over hvdlite is there too, also before init().

    Counted always, at the cost of additions; each count only grows, also where `restart` is called meanwhile, so two
    calls tell what lies between them.
    docs/statistics.md says what is counted, and what to expect.

    Raises:
        ShutDownError: see `runtime`.
    """
    return runtime().statistics()
