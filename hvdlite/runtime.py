"""Runtime: builds and owns everything: the group of all ranks, those of process sets, and what watches over them."""

from __future__ import annotations

import itertools
import logging
import os
import platform
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hvdlite import _native, mpi
from hvdlite.autotune.log import Choice, read_choice
from hvdlite.clock_sync import measure_offset
from hvdlite.config import Config
from hvdlite.coordinator.messages import Kind, Request
from hvdlite.errors import (
    CollectiveError,
    ConfigError,
    HorovodInternalError,
    HorovodVersionMismatchError,
    RankFailedError,
    ShutDownError,
    StallError,
)
from hvdlite.group import Group
from hvdlite.interfaces import select
from hvdlite.leader_links import Door, Listener, connect_tree, new_token
from hvdlite.node import discover
from hvdlite.sentinel import Sentinel
from hvdlite.timeline.recorder import Recorder
from hvdlite.timeline.timeline import Timeline
from hvdlite.topology import Topology
from hvdlite.version import __version__

if TYPE_CHECKING:
    from mpi4py import MPI

_LOG = logging.getLogger("hvdlite")
_STALL = -1  # what the sentinel calls the rank that failed where none did: the ranks wait for one another
_LINKS_SHARE = 0.75  # of the time for the start: init() as a whole ends with less to say about the cause
_LOOK_S = 0.2
_REASON_S = 2.0  # how long a rank that finds its node aborted waits to hear why


@dataclass(frozen=True)
class _Card:
    """What every rank tells every other at the start."""

    versions: dict[str, str]
    config: Config
    token: bytes
    hostname: str
    pid: int
    addresses: list[tuple[str, int]]
    choice: Choice | None
    refusal: str  # why its settings make no sense; empty where they do

    @property
    def where(self) -> str:
        return f"pid {self.pid} on {self.hostname}"


class Runtime:
    """A running hvdlite on the ranks of one communicator. Collective to build and, in effect, to close.

    Args:
        comm: any mpi4py intracommunicator, which is duplicated; None for this process alone, without MPI.
        config: what rank 0 has, every rank gets, since all must plan alike.
        versions: of packages that must be the same on every rank, by name.

    Raises:
        StartupError: names what is wrong and the way out, the same on every rank where it concerns all.
    """

    def __init__(self, comm: MPI.Comm | None, config: Config, *, versions: Mapping[str, str] | None = None) -> None:
        links_deadline_s = time.monotonic() + _LINKS_SHARE * config.start_timeout_s
        self.recorder = Recorder(config.timeline_events)
        self._failure: HorovodInternalError | None = None
        self._failure_known = threading.Event()
        self._last_words: _native.Deadline | None = None
        self._closed = False
        self._is_stuck = False
        self.groups: dict[int, Group] = {}  # of which this process is a member, by number; 0: of all ranks
        self._group_numbers = itertools.count(1)
        self._members: dict[int, tuple[int, ...]] = {}  # the ranks of every group, whether this one is a member or not
        self._timeline_switched = threading.Event()
        self._ended: dict[int, dict[str, int]] = {}  # the statistics of groups that were removed

        own = None if comm is None or comm.size == 1 else mpi.private_communicator(comm, config)
        self._comm: Any = own
        rank = 0 if own is None else own.rank
        with closing(Listener()) as listener:
            cards = _exchange_cards(own, config, versions or {}, listener)
            self.config = cards[0].config
            self.choice = cards[0].choice  # what autotuning has found at an earlier start
            nodes, self._node = discover(own, config.start_timeout_s)
            mpi.unlink_shared_files()  # every local rank has mapped them by now
            self.topology = Topology(rank, nodes)
            self._members[0] = self.topology.ranks
            links = _leader_links(self.topology, self.config, cards, listener, links_deadline_s)
        links += [
            (self._node.ranks[local_rank], cards[self._node.ranks[local_rank]].where, link)
            for local_rank, link in self._node.watch_links.items()
        ]
        self._sentinel = Sentinel(rank, links, self._learn_of_failure, self.config.heartbeat_timeout_s)
        self.group = self.groups[0] = Group(
            own,
            self.topology,
            self._node,
            self.config,
            self.recorder,
            check=self.check,
            check_open=self._raise_if_closed,
            on_fatal=self._coordinator_died,
            on_notice=self._take_notice,
            administer=self._administer,
        )
        offset_ns = measure_offset(self.group.leaders, self.topology, self.config.tree_fanout)
        clocks = [(offset_ns, time.monotonic_ns())]
        if own is not None:
            clocks = own.allgather(clocks[0])
        self._clock_offset_ns = clocks[self.topology.local_ranks[0]][0]
        self._timeline = Timeline(
            rank, self.topology.node_index, self.topology.is_leader, self.recorder, self._clock_offset_ns
        )
        if self.config.timeline:
            self._timeline.start(self.config.timeline, self.config.timeline_mark_cycles, clocks[0][1])
        self.group.coordinator.start()

    # Who we are.

    @property
    def rank(self) -> int:
        return self.topology.rank

    @property
    def size(self) -> int:
        return self.topology.size

    @property
    def local_rank(self) -> int:
        return self.topology.local_rank

    @property
    def local_size(self) -> int:
        return self.topology.local_size

    @property
    def cross_rank(self) -> int:
        return self.topology.cross_rank

    @property
    def cross_size(self) -> int:
        return self.topology.cross_size

    @property
    def is_homogeneous(self) -> bool:
        return self.topology.is_homogeneous

    # Process sets. All ranks of the job call these in the same order with the same arguments.

    def add_group(self, ranks: Sequence[int]) -> tuple[int, Group | None]:
        """A new group of ``ranks``: its number, and the group itself on its members.

        Raises:
            ValueError: ``ranks`` are no ranks of this job.
            MismatchError: other ranks named others.
        """
        members = tuple(sorted(ranks))
        if not members or len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members):
            raise ValueError(f"a process set of ranks {list(ranks)}: name each once, out of 0 to {self.size - 1}")
        known = self.group_number(members)
        if known is not None:
            raise ValueError(f"ranks {list(members)} are process set {known} already")
        number, group = self.group.add_process_set_async(members).wait()
        self._members[number] = members
        return number, group

    def group_number(self, ranks: Sequence[int]) -> int | None:
        """Of the group of ``ranks``; None where there is none."""
        return next((number for number, others in self._members.items() if others == tuple(ranks)), None)

    def process_sets(self) -> dict[int, list[int]]:
        """The ranks of every group, by number; 0 has all."""
        return {number: list(ranks) for number, ranks in self._members.items()}

    def remove_group(self, number: int) -> None:
        """End group ``number``; what is in flight there fails with `ShutDownError`."""
        self.group.remove_process_set_async(number, self._members.pop(number)).wait()

    def ranks_of(self, comm: MPI.Comm) -> tuple[int, ...]:
        """What this job calls the ranks of ``comm``.

        Raises:
            ValueError: it has processes that are not of this job.
        """
        if self._comm is None:
            return (0,)
        from mpi4py import MPI

        ranks = MPI.Group.Translate_ranks(comm.Get_group(), None, self._comm.Get_group())
        if MPI.UNDEFINED in ranks:
            raise ValueError("the communicator has processes that did not call hvd.init()")
        return tuple(ranks)

    def statistics(self) -> dict[str, int]:
        """What this rank has done so far, in all its groups, removed ones too; see `hvdlite.statistics`."""
        by_group = {number: group.statistics() for number, group in [*self.groups.items()]} | self._ended
        total: Counter[str] = Counter()
        for counts in by_group.values():
            total.update(counts)
        return dict(total)

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Record a timeline of all ranks into ``path``, on rank 0's machine.

        Rank 0's call counts, and starts it everywhere before any operation that rank 0 submits later; on other ranks,
        whose paths may be others, a call does nothing.
        """
        origin_ns = time.monotonic_ns() + self._clock_offset_ns
        self._switch_timeline(
            {"kind": "timeline_start", "path": path, "mark_cycles": mark_cycles, "origin_ns": origin_ns}
        )

    def stop_timeline(self) -> None:
        """Stop recording on all ranks and complete the file; on ranks other than 0 a call does nothing."""
        self._switch_timeline({"kind": "timeline_stop"})

    # The end, in order and otherwise.

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(describe_exception(error))
        self.close()

    def close(self, why: str = "it called shutdown()") -> None:
        """Stop on all ranks: what is in flight, there and here, fails with `ShutDownError`. May be called again."""
        if self._closed:
            return
        self._closed = True
        coordinator = self.group.coordinator
        if self._failure is None:
            text = f"rank {self.rank} has shut down hvdlite ({why}), so this operation cannot complete"
            own_text = "hvdlite has been shut down in this process; call hvd.init() again before other operations"
            coordinator.announce({"kind": "shutdown", "rank": self.rank, "text": text, "own_text": own_text})
        while not coordinator.join(_LOOK_S):
            if self._failure is not None and coordinator.join(timeout_s=self.config.failure_grace_s):
                break
            if self._failure is not None:
                _LOG.error("rank %d: the coordinator thread is stuck and is left behind", self.rank)
                self._is_stuck = True
                break
        if self._last_words is not None:
            self._last_words.cancel()
        self._timeline.close()
        self._sentinel.close()
        self._close_nodes()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def can_end_in_order(self) -> bool:
        """Whether all ranks live and this one's threads have ended: nothing went wrong but perhaps a stall."""
        return not self._is_stuck and (self._failure is None or isinstance(self._failure, StallError))

    @property
    def failure(self) -> HorovodInternalError | None:
        """Why the job failed, if it did."""
        return self._failure

    def fail(self, text: str) -> None:
        """Tell every rank that this one failed."""
        self._sentinel.report(self.rank, f"rank {self.rank} raised {text}")

    def check(self) -> None:
        """Raise the reason once the job has failed."""
        if self._failure is None and self._node.aborted:
            self._failure_known.wait(_REASON_S)
            if self._failure is None:
                raise CollectiveError("another rank of this node has failed; its output says why")
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # several threads raise it, each from its own place

    def abandon_in_child(self) -> None:
        """Called in a forked child: let go of what only the parent may use."""
        self._closed = True
        self._sentinel.release()
        self._close_nodes()

    def _close_nodes(self) -> None:
        for group in [*self.groups.values()]:
            group.node.close()

    def _learn_of_failure(self, rank: int, text: str) -> None:
        """On the sentinel's thread, or that of whoever failed: end every wait with the reason."""
        if rank != self.rank and not self._closed:
            _LOG.error("%s", text.splitlines()[0])  # before the launcher ends this rank as well
        self._failure = StallError(text) if rank == _STALL else RankFailedError(rank, text)
        self._failure_known.set()
        self._node.abort()
        self._timeline_switched.set()
        for group in [*self.groups.values()]:  # none yet when a rank dies during the start
            group.fail(self._failure)
        if self._closed or rank == _STALL:  # all ranks live, and one that is late may still come
            return
        self._last_words = _native.Deadline(
            self.config.failure_grace_s,
            f"\nhvdlite: rank {self.rank} ends, since it did not end by itself within "
            f"{self.config.failure_grace_s:g} s (HVDLITE_FAILURE_GRACE_SECONDS) after this failure: {text}\n",
            1,
        )

    def _coordinator_died(self, error: BaseException) -> None:
        if error is self._failure:
            return
        if isinstance(error, HorovodInternalError):
            self._sentinel.report(_STALL if isinstance(error, StallError) else self.rank, str(error))
        else:
            self.fail(describe_exception(error))

    # On the coordinator thread.

    def _take_notice(self, content: dict[str, Any]) -> None:
        kind = content["kind"]
        if kind == "timeline_start":
            if not self._timeline.is_recording:  # rank 0 may have called twice
                self._timeline.start(content["path"], content["mark_cycles"], content["origin_ns"])
        elif kind == "timeline_stop":
            self._finish_timeline()
        elif kind == "shutdown":
            self._finish_timeline()
            for number in list(self.groups):
                if number:
                    self._end_group(number, content["text"])
            self.group.release()
        self._timeline_switched.set()

    def _administer(self, request: Request) -> tuple[int, Group | None] | None:
        """Add or remove a group, in the order that all ranks agreed on."""
        if request.kind is Kind.REMOVE_PROCESS_SET:
            if request.root in self.groups:
                was = f"the process set of ranks {list(self.groups[request.root].ranks)} was removed"
                self._end_group(request.root, f"{was}, so this operation cannot complete")
            return None
        number = next(self._group_numbers)
        if self.rank not in request.ranks:
            return number, None
        comm = None if len(request.ranks) == 1 else mpi.subset(self._comm, request.ranks)
        nodes, node = discover(comm, self.config.start_timeout_s, request.ranks)
        group = Group(
            comm,
            Topology(self.rank, nodes),
            node,
            self.config,
            self.recorder,
            check=self.check,
            check_open=self._raise_if_closed,
            on_fatal=self._coordinator_died,
            on_notice=lambda content: group.release() if content["kind"] == "shutdown" else None,
            administer=_only_by_all,
        )
        self.groups[number] = group
        if self._failure is not None:
            group.fail(self._failure)
        group.coordinator.start()
        return number, group

    def _end_group(self, number: int, text: str) -> None:
        """Every member does; its coordinator stops once it has read in its log that one of them has said so."""
        group = self.groups[number]
        group.coordinator.announce({"kind": "shutdown", "rank": self.rank, "text": text, "own_text": text})
        while not group.coordinator.join(timeout_s=_LOOK_S):
            self.check()
        self._ended[number] = group.statistics()
        del self.groups[number]
        group.node.close()

    def _finish_timeline(self) -> None:
        if not self._timeline.is_recording:
            return
        self._timeline.flush_and_close()
        self.group.barrier()  # every rank of a node has written before its leader reads
        leaders = self.group.leaders
        self._timeline.merge(None if leaders is None else leaders.gather)

    def _switch_timeline(self, content: dict[str, Any]) -> None:
        self._raise_if_closed()
        if self.rank != 0:
            return
        self._timeline_switched.clear()
        self.group.coordinator.announce(content)
        self._timeline_switched.wait()
        self.check()

    def _raise_if_closed(self) -> None:
        if self._closed and self._failure is None:
            raise ShutDownError("hvdlite has been shut down in this process; call hvd.init() again")
        self.check()


def _only_by_all(request: Request) -> None:
    raise AssertionError(f"{request.kind.label} goes through the group of all ranks")


def describe_exception(error: BaseException) -> str:
    """Type and message on the first line, then the traceback."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join([summary, "".join(traceback.format_exception(error)).rstrip()])


def _exchange_cards(
    comm: MPI.Comm | None, config: Config, versions: Mapping[str, str], listener: Listener
) -> list[_Card]:
    """Every rank's card, by rank; refuses ranks that run different versions."""
    addresses = [(interface.address, listener.port) for interface in select(config.network_interfaces)]
    versions = {"hvdlite": __version__, "Python": platform.python_version(), **versions}
    choice, refusal = _load_choice(config) if comm is None or comm.rank == 0 else (None, "")
    host = socket.gethostname(), os.getpid(), addresses
    card = _Card(dict(versions), config, new_token(), *host, choice, refusal)
    cards: list[_Card] = [card] if comm is None else comm.allgather(card)
    if cards[0].refusal:
        raise ConfigError(cards[0].refusal)
    for package in dict.fromkeys(name for card in cards for name in card.versions):
        if package == "Python":
            continue  # told along with a mismatch, but not itself a reason to refuse
        found: dict[str, list[int]] = {}
        for rank, other in enumerate(cards):
            found.setdefault(other.versions.get(package, "not loaded"), []).append(rank)
        if len(found) > 1:
            where = ", ".join(f"{version} on rank {r[0]} ({cards[r[0]].hostname})" for version, r in found.items())
            raise HorovodVersionMismatchError(
                f"the ranks run different versions of {package}: {where}. Install the same version on every host."
            )
    return cards


def _load_choice(config: Config) -> tuple[Choice | None, str]:
    """What an earlier start has found by autotuning, or why it cannot be taken."""
    if not config.autotune_load:
        return None, ""
    try:
        choice = read_choice(config.autotune_load)
    except ConfigError as error:
        return None, str(error)
    if choice is None and not config.autotune:
        return None, (
            f"HVDLITE_AUTOTUNE_LOAD={config.autotune_load}: there is no such file, or the job that wrote it ended "
            "before autotuning did. Set HVDLITE_AUTOTUNE=1 as well, so that it is chosen now."
        )
    return choice, ""


def _leader_links(
    topology: Topology, config: Config, cards: list[_Card], listener: Listener, deadline_s: float
) -> list[tuple[int, str, socket.socket]]:
    """(rank, where, socket) of this leader's parent and children; nothing for other ranks."""
    if not topology.is_leader:
        return []
    doors = [Door(cards[leader].hostname, cards[leader].addresses) for leader in topology.leaders]
    links = connect_tree(doors, topology, config.tree_fanout, cards[0].token, listener, deadline_s)
    return [(topology.leaders[node], cards[topology.leaders[node]].where, link) for node, link in links.items()]
