"""Runtime: hvdlite at work on the ranks of a job: their world, its process sets, and the timeline."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType

from hvdlite import mpi
from hvdlite.agreement import Bootstrap
from hvdlite.autotune.log import load_choice
from hvdlite.bootstrap import start_world
from hvdlite.config import Config
from hvdlite.errors import ConfigError, HorovodInternalError, ShutDownError
from hvdlite.group import Group
from hvdlite.job_timeline import JobTimeline
from hvdlite.links.link_watch import LinkRates, Turns, watch
from hvdlite.metrics import prometheus_text, serve
from hvdlite.operations.process_sets import add_process_set_async, remove_process_set_async
from hvdlite.process_worlds import ProcessWorlds
from hvdlite.processes import ProcessAddress

_UNEVEN = (
    "If that rank was only done with its data, give every rank as many batches as the others "
    "(torch.utils.data.DistributedSampler does), or call hvd.join() on every rank after its last one"
)
_SAID_S = 0.5  # how long the log may take


class Runtime:
    """A running hvdlite on some ranks. Collective to build and, in effect, to close.

    Args:
        ranks: who takes part, of which a subset of all is made; None for this process alone.
        config: what rank 0 has, every rank gets, since all must plan alike.
        versions: of packages that must be the same on every rank, by name.
        worlds: in which this process is beside this one.
        earlier: what this rank has counted before hvdlite was started again.
        recovers: see `hvdlite.liveness.health.Health`.

    Attributes:
        group: of all ranks.
        groups: of which this process is a member, by number; 0: of all ranks.
        choice: what autotuning has found at an earlier start.
        is_left: this process has given the job up, so the others need not wait for it at another start.

    Raises:
        StartupError: names what is wrong and the way out, the same on every rank where it concerns all.
    """

    def __init__(
        self,
        ranks: Bootstrap | None,
        config: Config,
        *,
        versions: Mapping[str, str] | None = None,
        worlds: ProcessWorlds | None = None,
        earlier: Mapping[str, int] | None = None,
        recovers: bool = False,
    ) -> None:
        self._worlds = worlds or ProcessWorlds()
        self._earlier = earlier or {}
        own = weakref.proxy(self)  # the world, which has it, goes once it has ended, and does not wait for garbage
        start = start_world(
            ranks,
            config,
            self._worlds.recorder(config.timeline_events),
            versions=versions or {},
            news=partial(load_choice, config),
            on_notice=lambda content: own._timeline.take_notice(content),
            recovers=recovers,
        )
        self.world, self.choice = start.world, start.news
        self.closed = self.is_left = False
        self._world_ranks = start.world_ranks
        self.topology, self.recorder = self.world.topology, self.world.recorder
        self.rank, self.size = self.topology.rank, self.topology.size
        self.group = Group(self.world)
        self.groups = {0: self.group}
        self._members = {0: self.topology.ranks}  # of every group, whether this process is one or not
        try:
            self._timeline = JobTimeline(self.world, self._worlds)
            self.world.start()  # for which there may be no thread
        except BaseException as error:
            self.world.health.report(error)
            self.world.release()
            self.world.health.close()
            raise
        self.world.health.add(self._timeline)
        self._worlds.add(self.world.health, start.processes, self.topology.ranks)
        self._links = None
        if start.hosts and self.config.link_check_s:
            rates, turns = LinkRates(self.rank, start.hosts), Turns(start.processes[self.topology.local_ranks[0]])
            self._links = watch(rates, turns, self.config.link_check_s, lambda: self.failure is not None)
        self._metrics = serve(
            self.config.metrics_port,
            self.topology.local_rank,
            lambda: prometheus_text(self.statistics(), self.rank, self.size),
        )

    # Who we are.

    @property
    def config(self) -> Config:
        return self.world.config

    def statistics(self) -> dict[str, int]:
        """What this rank has done so far, in all its groups, removed ones too; see `hvdlite.statistics`."""
        total = Counter(self.counted())
        total.update(self._worlds.statistics())
        return dict(total)

    def counted(self) -> dict[str, int]:
        """Without what it has done in other worlds, which outlive this runtime."""
        total = Counter(self.world.statistics())
        total.update(self._earlier)
        return dict(total)

    # Process sets. All ranks of the job call these in the same order with the same arguments.

    def add_group(self, ranks: Sequence[int]) -> tuple[int, Group | None]:
        """A new group of ``ranks``: its number, and the group itself on its members.

        Raises:
            ValueError: ``ranks`` are no ranks of this job.
            MismatchError: other ranks named others.
            ConfigError: MPI serves one thread only.
        """
        members = tuple(sorted(ranks))
        if not members or len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members):
            raise ValueError(f"a process set of ranks {list(ranks)}: name each once, out of 0 to {self.size - 1}")
        known = self.group_number(members)
        if known is not None:
            raise ValueError(f"ranks {list(members)} are process set {known} already")
        if len(members) > 1 and mpi.is_running() and not mpi.allows_threads():
            raise ConfigError(
                "each process set communicates from a thread of its own, and MPI runs below MPI_THREAD_MULTIPLE, which "
                "HVDLITE_MPI_THREADS_DISABLE has accepted: call hvd.init() before anything else starts MPI, or go "
                "without process sets"
            )
        number, world = add_process_set_async(self.group, members).wait()
        self._members[number] = members
        if world is not None:
            self.groups[number] = Group(world)
        return number, self.groups.get(number)

    def group_number(self, ranks: Sequence[int]) -> int | None:
        """Of the group of ``ranks``; None where there is none."""
        return next((number for number, others in self._members.items() if others == tuple(ranks)), None)

    def process_sets(self) -> dict[int, list[int]]:
        """The ranks of every group, by number; 0 has all."""
        return {number: list(ranks) for number, ranks in self._members.items()}

    def remove_group(self, number: int) -> None:
        """End group ``number``; what is in flight there fails with `ShutDownError`."""
        remove_process_set_async(self.group, number, self._members[number]).wait()
        del self._members[number]
        self.groups.pop(number, None)

    def ranks_of(self, world_ranks: Sequence[int]) -> tuple[int, ...]:
        """What this job calls processes, of their ranks in COMM_WORLD.

        Raises:
            ValueError: one is not of this job.
        """
        number = {world_rank: rank for rank, world_rank in enumerate(self._world_ranks)}
        if not number.keys() >= set(world_ranks):
            raise ValueError("the communicator has processes that did not call hvd.init()")
        return tuple(number[world_rank] for world_rank in world_ranks)

    # The timeline.

    def start_timeline(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Record a timeline of all ranks into ``path``, on rank 0's machine.

        Rank 0's call counts, and starts it everywhere before any operation that rank 0 submits later; on other ranks,
        whose paths may be others, a call does nothing.

        Raises:
            TypeError, ValueError: ``path`` is no path, or no file can be called so.
            HorovodInternalError: hvdlite was shut down, or has failed.
        """
        self._timeline.start(path, mark_cycles)

    def stop_timeline(self) -> None:
        """Stop recording on all ranks and complete the file; on ranks other than 0 a call does nothing.

        Once hvdlite was shut down, on whichever rank, the file is complete already, and a call does nothing.

        Raises:
            HorovodInternalError: the job has failed.
        """
        self._timeline.stop()

    # The end, in order and otherwise.

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def close(self, why: str = "it called shutdown()", *, is_final: bool = False) -> None:
        """Stop on all ranks: what is in flight, there and here, fails with `ShutDownError`. May be called again.

        Args:
            is_final: this process ends; until `end_watch` it still learns of failures, and others see that it lives.

        Raises:
            RuntimeError: by a signal handler that has interrupted a wait, which the end would have to wait for.
        """
        if self.closed:
            return
        self.world.refuse_handler()
        self.closed = True
        if self._metrics is not None:
            self._metrics.close()
        if self._links is not None:
            self._links.close()
        self.world.health.expect_end()
        self.world.close(
            f"rank {self.rank} has shut down hvdlite ({why}), so this operation cannot complete. {_UNEVEN}",
            "hvdlite has been shut down in this process; call hvd.init() again before other operations",
            is_final=is_final or self.is_left,
            leaver=ProcessAddress.own() if is_final else None,
        )
        self._timeline.close()
        if not is_final:
            self.end_watch()

    def end_watch(self) -> None:
        """After `close`: this rank is not missed any more."""
        self._worlds.remove(self.world.health)
        self.world.health.close()

    @property
    def can_end_in_order(self) -> bool:
        """Whether all ranks live and this one's threads have ended: nothing went wrong but perhaps a stall."""
        return not self.world.is_stuck and self.world.health.all_live

    @property
    def failure(self) -> HorovodInternalError | None:
        """Why the job failed, if it did."""
        return self.world.health.failure

    def wait_for_failure(self, patience_s: float) -> HorovodInternalError | None:
        """`failure`, once there is one; None where there is none after ``patience_s``."""
        return self.world.health.wait_for_failure(patience_s)

    @property
    def failure_was_logged(self) -> bool:
        """Whether the log has said why the job failed; waits a moment for it to do so."""
        self.world.health.wait_until_said(_SAID_S)
        return self.world.health.was_logged

    def fail(self, error: BaseException) -> None:
        """Tell every rank that this one failed."""
        self.world.health.report(error)

    def allow_time(self) -> None:
        """This rank sees to its own end, however long after the failure."""
        self.world.health.allow_time()

    def check(self) -> None:
        """Raise the reason once the job has failed."""
        self.world.check()

    def abandon_in_child(self) -> None:
        """Called in a forked child: let go of what only the parent may use."""
        self.closed = True
        if self._metrics is not None:
            self._metrics.abandon()
        reason = "this process was forked from one that runs hvdlite, and cannot take part; communicate in the parent"
        self.world.abandon(ShutDownError(reason))
        self.world.health.release()
