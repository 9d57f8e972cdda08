"""Runtime: builds and owns everything; what users call becomes a submission to a coordinator here."""

from __future__ import annotations

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
from hvdlite.clock_sync import measure_offset
from hvdlite.config import Config
from hvdlite.coordinator.handle import Handle
from hvdlite.coordinator.messages import NAMED, Kind, Request, TensorSpec
from hvdlite.coordinator.submission import Allocate, Submission
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import (
    CollectiveError,
    HorovodInternalError,
    RankFailedError,
    ShutDownError,
    StallError,
    StartupError,
)
from hvdlite.fusion.fusion_buffer import FusionBuffer, Home
from hvdlite.group import Group
from hvdlite.interfaces import select
from hvdlite.leader_links import Listener, connect, new_token
from hvdlite.memory import TensorView
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
        self._counters: Counter[Kind] = Counter()
        self._counters_lock = threading.Lock()
        self._timeline_switched = threading.Event()

        own = None if comm is None or comm.size == 1 else mpi.private_communicator(comm, config)
        rank = 0 if own is None else own.rank
        with closing(Listener()) as listener:
            cards = _exchange_cards(own, config, versions or {}, listener)
            self.config = cards[0].config
            nodes, self._node = discover(own, config.start_timeout_s)
            mpi.unlink_shared_files()  # every local rank has mapped them by now
            self.topology = Topology(rank, nodes)
            self._node.check = self.check
            self._node.timeout_s = self.config.start_timeout_s
            links = _leader_links(self.topology, self.config, cards, listener, links_deadline_s)
        links += [
            (self._node.ranks[local_rank], cards[self._node.ranks[local_rank]].where, link)
            for local_rank, link in self._node.watch_links.items()
        ]
        self._sentinel = Sentinel(rank, links, self._learn_of_failure, self.config.heartbeat_timeout_s)
        self._group = Group(
            own,
            self.topology,
            self._node,
            self.config,
            self.recorder,
            check=self.check,
            on_fatal=self._coordinator_died,
            on_notice=self._take_notice,
        )
        offset_ns = measure_offset(self._group.leaders, self.topology, self.config.tree_fanout)
        clocks = [(offset_ns, time.monotonic_ns())]
        if own is not None:
            clocks = own.allgather(clocks[0])
        self._clock_offset_ns = clocks[self.topology.local_ranks[0]][0]
        self._timeline = Timeline(
            rank, self.topology.node_index, self.topology.is_leader, self.recorder, self._clock_offset_ns
        )
        if self.config.timeline:
            self._timeline.start(self.config.timeline, self.config.timeline_mark_cycles, clocks[0][1])
        self._group.coordinator.start()

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

    # Operations. All are asynchronous; `Handle.wait` ends in a result or in an error.

    def allreduce_async(
        self,
        inputs: Sequence[TensorView],
        outputs: Sequence[TensorView],
        *,
        name: str | None = None,
        names: Sequence[str] | None = None,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wire_dtype: DType | None = None,
        home: Home | None = None,
    ) -> Handle:
        """``outputs[i] = postscale * op over ranks(prescale * inputs[i])``, all together or none.

        Args:
            inputs: of one dtype where ``home`` is given; address 0 contributes zeros.
            outputs: of the same shapes and dtypes as ``inputs``; may be the same memory.
            name: of the operation, the same on every rank; None counts unnamed operations.
            names: of the tensors, for messages.
            wire_dtype: floats are cast to it on the way.
            home: where the group lives; its tensors are not copied as far as they are at their places already.

        Raises:
            DuplicateNameError: ``name`` is in flight.
            ValueError: an element type that does not reduce.
        """
        for view in inputs:
            if view.dtype is DType.BOOL:
                raise ValueError("allreduce of bool is not defined; convert to uint8, and use Max for or, Min for and")
        if op is ReduceOp.ADASUM:
            raise NotImplementedError("Adasum is not supported; use Average or Sum")
        if home is None and len(inputs) == 1 and wire_dtype is None and inputs[0].address == outputs[0].address:
            home = self._group.buffers.find(inputs[0].address, inputs[0].nbytes)
        name, sequence = self._identify(Kind.ALLREDUCE, name)
        request = Request(
            Kind.ALLREDUCE,
            name,
            _specs(name, names, inputs),
            op,
            float(prescale),
            float(postscale),
            wire_dtype=wire_dtype,
            place=None if home is None else home.place,
        )
        return self._submit(Submission(request, sequence, inputs, outputs, home=home))

    def allgather_async(
        self,
        inputs: Sequence[TensorView],
        allocate: Allocate,
        *,
        name: str | None = None,
        names: Sequence[str] | None = None,
    ) -> Handle:
        """Concatenate along dimension 0, in the order of ranks; only that dimension may differ between ranks.

        Args:
            inputs: each of at least one dimension.
            allocate: called on the coordinator thread with (index, shape of the result) for the memory to fill.
        """
        name, sequence = self._identify(Kind.ALLGATHER, name)
        rows = tuple(view.shape[0] for view in inputs)
        request = Request(Kind.ALLGATHER, name, _specs(name, names, inputs, skip_dims=1))
        return self._submit(Submission(request, sequence, inputs, sizes=rows, allocate=allocate))

    def broadcast_async(
        self,
        tensors: Sequence[TensorView],
        *,
        root_rank: int,
        name: str | None = None,
        names: Sequence[str] | None = None,
    ) -> Handle:
        """Overwrite ``tensors`` with those of rank ``root_rank``.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= root_rank < self.size:
            raise ValueError(f"root_rank is {root_rank}, but ranks go from 0 to {self.size - 1}")
        name, sequence = self._identify(Kind.BROADCAST, name)
        request = Request(Kind.BROADCAST, name, _specs(name, names, tensors), root=int(root_rank))
        return self._submit(Submission(request, sequence, tensors, tensors))

    def barrier_async(self) -> Handle:
        """Done once every rank has called it."""
        name, sequence = self._identify(Kind.BARRIER, None)
        return self._submit(Submission(Request(Kind.BARRIER, name), sequence))

    def allocate(self, nbytes: int, name: str | None = None) -> FusionBuffer:
        """A fusion buffer of ``nbytes`` per rank, zeroed; blocks until every rank asks for the same.

        Tensors made from its `memory` are reduced where they are.
        """
        name, sequence = self._identify(Kind.ALLOCATE, name)
        handle = self._submit(Submission(Request(Kind.ALLOCATE, name, nbytes=int(nbytes)), sequence))
        buffer: FusionBuffer = handle.wait()
        return buffer

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Record a timeline of all ranks into ``path`` on rank 0's machine. One rank's call starts it on all."""
        origin_ns = time.monotonic_ns() + self._clock_offset_ns
        self._switch_timeline(
            {"kind": "timeline_start", "path": path, "mark_cycles": mark_cycles, "origin_ns": origin_ns}
        )

    def stop_timeline(self) -> None:
        """Stop recording and complete the file. One rank's call stops it on all."""
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
        coordinator = self._group.coordinator
        if self._failure is None:
            coordinator.announce({"kind": "shutdown", "rank": self.rank, "why": why})
        while not coordinator.join(timeout_s=0.2):
            if self._failure is not None and coordinator.join(timeout_s=self.config.failure_grace_s):
                break
            if self._failure is not None:
                _LOG.error("rank %d: the coordinator thread is stuck and is left behind", self.rank)
                break
        if self._last_words is not None:
            self._last_words.cancel()
        self._timeline.close()
        self._sentinel.close()
        self._node.close()

    @property
    def closed(self) -> bool:
        return self._closed

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
        self._node.close()

    def _learn_of_failure(self, rank: int, text: str) -> None:
        """On the sentinel's thread, or that of whoever failed: end every wait with the reason."""
        if rank != self.rank and not self._closed:
            _LOG.error("%s", text.splitlines()[0])  # before the launcher ends this rank as well
        self._failure = StallError(text) if rank == _STALL else RankFailedError(rank, text)
        self._failure_known.set()
        self._node.abort()
        self._timeline_switched.set()
        group = getattr(self, "_group", None)  # not there yet when a rank dies during the start
        if group is not None:
            group.coordinator.close(self._failure)
            group.coordinator.wake()
        if self._closed:
            return
        self._last_words = _native.Deadline(
            self.config.failure_grace_s,
            f"\nhvdlite: rank {self.rank} ends, since it did not end by itself within "
            f"{self.config.failure_grace_s:.0f} s (HVDLITE_FAILURE_GRACE_SECONDS) after this failure: {text}\n",
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
            if not self._timeline.is_recording:  # every rank may have called
                self._timeline.start(content["path"], content["mark_cycles"], content["origin_ns"])
        elif kind == "timeline_stop":
            self._finish_timeline()
        elif kind == "shutdown":
            self._finish_timeline()
            self._group.release()
        self._timeline_switched.set()

    def _finish_timeline(self) -> None:
        if not self._timeline.is_recording:
            return
        self._timeline.flush_and_close()
        self._group.barrier()  # every rank of a node has written before its leader reads
        leaders = self._group.leaders
        self._timeline.merge(None if leaders is None else leaders.gather)

    def _switch_timeline(self, content: dict[str, Any]) -> None:
        self._raise_if_closed()
        self._timeline_switched.clear()
        self._group.coordinator.announce(content)
        self._timeline_switched.wait()
        self.check()

    def _identify(self, kind: Kind, name: str | None) -> tuple[str, int]:
        """Names of unnamed operations count per operation, so that ranks that ran others meanwhile still agree."""
        if name is not None:
            return name, NAMED
        with self._counters_lock:
            sequence = self._counters[kind]
            self._counters[kind] += 1
        return f"{kind.label}.noname", sequence

    def _submit(self, submission: Submission) -> Handle:
        self._raise_if_closed()
        self._group.coordinator.submit(submission)
        return submission.handle

    def _raise_if_closed(self) -> None:
        if self._closed and self._failure is None:
            raise ShutDownError("hvdlite has been shut down in this process; call hvd.init() again")
        self.check()


def describe_exception(error: BaseException) -> str:
    """Type and message on the first line, then the traceback."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join([summary, "".join(traceback.format_exception(error)).rstrip()])


def _specs(
    name: str, names: Sequence[str] | None, views: Sequence[TensorView], skip_dims: int = 0
) -> tuple[TensorSpec, ...]:
    if names is None:
        names = [name] if len(views) == 1 else [f"{name}.{i}" for i in range(len(views))]
    return tuple(
        TensorSpec(tensor_name, view.dtype, tuple(view.shape[skip_dims:]))
        for tensor_name, view in zip(names, views, strict=True)
    )


def _exchange_cards(
    comm: MPI.Comm | None, config: Config, versions: Mapping[str, str], listener: Listener
) -> list[_Card]:
    """Every rank's card, by rank; refuses ranks that run different versions."""
    addresses = [(interface.address, listener.port) for interface in select(config.network_interfaces)]
    versions = {"hvdlite": __version__, "Python": platform.python_version(), **versions}
    card = _Card(dict(versions), config, new_token(), socket.gethostname(), os.getpid(), addresses)
    cards: list[_Card] = [card] if comm is None else comm.allgather(card)
    for package in dict.fromkeys(name for card in cards for name in card.versions):
        if package == "Python":
            continue  # told along with a mismatch, but not itself a reason to refuse
        found: dict[str, list[int]] = {}
        for rank, other in enumerate(cards):
            found.setdefault(other.versions.get(package, "not loaded"), []).append(rank)
        if len(found) > 1:
            where = ", ".join(f"{version} on rank {r[0]} ({cards[r[0]].hostname})" for version, r in found.items())
            raise StartupError(
                f"the ranks run different versions of {package}: {where}. Install the same version on every host."
            )
    return cards


def _leader_links(
    topology: Topology, config: Config, cards: list[_Card], listener: Listener, deadline_s: float
) -> list[tuple[int, str, socket.socket]]:
    """(rank, where, socket) of this leader's parent and children; nothing for other ranks."""
    children = topology.children(config.tree_fanout) if topology.is_leader else ()
    parent = topology.parent(config.tree_fanout) if topology.is_leader else None
    token = cards[0].token
    listener.accept_children(token, topology.node_index, children, deadline_s)
    links = {}
    if parent is not None:
        addresses = cards[topology.leaders[parent]].addresses
        links[parent] = connect(addresses, token, topology.node_index, parent, deadline_s)
    links.update(listener.links())
    for child in children:
        if child not in links:
            raise StartupError(
                f"node {child} ({cards[topology.leaders[child]].hostname}) did not connect to node "
                f"{topology.node_index} ({cards[topology.rank].hostname}) in time. Name an interface that connects the "
                "hosts in HVDLITE_NETWORK_INTERFACES, or raise HVDLITE_START_TIMEOUT."
            )
    return [(topology.leaders[node], cards[topology.leaders[node]].where, link) for node, link in links.items()]
