"""A world: one generation of ranks, from building to closing, and all that it owns."""

from __future__ import annotations

import itertools
import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hvdlite.agreement import Bootstrap
from hvdlite.collectives.select import build_backend, build_exchange, build_ring, spin_us
from hvdlite.config import Config, Tunable
from hvdlite.coordinator.burst import KnownBurst
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.coordinator import Coordinator
from hvdlite.coordinator.prepared import PreparedBurst
from hvdlite.coordinator.tree import Tree
from hvdlite.dtypes import DType
from hvdlite.early_operations import EarlyOperations
from hvdlite.engine import Engine
from hvdlite.errors import HorovodInternalError, ShutDownError
from hvdlite.executor import Executor
from hvdlite.links.leader_links import connect_leaders
from hvdlite.liveness.health import Health
from hvdlite.memory.base import Memory
from hvdlite.memory.host import HostMemory
from hvdlite.memory.layout import ALIGNMENT, align_up
from hvdlite.node import Node, discover
from hvdlite.processes import ProcessAddress
from hvdlite.recorder import Recorder
from hvdlite.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

    from hvdlite.device_engine import DeviceEngine

_LOG = logging.getLogger("hvdlite")
_LOOK_S = 0.2
_ENDS_SLOWLY = (
    "rank %d has waited for %g s in hvd.shutdown(), and goes on: its coordinator thread is in an operation that other "
    "ranks have not come to, or has not heard from them that it may end. What each rank is at, `py-spy dump --pid PID` "
    "shows"
)
LINKS_SHARE = 0.75
"""Of the time for a start, in which ranks find one another: who waits for all of it has less to say about the cause."""

T = TypeVar("T")

OnNotice = Callable[[dict[str, Any]], None]


class Companion(Protocol):
    """Streams of GPUs beside those of operations, which end with a world; called by its coordinator, but for `wake`."""

    @property
    def is_under_way(self) -> bool:
        """Whether they have something to do, as far as is known."""

    def watch(self) -> None:
        """See that they go on; raises what ends the world."""

    def wake(self) -> None:
        """End their waits for other ranks, as the world has failed; from any thread."""

    def close(self) -> None:
        """Let them come to an end."""


class Leavable(Protocol):
    """Where user threads of several ranks wait for one another, without the coordinator."""

    def leave(self) -> None:
        """Let nobody wait for this rank, now or later."""


class World:
    """The ranks of ``topology``, of which this process is one. Collective to build, and to close in order.

    It owns communicators, sockets, threads and memory of these ranks. What is half built when building fails is closed,
    and ``health`` hears of it, so that the other ranks do not wait.

    Args:
        ranks: those of ``topology`` in ascending order; None where it is this process alone.
        node: those of them on this machine.
        config: `tune` changes it; there is no other copy.
        health: of the job.
        on_notice: called on the coordinator thread with what concerns all ranks, before this world acts upon it.

    Attributes:
        subsets: of which this process is a member, by number.
        joins: how often all ranks have joined.
        has_ended: no operation will be done any more, as the world was closed or has failed.
        check: raises the reason once the job has failed.

    Nothing that it owns keeps it alive once it has ended: a process set's memory, and the descriptors behind it, go
    with whoever used them last, not when garbage is collected. After a failure that is also the error's traceback.
    """

    def __init__(
        self,
        ranks: Bootstrap | None,
        topology: Topology,
        node: Node,
        config: Config,
        recorder: Recorder,
        health: Health,
        on_notice: OnNotice = lambda content: None,
    ) -> None:
        self.topology = topology
        self.node = node
        self.config = config
        self.recorder = recorder
        self.health = health
        self.check = partial(health.check, node)
        self.subsets: dict[int, World] = {}
        self.joins = 0
        self.is_stuck = False
        self.has_ended = False
        self._ranks = ranks
        self._on_notice = on_notice
        self._numbers = itertools.count(1)  # of subsets
        # What subsets that are no more have counted, and those that are; replaced as a whole, as several threads look.
        self._counted: tuple[Counter[str], tuple[World, ...]] = (Counter(), ())
        self._companions: tuple[Companion, ...] = ()  # replaced as a whole, as several threads look
        self._meetings: weakref.WeakSet[Leavable] = weakref.WeakSet()
        self._own = ExitStack()  # what this rank closes for itself
        self._shared = ExitStack()  # what all ranks release together, on their coordinator threads
        self._own.callback(node.close)
        try:
            self._build(ranks, topology, node, config)
        except BaseException as error:
            health.report(error)
            self._own.close()
            raise
        health.add(self)

    def _build(self, ranks: Bootstrap | None, topology: Topology, node: Node, config: Config) -> None:
        node.check, node.timeout_s = self.check, config.start_timeout_s
        self.leaders = rail = None  # on leaders of several nodes, and on ranks that every node has
        comm = None if ranks is None else ranks.comm
        if ranks is not None:
            self._shared.callback(ranks.close)
        if len(topology.nodes) > 1:
            assert comm is not None
            self.leaders = self._part(comm, topology.is_leader, 0)
            rail = self._part(comm, topology.local_rank < topology.rails, topology.local_rank)
        links = {}
        if self.leaders is not None:
            deadline_s = time.monotonic() + config.start_timeout_s
            places = range(len(topology.nodes))
            interfaces = config.network_interfaces
            links = connect_leaders(self.leaders, places, topology, config.tree_fanout, interfaces, deadline_s)
        # From here on ranks wait for one another on their node only, where one that fails is noticed.
        page = ControlPage(node)
        tree = Tree(links, topology.parent(config.tree_fanout), topology.children(config.tree_fanout), self.check)
        self._own.callback(tree.abandon)
        self._shared.callback(tree.close)
        if links:
            bell = page.ring_for(links.values())  # which must go before the sockets
            self._own.callback(bell.close)
            self._shared.callback(bell.close)
        memory = HostMemory(node)
        cross = None
        if rail is not None:
            cross = build_ring(node, memory, rail, topology, config, self.check, self.recorder)
        self._backend = build_backend(node, memory, page.counts, cross, topology, config, self.check, self.recorder)
        self._shared.callback(self._backend.close)
        staging_bytes = align_up(max(config.staging_bytes, topology.size * ALIGNMENT))
        staging = memory.allocate(staging_bytes).buffer(0, staging_bytes, DType.UINT8)
        self.engine = Engine(
            self._backend,
            build_exchange(self._backend, comm, topology, config, self.check, self.recorder),
            staging,
            # On one node a chunk stays in cache on its way; across nodes it should fill the wire.
            config.staging_bytes if len(topology.nodes) > 1 else config.chunk_bytes,
            topology,
            self.recorder,
            weakref.proxy(self),
        )
        self.early = None if self.engine.early is None else EarlyOperations(self.engine)
        self._cross = cross
        own = weakref.proxy(self)
        self.executor = Executor(
            self.engine, lambda ordinal: own._build_device_engine(ordinal), config.collective_timeout_s, self.check
        )
        self._shared.callback(self._close_device)
        self.execute, self.execute_burst = self.executor.execute, self.executor.execute_burst
        self.coordinator = Coordinator(self, topology, page, tree, spin_us=spin_us(config, node))

    def _build_device_engine(self, ordinal: int | None) -> DeviceEngine | None:
        from hvdlite import device_engine

        return device_engine.build(ordinal, self.engine, self.node, self._cross, self.topology, self.config, self.check)

    def device_engine(self, ordinal: int) -> DeviceEngine | None:
        """The engine for GPUs, for who is at work here; see `Executor.device_for`.

        Args:
            ordinal: of this rank's GPU.
        """
        return self.executor.device_for(ordinal)

    @property
    def is_under_way(self) -> bool:
        return self.executor.is_under_way or any(companion.is_under_way for companion in self._companions)

    def watch(self) -> None:
        self.executor.watch()
        for companion in self._companions:
            companion.watch()

    def accompany(self, companion: Companion) -> None:
        """From here on the world looks after ``companion``; from a user thread."""
        self._companions = (*self._companions, companion)
        self.check()

    def expect_at(self, meeting: Leavable) -> None:
        """From here on ``meeting`` hears when this rank ends the world in order; from a user thread."""
        self._meetings.add(meeting)

    def hear_of_end(self) -> None:
        """Raises why another rank, which has left, ends the world; returns if this one does not hear of that."""
        self.coordinator.join(self.config.failure_grace_s)
        self.coordinator.check_open()

    def _close_device(self) -> None:
        device = self.executor.device
        for part in (*self._companions, *(() if device is None else (device,))):
            try:
                part.close()
            except HorovodInternalError:
                raise
            except RuntimeError as error:
                rank = self.topology.rank
                _LOG.error("rank %d: its GPU has failed, and hvdlite leaves behind what it has there: %s", rank, error)

    @property
    def device_memory(self) -> Memory | None:
        """That of GPUs, once these ranks share some."""
        return None if self.executor.device is None else self.executor.device.memory

    def _part(self, comm: MPI.Comm, included: bool, color: int) -> MPI.Comm | None:
        """The ranks of one color, in the order of nodes; None for those not included. Collective over ``comm``."""
        from mpi4py import MPI

        part = comm.Split(color if included else MPI.UNDEFINED, self.topology.node_index)
        if not included:
            return None
        self._shared.callback(part.Free)
        return part

    def allgather(self, value: T) -> list[T]:
        """Every rank's ``value``, by place in `topology`. Before `start` only."""
        return [value] if self._ranks is None else self._ranks.allgather(value)

    def start(self) -> None:
        """Let the coordinator work."""
        self.coordinator.start()

    # Life and death.

    def subset(self, ranks: Sequence[int]) -> World:
        """The world of some of these ranks, called by them only, by who is at work here; it lives no longer than this.

        Args:
            ranks: ascending.
        """
        members = None if self._ranks is None or len(ranks) == 1 else self._ranks.subset(ranks)
        nodes, node = discover(members, LINKS_SHARE * self.config.start_timeout_s, ranks)
        return World(members, Topology(self.topology.rank, nodes), node, self.config, self.recorder, self.health)

    def survivors(self) -> tuple[int, ...]:
        """The ranks that have not failed, as far as this one knows."""
        return tuple(rank for rank in self.topology.ranks if rank != self.health.failed_rank)

    @property
    def has_failed(self) -> bool:
        """Also where another rank of the node knows it before this one."""
        return self.health.failure is not None or self.node.aborted

    @property
    def failure(self) -> HorovodInternalError | None:
        """Why it `has_failed`, if it has."""
        return self.health.reason(self.node)

    def fail(self, reason: HorovodInternalError) -> None:
        """End every wait, and every operation now and later, with ``reason``; called on any thread."""
        self.node.abort()
        self._backend.wake()
        if self.executor.device is not None:
            self.executor.device.wake()
        for companion in self._companions:
            companion.wake()
        self.coordinator.close(reason)
        self.coordinator.wake()

    def refuse_handler(self) -> None:
        """Raises RuntimeError in a signal handler that has interrupted work here, or in a subset, which ends first."""
        for world in (self, *self.subsets.values()):
            world.coordinator.refuse_handler()

    def close(self, text: str, own_text: str, *, is_final: bool, leaver: ProcessAddress | None) -> None:
        """End on all ranks, in order unless the job has failed: what is in flight fails with `ShutDownError`.

        Args:
            text: why, for the other ranks; ``own_text``: for this one.
            is_final: this rank comes to no other start.
            leaver: this process, if it ends.
        """
        if self.health.failure is None:
            meetings = [meeting for world in (self, *self.subsets.values()) for meeting in world._meetings]
            self._announce_end(text, own_text, is_final=is_final, leaver=leaver)
            for meeting in meetings:
                meeting.leave()
        says_at_s = time.monotonic() + self.config.stall_report_s
        while not self.coordinator.join(_LOOK_S):
            if self.health.failure is not None and not self.coordinator.join(self.config.failure_grace_s):
                _LOG.error("rank %d: the coordinator thread is stuck and is left behind", self.topology.rank)
                self.is_stuck = True
                break
            if time.monotonic() > says_at_s:
                says_at_s = math.inf
                _LOG.warning(_ENDS_SLOWLY, self.topology.rank, self.config.stall_report_s)
        has_ended_in_order = self.health.failure is None
        if has_ended_in_order:
            self.coordinator.refuse(ShutDownError(own_text))  # whoever was the first to end the world
        self.release()
        if not self.is_stuck:
            self._retire()

    def _retire(self) -> None:
        """Refer to nothing that refers to this, once all threads have ended; see the class."""
        for subset in self.subsets.values():
            if subset.coordinator.join(self.config.failure_grace_s):
                subset._retire()
        self._shared.pop_all()  # after a failure nobody releases it
        self.coordinator.retire()

    def end(self) -> None:
        """End on this rank alone, of a world that was never started: whoever calls its backend has stopped doing so."""
        if self.health.failure is None:
            self.has_ended = True
            with suppress(HorovodInternalError):  # another rank has failed meanwhile
                self._shared.close()
            self.coordinator.retire()
        self.release()

    def release(self) -> None:
        """Close what this rank can close for itself: all that is left after a failure."""
        self.has_ended = True
        for subset in self.subsets.values():
            subset.release()
        self._own.close()

    def abandon(self, reason: HorovodInternalError) -> None:
        """In a forked child: close what it has inherited, and refuse what only the parent may do."""
        for world in (self, *self.subsets.values()):
            world.coordinator.refuse(reason)
        self.release()

    def _announce_end(
        self, text: str, own_text: str, *, is_final: bool = False, leaver: ProcessAddress | None = None
    ) -> None:
        said = {"rank": self.topology.rank, "text": text, "own_text": own_text, "is_final": is_final, "leaver": leaver}
        with suppress(HorovodInternalError):  # another rank was the first, or the job has failed meanwhile
            self.coordinator.announce({"kind": "shutdown", **said})

    # For the coordinator, in the order of its log.

    def gather_from_leaders(self, data: bytes) -> list[bytes] | None:
        """``data`` of every node's leader, on the root; None on others. Collective over leaders of several nodes."""
        from hvdlite.collectives.requests import Endpoint

        assert self.leaders is not None
        endpoint = Endpoint(
            self.leaders, ranks=self.topology.leaders, timeout_s=self.config.collective_timeout_s, check=self.check
        )
        return endpoint.gather(data)

    def take_notice(self, content: dict[str, Any]) -> None:
        self._on_notice(content)
        if content["kind"] == "shutdown":
            self.has_ended = True
            for number in list(self.subsets):
                self._end_subset(number, content["text"])
            self._shared.close()

    def prepare_burst(self, known: KnownBurst) -> PreparedBurst | None:
        operation: Any = known.requests[0]
        counts, patience_s = self.coordinator.counts, self.config.caller_patience_s
        prepared: PreparedBurst | None = operation.prepare_small_burst(self.engine, known.requests, counts, patience_s)
        return prepared

    def withdraw(self) -> None:
        self._backend.withdraw()

    def coordinator_died(self, error: BaseException) -> None:
        self.has_ended = True
        self.health.report(error)

    # For operations.

    def tune(self, settings: Tunable) -> None:
        self.config = settings.within(self.config)
        self._backend.configure(self.config)
        if self.executor.device is not None:
            self.executor.device.configure(self.config)
        self.coordinator.forget_prepared()

    def all_have_joined(self) -> None:
        self.joins += 1

    def add_process_set(self, ranks: tuple[int, ...]) -> tuple[int, World | None]:
        """A new subset: its number, and, on its members, its world."""
        number = next(self._numbers)
        if self.topology.rank not in ranks:
            return number, None
        subset = self.subsets[number] = self.subset(ranks)
        self._counted = (self._counted[0], tuple(self.subsets.values()))
        subset.start()
        return number, subset

    def remove_process_set(self, number: int) -> None:
        if number in self.subsets:
            was = f"the process set of ranks {list(self.subsets[number].topology.ranks)} was removed"
            self._end_subset(number, f"{was}, so this operation cannot complete")

    def _end_subset(self, number: int, text: str) -> None:
        """Every member does; its coordinator stops once it has read in its log that one of them has said so."""
        subset = self.subsets[number]
        subset._announce_end(text, text)
        while not subset.coordinator.join(_LOOK_S):
            self.check()
        ended = Counter(self._counted[0])
        ended.update(subset.own_statistics())
        del self.subsets[number]
        self._counted = (ended, tuple(self.subsets.values()))
        self.health.remove(subset)
        subset.release()
        subset.coordinator.retire()

    # Facts.

    def statistics(self) -> dict[str, int]:
        """What this rank has done so far, in this world and its subsets; see `hvdlite.statistics`."""
        ended, subsets = self._counted
        total = Counter(self.own_statistics())
        for counts in (ended, *(subset.own_statistics() for subset in subsets)):
            total.update(counts)
        return dict(total)

    def own_statistics(self) -> dict[str, int]:
        """Without the subsets."""
        return {
            **self.coordinator.statistics(),
            **asdict(self.engine.executed),
            **self._backend.traffic.named("ring"),
            **self.engine.exchange.traffic.named("alltoall"),
        }
