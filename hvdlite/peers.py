"""Who takes part: the ranks that hvd.init() means, met through whoever has started this process."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from hvdlite import _native, environment, launched, mpi
from hvdlite.agreement import Bootstrap
from hvdlite.config import KEEPER, MEETING_POINT, NOTICES, START, WORKER, Config, other_variable, told_number
from hvdlite.errors import ConfigError, HorovodVersionMismatchError, StartupError
from hvdlite.launched import Launched, Meeting
from hvdlite.links import connections
from hvdlite.liveness import notice
from hvdlite.liveness.notice import Notice
from hvdlite.recovery.membership import Membership
from hvdlite.recovery.roster import Generation
from hvdlite.recovery.safekeeping import Safekeeping
from hvdlite.recovery.survivors import Survivors
from hvdlite.start.meeting_point import AtMeetingPoint
from hvdlite.start.rendezvous import Place, RendezvousRanks, Wait
from hvdlite.start.start_watch import ends_with_others
from hvdlite.thread_shortage import thread_shortage_told

if TYPE_CHECKING:
    from mpi4py import MPI

_MEETING_SHARE = 0.8  # of the time for the start: init() as a whole ends with less to say about the cause


class Peers:
    """The processes that were started together. One object for the life of a process, since it numbers its meetings.

    Attributes:
        membership: of this process in an elastic job, without MPI or where MPI survives deaths; None in others.
        keeper: of this process's host, in an elastic job by mpirun; None in others.
    """

    def __init__(self) -> None:
        self._without_mpi: dict[str, RendezvousRanks] = {}  # by name; they number their meetings
        self.told: Bootstrap | None = None
        """What the program has told torch.distributed, which no launcher knows."""
        self.store_key = b""
        """By which they know what one of them has written into torch's store, where they had another place to meet."""
        worker = told_number(WORKER)
        where = other_variable(KEEPER)
        self.keeper = Safekeeping(where) if where else None
        self._has_started = False
        self.membership: Membership | Survivors | None = None
        if worker is not None:
            self.membership = Membership(other_variable(MEETING_POINT), worker)
        elif self.keeper is not None and mpi.outlives_ranks():
            self.membership = Survivors(self.keeper.claim)

    @property
    def survivors(self) -> Survivors | None:
        """`membership` where MPI survives deaths; None in other jobs."""
        return self.membership if isinstance(self.membership, Survivors) else None

    @property
    def start(self) -> int:
        """How many times hvdliterun has started such processes for this job; 1 where it does not say."""
        return told_number(START) or 1

    @property
    def generation(self) -> int:
        """How many times those of this start have become ranks together; 1 where nobody counts."""
        generation = None if self.membership is None else self.membership.generation
        return 1 if generation is None else generation.number

    @contextmanager
    def announced(self, comm: MPI.Intracomm | Sequence[int] | None) -> Iterator[None]:
        """The first start of a job by mpirun, hvd.init(``comm``) or init_process_group().

        hvdliterun looks after who waits, and for whom.
        """
        process = launched.this_process()
        others_may_end = self.keeper is None and comm is not None  # those that are not in it
        if process is None or self._has_started or others_may_end:
            yield
            return
        if self.keeper is None:
            mark = other_variable(NOTICES)
            is_watched = notice.say(Notice.STARTING) or not mark
            with nullcontext() if is_watched else ends_with_others({NOTICES: mark}):
                yield
            notice.say(Notice.STARTED)
        else:
            with self._announced_by(self.keeper, process.rank):
                yield
        self._has_started = True

    @contextmanager
    def _announced_by(self, keeper: Safekeeping, rank: int) -> Iterator[None]:
        start = self.start
        with suppress(OSError):  # the keeper is gone, or stopped
            keeper.say_starting(start, rank)
        try:
            yield
        except HorovodVersionMismatchError:
            with suppress(OSError):
                keeper.say_unlike(start, rank)
            raise
        with suppress(OSError):
            keeper.say_started(start, rank)

    def say_failed(self) -> None:
        """In an elastic job by mpirun: these ranks end after a failure, unless the others go on without this one."""
        member = self.survivors
        if self.keeper is None or (member is not None and member.is_left_out):
            return
        with suppress(OSError):  # the keeper has ended with hvdliterun
            self.keeper.say_failed(self.generation)

    def say_ended(self) -> None:
        """This rank has come to its end, after it went on without others: they do not wait for one another there."""
        member = self.survivors
        if self.keeper is not None and member is not None and member.generation is not None:
            with suppress(OSError):  # the keeper has ended with hvdliterun
                self.keeper.say_ended(member.generation.number)

    def meet_anew(self, failed: int | None, *, follows_rank_0: bool) -> Generation | None:
        """In an elastic job, become a rank of its next generation, which waits for all that live; see `Membership`.

        Returns that; None in other jobs.

        Raises:
            StartupError: there is none; says why.
        """
        membership = self.membership
        if membership is None:
            return None
        generation = membership.join(failed, follows_rank_0=follows_rank_0)
        if isinstance(membership, Membership):
            environment.add(launched.told(membership.rank, len(generation.workers)))
        return generation

    @contextmanager
    def of(
        self, comm: MPI.Intracomm | Sequence[int] | None, config: Config, wait: Wait | None = None
    ) -> Iterator[Bootstrap | None]:
        """The ranks that hvd.init(``comm``) means, while a runtime is built over them; None: this process alone.

        Args:
            wait: where they meet without MPI; None: as hvd.init() does. Others than those of that one meet apart.

        Raises:
            StartupError: see `_all`; ``comm`` has been freed.
            ConfigError: ``comm`` lists ranks that are not there.
        """
        everybody = self._all(config, wait or Wait(_MEETING_SHARE * config.start_timeout_s))
        if comm is None:
            yield everybody
        elif isinstance(self.membership, Membership):
            raise ConfigError("hvd.init(comm=...) names ranks, which change in an elastic job: call hvd.init()")
        elif not isinstance(comm, Sequence):
            if not comm:
                raise StartupError(
                    "the communicator that hvd.init(comm=...) was given has been freed. Keep it for as long as hvdlite "
                    "may be started again, or give a list of ranks of COMM_WORLD."
                )
            yield mpi.MpiRanks(comm)
        elif everybody is not None:
            part = everybody.subset(comm)
            yield part
            part.close()  # the runtime has its own; after a failure other ranks may not come here
        elif list(comm) == [0]:
            yield None
        else:
            raise ConfigError(
                f"hvd.init(comm={list(comm)}), but this process was started alone; start it with hvdliterun"
            )

    def _all(self, config: Config, wait: Wait) -> Bootstrap | None:
        """Those that the launcher has started, MPI initialized where they meet by it; None: this process alone.

        Raises:
            StartupError: the launcher has started this process as one of several, which do not find one another; it has
                given it numbers that cannot be; it has started not this process but its parent; see also
                `hvdlite.mpi.world`.
        """
        process = launched.this_process()
        by_mpi = _meet_by_mpi(process)
        if not by_mpi and process is not None and self.membership is None:
            process.check_number(environment.variables())
        if not by_mpi and (process is None or (process.size == 1 and self.membership is None)):
            return self.told
        if _is_worker(process):  # it has its parent's environment, and would wait for what the parent has got already
            raise StartupError(
                f"hvd.init() was called in a child process of rank {launched.launched_rank()} (a DataLoader worker, "
                "for example), which is not a rank. Workers that are spawned begin by importing your script: call "
                'hvd.init() below `if __name__ == "__main__":`.'
            )
        if by_mpi:
            everybody = mpi.world(config, process)
            if everybody is None or self.survivors is None:
                return everybody
            return self.survivors.ranks(everybody, config)
        assert process is not None
        ranks: Sequence[int]
        if isinstance(self.membership, Membership):
            generation = self.membership.generation
            assert generation is not None
            name, ranks, rank = f"generation {generation.number}", generation.workers, self.membership.worker
        else:
            process.check_not_alone(1 if process.launcher.meeting is Meeting.NOWHERE else process.size)
            name, ranks, rank = "", range(process.size), process.rank
        name = f"{wait.where} {name}"
        found = self._without_mpi.get(name)
        if found is None:
            place = _place(process, wait)
            found = RendezvousRanks(place, name, ranks, rank, wait.timeout_s, waits_in=wait.where)
            self._without_mpi[name] = found
        found.timeout_s = wait.timeout_s
        return found


def _meet_by_mpi(process: Launched | None) -> bool:
    return mpi.was_imported() or (process is not None and process.launcher.meeting is Meeting.MPI)


def _place(process: Launched, wait: Wait) -> Place:
    if process.launcher.meeting is Meeting.POINT:
        return AtMeetingPoint(other_variable(MEETING_POINT), process.launcher.name, wait.limit)
    from hvdlite.start.torch_store import InStore

    return InStore(process, environment.variables(), wait.timeout_s)


def _is_worker(process: Launched | None) -> bool:
    """Whether multiprocessing has started this process for a rank; a spawned one first imports its parent's script.

    Not so one that its own program has made a rank, as functions for torch.multiprocessing.spawn do: these set RANK and
    the like themselves.
    """
    imports_main = getattr(multiprocessing.current_process(), "_inheriting", False)
    is_started_by_python = imports_main or multiprocessing.parent_process() is not None
    return is_started_by_python and process == launched.find(environment.at_start())


def start_deadline(config: Config) -> _native.Deadline:
    """Ends the process with an explanation unless init() is through in time, even where MPI blocks inside C."""
    by_mpi = _meet_by_mpi(launched.this_process())
    chosen = config.network_interfaces or "none: MPI chose for itself"
    network = (
        ", or MPI waits on a network interface that does not connect the hosts.\n"
        f"hvdlite: interfaces chosen: {chosen}. Set HVDLITE_NETWORK_INTERFACES to one that connects all hosts (for "
        "example eth0 or ib0); `ip -br address` lists them"
    )
    with thread_shortage_told():
        return _native.Deadline(
            config.start_timeout_s,
            f"\nhvdlite: init() was not through after {config.start_timeout_s:g} s. A rank did not start"
            f"{network if by_mpi else ''}.\n"
            "hvdlite: if the start is only slow, raise HVDLITE_START_TIMEOUT (seconds).\n",
            1,
            [sys.executable, "-I", "-S", connections.__file__, str(os.getpid())] if by_mpi and sys.executable else [],
        )
