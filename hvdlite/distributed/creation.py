"""How a process group begins: its ranks find one another in the store that torch gives to each group."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvdlite import default_runtime, launched, mpi, plain
from hvdlite.agreement import Bootstrap, exchange
from hvdlite.bootstrap import start_world
from hvdlite.config import Config
from hvdlite.distributed.doors import Door, Entrance
from hvdlite.distributed.group_timeline import group_timeline
from hvdlite.distributed.meeting import machine
from hvdlite.distributed.membership import Membership
from hvdlite.distributed.out_forms import take_out_forms
from hvdlite.distributed.process_group import HvdliteProcessGroup
from hvdlite.distributed.steps import OptimizerSteps
from hvdlite.errors import CollectiveError, RankFailedError, StartupError
from hvdlite.launched import Meeting
from hvdlite.logs import configure_logging
from hvdlite.naps import Patience
from hvdlite.start.rendezvous import GROUP_LIMIT, START_LIMIT, MissingError, RendezvousRanks, read
from hvdlite.start.torch_store import InGivenStore
from hvdlite.world import World

_FAREWELL_S = 2.0
_NEVER_S = 1e6  # between nodes a `hvdlite.distributed.late_watch.LateWatch` ends waits


def create(options: Any) -> HvdliteProcessGroup:
    """The process group that ``options``, torch's DistributedBackendOptions, describe. Its ranks alone call this.

    Raises:
        StartupError: a rank did not come in time, or ranks cannot reach one another; says what to do.
        RankFailedError: a rank has died, as the group of all ranks knows.
    """
    take_out_forms()
    try:
        return _created(options)
    except MissingError as error:
        _stay(options, error.missing)
        raise StartupError(str(error)) from None
    except StartupError:
        _stay(options)
        raise


def _stay(options: Any, missing: Sequence[int] = ()) -> None:
    """Until the others have heard why the start fails, but for those that are missing: this rank may have the store."""
    ranks = _ranks(options)
    came = [rank for rank in ranks if rank not in missing]
    with suppress(StartupError):
        _place(options.store).gather("hvdlite/failed", came, ranks[options.group_rank], b"-", Patience(_FAREWELL_S))


def _ranks(options: Any) -> list[int]:
    """What the program calls the ranks of the group."""
    return list(options.global_ranks_in_group) or list(range(options.group_size))


def _created(options: Any) -> HvdliteProcessGroup:
    rank, size, name = options.group_rank, options.group_size, options.group_id
    ranks = _ranks(options)
    timeout_s = options.timeout.total_seconds()
    is_initialized = default_runtime.is_initialized()
    settings = default_runtime.runtime().config if is_initialized else default_runtime.recorded(Config.from_env())
    config = replace(settings, collective_timeout_s=timeout_s)
    if not is_initialized:
        configure_logging(config, ranks[rank])
    bootstrap = None if size == 1 else _meet(options.store, name, rank, ranks, timeout_s, config)
    if bootstrap is not None and bootstrap.comm is not None:
        config = replace(config, collective_timeout_s=_NEVER_S)
    entrance, doors = _doors(bootstrap, config, name)
    with ExitStack() as on_failure:
        on_failure.callback(entrance.close)
        start = start_world(
            bootstrap,
            config,
            default_runtime.worlds().recorder(config.timeline_events),
            versions={"torch": torch.__version__},
            news=lambda: None,
            on_notice=lambda content: None,
            names=ranks,
            recovers=default_runtime.membership() is not None,  # by elastic.run, as hvd.init()'s does
        )
        on_failure.pop_all()
    worlds = default_runtime.worlds()
    timeline = steps = None
    if not options.global_ranks_in_group:  # of all ranks
        timeline = group_timeline(start.world, worlds, _place(options.store), config.failure_grace_s)
        steps = OptimizerSteps(start.world.recorder)
        steps.watch()
    if bootstrap is not None:
        bootstrap.close()  # the world has its own; after a failure other ranks may not come here
    if not options.global_ranks_in_group:
        default_runtime.peers().told = _without_launcher(options.store, start.world, config)
    membership = Membership(
        start.world, name, ranks, timeout_s, entrance, doors, worlds, timeline, steps, options.store
    )
    worlds.add(start.world.health, start.processes, ranks, membership.statistics)
    default_runtime.accompany(membership)
    return HvdliteProcessGroup(membership, options.store, create)


def _doors(bootstrap: Bootstrap | None, config: Config, name: str) -> tuple[Entrance, list[Door]]:
    """This rank's entrance, and the doors of all ranks. Collective; all raise if one of them cannot have a door."""
    own: list[Entrance] = []
    from_other_nodes = bootstrap is not None and bootstrap.comm is not None

    def door() -> Door:
        try:
            own.append(Entrance(config.network_interfaces, from_other_nodes=from_other_nodes))
        except OSError as error:
            raise StartupError(
                f"cannot listen for messages of process group {name} ({error}): raise the limit on open files "
                "(ulimit -n), or end groups that are not needed any more (dist.destroy_process_group)"
            ) from error
        return own[0].door

    try:
        doors = exchange(bootstrap, door)
    except BaseException:
        for entrance in own:
            entrance.close()
        raise
    return own[0], doors


def _place(store: Any, ranks: Sequence[int] = (), limit: str = START_LIMIT) -> InGivenStore:
    """For ``ranks``, of which some may be dead, or have left."""

    def obstacle() -> CollectiveError | StartupError | None:
        job = dist.group.WORLD  # None while that itself begins
        if not isinstance(job, HvdliteProcessGroup):
            return None
        failure = job.membership.failure
        if isinstance(failure, RankFailedError) and failure.rank in ranks:
            return failure.with_traceback(None)  # several threads raise it, each from its own place
        if gone := [rank for rank in job.membership.departed() if rank in ranks]:
            return MissingError.of(gone, "left the group of all ranks before, by destroy_process_group() or at its end")
        return None

    return InGivenStore(store, default_runtime.peers().store_key, limit, obstacle)


def _without_launcher(store: Any, world: World, config: Config) -> Bootstrap | None:
    """Where hvd.init() meets, if these ranks have no launcher, but were told of a store by the program. Collective."""
    ranks = world.topology.ranks
    if len(ranks) == 1:
        return None
    name = f"hvdlite/runtime/{world.allgather(secrets.token_hex(4))[0]}"  # a store may outlive a group
    return RendezvousRanks(_place(store), name, ranks, world.topology.rank, config.start_timeout_s)


class _Where(NamedTuple):
    """What a rank says of itself in the store.

    Attributes:
        machine: ranks for which it differs share no memory.
        by_mpi: it was started by a launcher of MPI, or has started MPI.
        world_rank: in COMM_WORLD, if MPI runs.
    """

    machine: tuple[str, str, int]
    by_mpi: bool
    world_rank: int | None


def _meet(store: Any, name: str, rank: int, ranks: Sequence[int], timeout_s: float, config: Config) -> Bootstrap:
    """``ranks``, those of a group. By the store, which takes milliseconds; by MPI where they need that to meet."""
    size, own = len(ranks), ranks[rank]
    # A store may outlive a group, whose name another one gets then, which may be of another size.
    turn = f"{size}.{(store.add(f'hvdlite/members/{size}', 1) - 1) // size}"
    waits_in = f"the start of process group {name}"
    users = _place(store, ranks, GROUP_LIMIT)
    by_mpi = _was_started_by_mpi()

    def gather(key: str, told: _Where) -> list[_Where]:
        try:
            return read(users.gather(f"hvdlite/{turn}/{key}", ranks, own, plain.dumps(told), Patience(timeout_s)))
        except MissingError as error:
            raise MissingError(f"rank {own} has waited in {waits_in}, but {error}", error.missing) from None

    where = gather("where", _Where(machine(), by_mpi, mpi.world_rank()))
    if len({each.machine for each in where}) == 1 or not all(each.by_mpi for each in where):
        start_s = config.start_timeout_s
        return RendezvousRanks(_place(store, ranks), f"hvdlite/{turn}", ranks, own, start_s, waits_in=waits_in)
    world = mpi.world(config, launched.this_process())
    assert world is not None
    numbers = [each.world_rank for each in gather("MPI", _Where(machine(), by_mpi, world.rank))]
    return world.subset(_known(numbers))


def _known(numbers: Sequence[int | None]) -> list[int]:
    return [number for number in numbers if number is not None]


def _was_started_by_mpi() -> bool:
    process = launched.this_process()
    return mpi.was_imported() or (process is not None and process.launcher.meeting is Meeting.MPI)
