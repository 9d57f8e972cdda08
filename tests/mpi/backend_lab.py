"""Backends of every kind on the ranks of one machine, and inputs whose results are known without them.

Any grouping of the ranks can play nodes here: a node's memory is shared for real, and its rails cross "nodes"
through MPI as they would a network.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import cast

import numpy as np
from mpi4py import MPI

from hvdlite.collectives.adder import HostAdder
from hvdlite.collectives.base import Backend
from hvdlite.collectives.hierarchical import HierarchicalBackend
from hvdlite.collectives.requests import Endpoint
from hvdlite.collectives.ring import RingBackend
from hvdlite.collectives.shm import ShmBackend
from hvdlite.collectives.thresholds import Limits
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.memory.host import HostMemory
from hvdlite.memory.memory_file import create_memory_file
from hvdlite.memory.segment import Segment
from hvdlite.memory.views import Buffer
from hvdlite.node import Node, discover
from hvdlite.recorder import Recorder

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
SEGMENT = 256  # bytes; small, so that pipelines of many segments run on little data
SMALL = 1024
WINDOW = 256  # bytes; small, so that many windows run on little data
PERIOD = 1013  # of the values of a rank
PATIENCE_S = 60.0  # for peers that come; a test whose peers do not come sets its own

RING = Limits(doubling_bytes=SMALL, halving_bytes=0, tree_bytes=SMALL)
HALVING = Limits(doubling_bytes=0, halving_bytes=1 << 40, tree_bytes=SMALL)

Layout = tuple[tuple[int, ...], ...]
LAYOUTS: list[Layout] = [
    ((0, 1),),
    ((0,), (1,)),
    ((0, 1), (2,)),
    ((0,), (1, 2)),
    ((0, 2), (1,)),
    ((0,), (1,), (2,)),
    ((0, 1, 2, 3),),
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0, 1, 2), (3,)),
    ((0,), (1, 2, 3)),
    ((0, 3), (1,), (2,)),
    ((0,), (1,), (2,), (3,)),
]
LAYOUTS = [nodes for nodes in LAYOUTS if sum(len(ranks) for ranks in nodes) == SIZE]


class FakeNode(Node):
    """A node of any ranks of one machine: memory goes through /proc instead of sockets."""

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> None:
        self._comm = comm
        self.ranks = tuple(ranks)
        self.local_rank = comm.rank
        self.local_size = comm.size
        self.cores = comm.size
        self._page = self.share(4096)
        self.abort_address = self._page.address

    def share(self, nbytes: int, *, reserved: bool = True) -> Segment:
        fd = create_memory_file(nbytes) if self.is_leader else -1
        pid, number = self._comm.bcast((os.getpid(), fd))
        if not self.is_leader:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        self._comm.Barrier()
        segment = Segment(fd, nbytes)
        os.close(fd)
        return segment

    def exchange(self, text: str, file: int | None = None) -> list[tuple[str, int | None]]:
        told = self._comm.allgather((text, os.getpid(), file))
        opened = [
            (theirs, None if number is None else os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR))
            for theirs, pid, number in told
        ]
        self._comm.Barrier()
        return opened


def nothing_failed() -> None:
    pass


@dataclass
class Lab:
    """Builds backends over all ranks; every method is collective. ``nodes_made``: this rank's, for aborting them."""

    recorder: Recorder = field(default_factory=Recorder)
    timeout_s: float = PATIENCE_S
    segment_bytes: int = SEGMENT
    check: Callable[[], None] = nothing_failed
    nodes_made: list[FakeNode] = field(default_factory=list)

    def split(self, color: int, key: int) -> MPI.Intracomm | None:
        part = MPI.COMM_WORLD.Split(color if color >= 0 else MPI.UNDEFINED, key)
        return None if part == MPI.COMM_NULL else cast(MPI.Intracomm, part)

    def node(self, nodes: Layout) -> FakeNode:
        index = next(i for i, ranks in enumerate(nodes) if RANK in ranks)
        comm = self.split(index, nodes[index].index(RANK))
        assert comm is not None
        self.nodes_made.append(FakeNode(comm, nodes[index]))
        return self.nodes_made[-1]

    def rail(self, nodes: Layout) -> MPI.Intracomm | None:
        index = next(i for i, ranks in enumerate(nodes) if RANK in ranks)
        local_rank = nodes[index].index(RANK)
        return self.split(local_rank if local_rank < min(len(ranks) for ranks in nodes) else -1, index)

    def shm(self, nodes: Layout, names: Sequence[int] | None = None, *, window_bytes: int = 0) -> ShmBackend:
        """``names``: what errors call this node's ranks."""
        node = self.node(nodes)
        node.ranks = node.ranks if names is None else tuple(names)
        return ShmBackend(
            node,
            HostMemory(node),
            spin_us=5,
            window_bytes=window_bytes,
            timeout_s=self.timeout_s,
            check=self.check,
            recorder=self.recorder,
        )

    def ring(self, comm: MPI.Intracomm, ranks: Sequence[int] | None = None, *, limits: Limits = RING) -> RingBackend:
        return RingBackend(
            self.endpoint(comm, ranks),
            HostMemory(discover(None, 0.0)[1]),
            HostAdder(),
            segment_bytes=self.segment_bytes,
            limits=limits,
            recorder=self.recorder,
        )

    def endpoint(self, comm: MPI.Intracomm, ranks: Sequence[int] | None = None) -> Endpoint:
        """``ranks``: what errors call them."""
        return Endpoint(comm, ranks=ranks or range(comm.size), timeout_s=self.timeout_s, check=self.check)

    def hierarchical(self, nodes: Layout, one_rail_bytes: int, node: Backend | None = None) -> HierarchicalBackend:
        node, rail = node or self.shm(nodes), self.rail(nodes)
        return self.composed(nodes, one_rail_bytes, node, None if rail is None else self.ring(rail))

    @staticmethod
    def composed(nodes: Layout, one_rail_bytes: int, node: Backend, cross: Backend | None) -> HierarchicalBackend:
        return HierarchicalBackend(
            node,
            cross,
            nodes,
            RANK,
            one_rail_bytes=one_rail_bytes,
            part_bytes=2 * SMALL,
        )

    def build(self, kind: str) -> Backend:
        if kind in ("shm", "windows"):
            return self.shm((tuple(range(SIZE)),), window_bytes=WINDOW if kind == "windows" else 0)
        if kind in ("ring", "halving"):
            return self.ring(MPI.COMM_WORLD.Dup(), limits=RING if kind == "ring" else HALVING)
        if kind.startswith("rings"):  # no memory is shared; the contract is all that the two have in common
            nodes = KINDS[kind]
            index = next(i for i, ranks in enumerate(nodes) if RANK in ranks)
            comm = self.split(index, nodes[index].index(RANK))
            assert comm is not None
            return self.hierarchical(nodes, one_rail_bytes=SMALL // 2, node=self.ring(comm))
        return self.hierarchical(KINDS[kind], one_rail_bytes=SMALL // 2)


def name_of(nodes: Layout) -> str:
    return "+".join("".join(map(str, ranks)) for ranks in nodes)


_SEVERAL = [nodes for nodes in LAYOUTS if 1 < len(nodes) < SIZE]
KINDS: dict[str, Layout] = (
    {"shm": (), "ring": (), "halving": ()}
    | {f"hierarchical {name_of(nodes)}": nodes for nodes in _SEVERAL}
    | {f"rings {name_of(nodes)}": nodes for nodes in _SEVERAL[-2:-1]}
)


WAYS = ("windows", "shm", "ring", *[kind for kind in KINDS if "hier" in kind][:1])
"""Kinds of backends that move tensors which live anywhere, each in another way."""


def assert_none(*problems: str | None) -> None:
    """Fail if there is a problem; the harness fails the test on all ranks then."""
    found = [problem for problem in problems if problem]
    assert not found, "\n".join(found)


# Inputs that every rank can build for any rank, and the answer without the code under test. float64 stands for
# all types; integers up to 256 are exact in all of them but int8, where both sides wrap.


def values_of(rank: int, numel: int, salt: int = 0) -> np.ndarray:
    """(numel,) float64, integers from 1 to 4: the product over four ranks stays exact in bfloat16."""
    return np.resize(_period((rank * 3 + salt) % PERIOD), numel)


@cache
def _period(start: int) -> np.ndarray:
    return ((np.arange(PERIOD) * 7 + start) * 2654435761 % PERIOD % 4 + 1).astype(np.float64)


def encode(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The bytes of ``values`` in ``dtype``; what is exact in bfloat16 is not changed by cutting off its lower half."""
    if dtype is DType.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if dtype.is_floating or dtype is DType.BOOL:
        return values.astype(dtype.label).view(np.uint8)
    return values.astype(np.int64).astype(dtype.label).view(np.uint8)


def memory(buf: Buffer) -> np.ndarray:
    """(nbytes,) uint8: this rank's own copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * buf.nbytes).from_address(buf.address))


def fill(buf: Buffer, values: np.ndarray) -> None:
    memory(buf)[:] = encode(values, buf.dtype)


def difference(buf: Buffer, expected: np.ndarray, what: str = "") -> str | None:
    """None if this rank's copy holds ``expected``."""
    got = memory(buf)
    wanted = encode(expected, buf.dtype)
    if np.array_equal(got, wanted):
        return None
    first = int(np.flatnonzero(got != wanted)[0]) // buf.dtype.itemsize
    return f"{what} {buf.dtype.label}[{buf.numel}] differs from element {first} on (expected {expected[first]})"


def reduced(
    op: ReduceOp, numel: int, dtype: DType, prescale: float = 1.0, postscale: float = 1.0, salt: int = 0
) -> np.ndarray:
    return np.resize(_reduced_period(op, dtype.is_floating, prescale, postscale, salt % PERIOD), numel)


@cache
def _reduced_period(op: ReduceOp, is_floating: bool, prescale: float, postscale: float, salt: int) -> np.ndarray:

    def scaled(values: np.ndarray, factor: float) -> np.ndarray:
        return values * factor if is_floating else np.trunc(values * factor)

    combine = {ReduceOp.SUM: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}
    result = scaled(values_of(0, PERIOD, salt), prescale)
    for rank in range(1, SIZE):
        result = combine[op](result, scaled(values_of(rank, PERIOD, salt), prescale))
    return scaled(result, postscale)


def allocate(backend: Backend, numel: int, dtype: DType) -> Buffer:
    """Collective."""
    buffer = backend.memory.allocate(numel * dtype.itemsize)
    backend.barrier()  # a GPU has zeroed it
    return buffer.buffer(0, numel, dtype)
