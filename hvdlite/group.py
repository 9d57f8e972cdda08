"""A process set at work: its communicators, memory and coordinator thread; what its ranks call becomes a submission."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hvdlite.autotune.settings import Settings
from hvdlite.collectives.pairwise import PairwiseExchange
from hvdlite.collectives.select import build_backend, spin_us
from hvdlite.config import Config
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.execute import Executor
from hvdlite.coordinator.handle import Handle
from hvdlite.coordinator.messages import KNOWN_REQUESTS, NAMED, Kind, Request, TensorSpec
from hvdlite.coordinator.submission import Allocate, Submission
from hvdlite.coordinator.thread import Coordinator
from hvdlite.coordinator.tree import Tree
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import HorovodInternalError
from hvdlite.fusion.fusion_buffer import FusionBuffer, FusionBuffers, Home
from hvdlite.interfaces import select
from hvdlite.leader_links import Door, Listener, connect_tree, new_token
from hvdlite.memory import ALIGNMENT, TensorView, align_up
from hvdlite.node import Node
from hvdlite.timeline.recorder import Recorder
from hvdlite.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI


class Group:
    """The ranks of ``topology``, of which this process is one. Collective to build, over ``comm``.

    Operations are asynchronous: `Handle.wait` ends in a result or in an error. They raise `HorovodInternalError` where
    hvdlite was shut down or has failed, `DuplicateNameError` where their ``name`` is in flight, and ValueError on a
    rank that has joined. With ``background=False`` the caller waits for the operation at once, and does the coordinator
    thread's work meanwhile; without a wait nothing would happen.

    Args:
        comm: the ranks of ``topology`` in ascending order; None where it is this process alone. Freed by `release`.
        node: those of them on this machine.
        check: raises once the job has failed.
        check_open: raises where this process may not submit: after the end, in a forked child.
        on_fatal: called on the coordinator thread with the exception that ended it.
        on_notice: called on the coordinator thread with what concerns the whole group.
        administer: does what changes process sets, and returns what the user gets.
    """

    def __init__(
        self,
        comm: MPI.Comm | None,
        topology: Topology,
        node: Node,
        config: Config,
        recorder: Recorder,
        *,
        check: Callable[[], None],
        check_open: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
        on_notice: Callable[[dict[str, Any]], None],
        administer: Callable[[Request], object],
    ) -> None:
        self.topology = topology
        self.ranks = topology.ranks
        self.node = node
        self.config = config  # `configure` changes it
        self.recorder = recorder
        self.joins = 0  # how often all ranks have joined
        self._comm = comm
        self._administer_sets = administer
        self._check = check
        self._check_open = check_open
        self._counters: Counter[Kind] = Counter()
        self._counters_lock = threading.Lock()
        self._numbers = itertools.count()
        node.check = check
        node.timeout_s = config.start_timeout_s

        self.leaders: MPI.Comm | None = None  # rank in it = node index; on leaders of several nodes
        self._rail: MPI.Comm | None = None
        several_nodes = len(topology.nodes) > 1
        if comm is not None and several_nodes:
            self.leaders = _split(comm, topology.is_leader, 0, topology.node_index)
            self._rail = _split(comm, topology.local_rank < topology.rails, topology.local_rank, topology.node_index)

        self._backend = build_backend(node, self._rail, topology, config, check, recorder)
        self.buffers = FusionBuffers(node)
        staging_bytes = align_up(max(config.staging_bytes, topology.size * ALIGNMENT))
        self._pairwise = PairwiseExchange(
            comm, self.ranks, timeout_s=config.collective_timeout_s, check=check, recorder=recorder
        )
        self._executor = Executor(
            self._backend,
            self._pairwise,
            self._backend.allocate(staging_bytes, DType.UINT8),
            # On one node a chunk stays in cache on its way; across nodes it should fill the wire.
            config.staging_bytes if several_nodes else config.chunk_bytes,
            self.buffers,
            topology,
            recorder,
            self._administer,
        )
        page = ControlPage(node)
        links = {} if self.leaders is None else _connect_leaders(self.leaders, topology, config)
        self._tree = Tree(links, topology.parent(config.tree_fanout), topology.children(config.tree_fanout), check)
        self._bell = page.ring_for(links.values()) if links else None
        self.coordinator = Coordinator(
            topology,
            page,
            self._tree,
            self._executor,
            config,
            recorder,
            spin_us=spin_us(config, node),
            check=check,
            on_fatal=on_fatal,
            on_notice=on_notice,
            on_joined=self._all_have_joined,
        )

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This process's place among `ranks`."""
        return self.ranks.index(self.topology.rank)

    @property
    def fastest_allreduce(self) -> float:
        """Bytes per second of the fastest allreduce that took long enough to tell; 0: none did."""
        return self._executor.fastest_allreduce

    def next_number(self) -> int:
        """0, 1, 2, ...: for names of what every rank makes in the same order."""
        return next(self._numbers)

    def statistics(self) -> dict[str, int]:
        """What this rank has done here so far; see `hvdlite.statistics`."""
        return {
            **self.coordinator.statistics(),
            **self._backend.traffic.named("ring"),
            **self._pairwise.traffic.named("alltoall"),
        }

    # Operations.

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
        needs_all: bool = False,
        background: bool = True,
    ) -> Handle:
        """``outputs[i] = postscale * op over ranks(prescale * inputs[i])``, all together or none.

        Args:
            inputs: of one dtype where ``home`` is given; address 0 contributes zeros.
            outputs: of the same shapes and dtypes as ``inputs``; may be the same memory.
            name: of the operation, the same on every rank; None counts unnamed operations.
            names: of the tensors, for messages.
            wire_dtype: floats are cast to it on the way.
            home: where the group lives; its tensors are not copied as far as they are at their places already.
            needs_all: it is an error where a rank has joined.

        Raises:
            ValueError: an element type that does not reduce.
        """
        if home is None and len(inputs) == 1 and wire_dtype is None and inputs[0].address == outputs[0].address:
            home = self.buffers.find(inputs[0].address, inputs[0].nbytes)
        request, sequence = self._reduction(
            Kind.ALLREDUCE,
            inputs,
            name,
            names,
            op,
            prescale,
            postscale,
            wire_dtype,
            None if home is None else home.place,
            needs_all,
        )
        return self._submit(Submission(request, sequence, inputs, outputs, home=home), background)

    def reducescatter_async(
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
    ) -> Handle:
        """`allreduce_async` of which each rank gets some rows: those between `execute.row_bounds` of dimension 0.

        Args:
            inputs: each of at least one dimension.
            outputs: this rank's rows.

        Raises:
            ValueError: an element type that does not reduce.
        """
        request, sequence = self._reduction(
            Kind.REDUCESCATTER, inputs, name, names, op, prescale, postscale, wire_dtype
        )
        return self._submit(Submission(request, sequence, inputs, outputs))

    def allgather_async(
        self,
        inputs: Sequence[TensorView],
        allocate: Allocate,
        *,
        name: str | None = None,
        names: Sequence[str] | None = None,
        needs_all: bool = False,
    ) -> Handle:
        """Concatenate along dimension 0, in the order of ranks; only that dimension may differ between ranks.

        Args:
            inputs: each of at least one dimension.
            allocate: called on the coordinator thread with (index, shape of the result) for the memory to fill.
            needs_all: it is an error where a rank has joined; otherwise that rank has no rows.
        """
        name, sequence = self._identify(Kind.ALLGATHER, name)
        rows = tuple(view.shape[0] for view in inputs)
        request = Request(Kind.ALLGATHER, name, _specs(name, names, inputs, skip_dims=1), needs_all=needs_all)
        return self._submit(Submission(request, sequence, inputs, sizes=rows, allocate=allocate))

    def alltoall_async(
        self, tensor: TensorView, splits: Sequence[int], allocate: Allocate, *, name: str | None = None
    ) -> Handle:
        """Send ``splits[r]`` rows of ``tensor`` to each rank r, in the order of ranks, and receive likewise.

        The result of the handle is the number of rows received from each rank.

        Args:
            tensor: of at least one dimension; the others are the same on every rank.
            splits: one number per rank; together at most ``tensor.shape[0]``.
            allocate: called on the coordinator thread with (0, shape of the result) for the memory to fill.
        """
        assert len(splits) == self.size and 0 <= sum(splits) <= tensor.shape[0], (splits, tensor.shape)
        name, sequence = self._identify(Kind.ALLTOALL, name)
        request = Request(Kind.ALLTOALL, name, _specs(name, None, [tensor], skip_dims=1), needs_all=True)
        return self._submit(Submission(request, sequence, [tensor], sizes=tuple(splits), allocate=allocate))

    def broadcast_async(
        self,
        tensors: Sequence[TensorView],
        *,
        root_rank: int,
        name: str | None = None,
        names: Sequence[str] | None = None,
        needs_all: bool = False,
    ) -> Handle:
        """Overwrite ``tensors`` with those of rank ``root_rank`` of the job.

        Args:
            needs_all: it is an error where a rank has joined; otherwise only the root must not have.

        Raises:
            ValueError: there is no such rank in the group.
        """
        if root_rank not in self.ranks:
            raise ValueError(f"root_rank is {root_rank}, but the ranks of this process set are {list(self.ranks)}")
        name, sequence = self._identify(Kind.BROADCAST, name)
        request = Request(Kind.BROADCAST, name, _specs(name, names, tensors), root=int(root_rank), needs_all=needs_all)
        return self._submit(Submission(request, sequence, tensors, tensors))

    def barrier_async(self, *, background: bool = True) -> Handle:
        """Done once every rank has called it."""
        return self._submit_bare(Kind.BARRIER, background=background)

    def join_async(self) -> Handle:
        """Take part in whatever the others do, with nothing, until all have joined; the result is the last who did."""
        return self._submit_bare(Kind.JOIN)

    def add_process_set_async(self, ranks: Sequence[int]) -> Handle:
        """Of the whole job: a new group of ``ranks``; the result is its number and, on its members, the group."""
        return self._submit_bare(Kind.ADD_PROCESS_SET, ranks=tuple(ranks), needs_all=True)

    def remove_process_set_async(self, number: int, ranks: Sequence[int]) -> Handle:
        """Of the whole job: end a group."""
        return self._submit_bare(Kind.REMOVE_PROCESS_SET, root=number, ranks=tuple(ranks), needs_all=True)

    def allocate(self, nbytes: int, name: str | None = None) -> FusionBuffer:
        """A fusion buffer of ``nbytes`` per rank, zeroed; blocks until every rank asks for the same.

        Tensors made from its `memory` are reduced where they are.
        """
        buffer: FusionBuffer = self._submit_bare(Kind.ALLOCATE, name, nbytes=int(nbytes)).wait()
        return buffer

    def configure(self, settings: Settings) -> None:
        """Change settings between the same two operations on all ranks; blocks until every rank asks for the same."""
        values = tuple(asdict(settings).values())
        self._submit_bare(Kind.CONFIGURE, background=False, settings=values).wait()

    # The end. On the coordinator thread, but for `fail`.

    def barrier(self) -> None:
        """Of the coordinator threads; called on them only."""
        self._backend.barrier()

    def release(self) -> None:
        """Free the communicators; collective, the last thing that the coordinator threads do together."""
        self._backend.close()
        self._tree.close()
        if self._bell is not None:
            self._bell.close()
        for comm in (self._rail, self.leaders, self._comm):
            if comm is not None:
                comm.Free()

    def fail(self, reason: HorovodInternalError) -> None:
        """End every wait, and every operation now and later with ``reason``; called on any thread."""
        self.node.abort()
        self.coordinator.close(reason)
        self.coordinator.wake()

    # On the coordinator thread, in the order of its log.

    def _administer(self, request: Request) -> object:
        if request.kind is not Kind.CONFIGURE:
            return self._administer_sets(request)
        self.config = Settings(*request.settings).within(self.config)
        self._backend.configure(self.config)
        return None

    def _all_have_joined(self) -> None:
        self._counters.clear()  # ranks that went on alone have counted more
        self.joins += 1

    def _identify(self, kind: Kind, name: str | None) -> tuple[str, int]:
        """Names of unnamed operations count per operation, so that ranks that ran others meanwhile still agree."""
        if name is not None:
            return name, NAMED
        with self._counters_lock:
            sequence = self._counters[kind]
            self._counters[kind] += 1
        return _unnamed(kind), sequence

    def _reduction(
        self,
        kind: Kind,
        inputs: Sequence[TensorView],
        name: str | None,
        names: Sequence[str] | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        wire_dtype: DType | None,
        place: tuple[int, int] | None = None,
        needs_all: bool = False,
    ) -> tuple[Request, int]:
        """The request of an operation that reduces, and its sequence number."""
        if op is ReduceOp.ADASUM:
            raise NotImplementedError("Adasum is not one reduction; use hvdlite.torch.allreduce(op=Adasum)")
        request = _reduction_request(
            kind,
            _unnamed(kind) if name is None else name,
            None if names is None else tuple(names),
            tuple([(view.dtype, view.shape) for view in inputs]),
            op,
            float(prescale),
            float(postscale),
            wire_dtype,
            place,
            needs_all,
        )
        return request, self._identify(kind, name)[1]

    def _submit_bare(self, kind: Kind, name: str | None = None, *, background: bool = True, **options: Any) -> Handle:
        name, sequence = self._identify(kind, name)
        return self._submit(Submission(Request(kind, name, **options), sequence), background)

    def _submit(self, submission: Submission, background: bool = True) -> Handle:
        self._check_open()
        self.coordinator.submit(submission, background=background)
        return submission.handle


def _unnamed(kind: Kind) -> str:
    return f"{kind.label}.noname"


@lru_cache(maxsize=KNOWN_REQUESTS)
def _reduction_request(
    kind: Kind,
    name: str,
    names: tuple[str, ...] | None,
    tensors: tuple[tuple[DType, tuple[int, ...]], ...],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    wire_dtype: DType | None,
    place: tuple[int, int] | None,
    needs_all: bool,
) -> Request:
    """The request of an operation that reduces ``tensors`` of these dtypes and shapes.

    Remembered: an operation that comes again, as in every step of training, has the same request, not an equal one, and
    who looks for it compares addresses, not contents.
    """
    if any(dtype is DType.BOOL for dtype, _ in tensors):
        raise ValueError(f"{kind.label} of bool is not defined; convert to uint8, and use Max for or, Min for and")
    if names is None:
        names = _tensor_names(name, len(tensors))
    specs = tuple(TensorSpec(own, dtype, shape) for own, (dtype, shape) in zip(names, tensors, strict=True))
    return Request(kind, name, specs, op, prescale, postscale, wire_dtype=wire_dtype, place=place, needs_all=needs_all)


def _tensor_names(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}.{i}" for i in range(count))


def _specs(
    name: str, names: Sequence[str] | None, views: Sequence[TensorView], skip_dims: int = 0
) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(tensor_name, view.dtype, tuple(view.shape[skip_dims:]))
        for tensor_name, view in zip(names or _tensor_names(name, len(views)), views, strict=True)
    )


def _connect_leaders(leaders: MPI.Comm, topology: Topology, config: Config) -> dict[int, socket.socket]:
    """This leader's connections to its neighbours in the tree, by node index. Collective over ``leaders``."""
    deadline_s = time.monotonic() + config.start_timeout_s
    with closing(Listener()) as listener:
        addresses = [(interface.address, listener.port) for interface in select(config.network_interfaces)]
        token = leaders.bcast(new_token())
        doors = leaders.allgather(Door(socket.gethostname(), addresses))
        return connect_tree(doors, topology, config.tree_fanout, token, listener, deadline_s)


def _split(comm: MPI.Comm, included: bool, color: int, key: int) -> MPI.Comm | None:
    """The ranks of one color, ordered by key; None for those not included. Collective over ``comm``."""
    from mpi4py import MPI

    part = comm.Split(color if included else MPI.UNDEFINED, key)
    return part if included else None
