"""Which backend serves which ranks, and by which algorithm: the one place that decides.

    device  nodes    ranks per node     backend
    cpu     one      any                shm
    cpu     several  one on every node  ring
    cpu     several  otherwise          hierarchical: shm in the node, one ring per rail across

Within a backend, bytes decide: across nodes, `limits_of`; hierarchical uses one rail up to ``small_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdlite.collectives.base import Backend
from hvdlite.collectives.plans import Algorithm
from hvdlite.collectives.shm import ShmBackend
from hvdlite.config import Config
from hvdlite.node import Node
from hvdlite.timeline.recorder import Recorder
from hvdlite.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

_RING_STEP = 8  # times ``small_bytes``: the shortest step of a ring in which bytes hide the latency
PART_BYTES = 2 << 20
"""A node takes longer to reduce so much than to meet."""
_MOST_PARTS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Up to how many bytes a collective across nodes takes each algorithm; above all of them, the ring or a chain."""

    doubling_bytes: int
    halving_bytes: int
    tree_bytes: int

    def algorithm(self, nbytes: int) -> Algorithm:
        if nbytes <= self.doubling_bytes:
            return Algorithm.DOUBLING
        return Algorithm.HALVING if nbytes <= self.halving_bytes else Algorithm.RING


def limits_of(small_bytes: int, nodes: int) -> Limits:
    """Those between ``nodes``, if recursive doubling pays up to ``small_bytes`` between four of them.

    A message that takes a, and b for each of its bytes, makes recursive doubling take d (a + bB), recursive halving and
    doubling 2 h a + 2 (n-1)/n b B, with h = ceil(log2 n) and d = log2 n, or floor(log2 n) + 2 where n is no power of
    two. They are equal at B = a/b (2h - d) / (d - 2 (n-1)/n), which is 4 a/b on four nodes.

    The ring takes 2 (n-1) steps of B/n bytes. Where those are long it is as fast as the others, and its messages go to
    the next node only; where they are short it must not be taken. docs/algorithms.md has the measurements.
    """
    halving_bytes = _RING_STEP * small_bytes * nodes
    if nodes <= 2:  # all are the same, but for additions
        return Limits(small_bytes, halving_bytes, small_bytes)
    halvings = (nodes - 1).bit_length()
    doublings = halvings if nodes & (nodes - 1) == 0 else halvings + 1
    times = (2 * halvings - doublings) / (doublings - 2 * (nodes - 1) / nodes)
    return Limits(int(small_bytes / 4 * times), halving_bytes, small_bytes)


def parts_of(nbytes: int, rails: int, part_bytes: int, share_bytes: int) -> int:
    """Into how many parts a hierarchical allreduce is cut: the node works on one while another is between nodes.

    Args:
        part_bytes: of a part, at least.
        share_bytes: of a part, what each rail carries at least. Each part takes the steps of its algorithm, which cost
            little only where bytes cost more.
    """
    return max(1, min(_MOST_PARTS, nbytes // max(part_bytes, rails * share_bytes)))


def spin_us(config: Config, node: Node) -> int:
    """How long a rank may spin: one that spins keeps the core from the rank it waits for, where they share one."""
    return config.spin_us if node.local_size <= node.cores else 0


def build_backend(
    node: Node,
    comm_rail: MPI.Comm | None,
    topology: Topology,
    config: Config,
    check: Callable[[], None],
    recorder: Recorder,
) -> Backend:
    """The backend for all ranks of ``topology``; a collective call.

    Args:
        node: the ranks on this machine.
        comm_rail: private communicator of the ranks with this local rank on every node, in the order of nodes; None
            where a node has no such rank, or where there is one node only.
        check: raises once the job has failed.
    """
    nodes = topology.nodes

    def shm() -> ShmBackend:
        return ShmBackend(
            node,
            spin_us=spin_us(config, node),
            window_bytes=config.chunk_bytes if len(nodes) == 1 else 0,
            timeout_s=config.collective_timeout_s,
            check=check,
            recorder=recorder,
        )

    if len(nodes) == 1:
        return shm()
    # One node needs no MPI, and importing mpi4py starts MPI.
    from hvdlite.collectives.hierarchical import HierarchicalBackend
    from hvdlite.collectives.ring import RingBackend

    limits = limits_of(config.small_bytes, len(nodes))
    ring = None
    if comm_rail is not None:
        ring = RingBackend(
            comm_rail,
            ranks=[ranks[node.local_rank] for ranks in nodes],
            segment_bytes=config.segment_bytes,
            limits=limits,
            timeout_s=config.collective_timeout_s,
            check=check,
            recorder=recorder,
        )
    if ring is not None and all(len(ranks) == 1 for ranks in nodes):
        return ring
    place = {rank: number for number, rank in enumerate(topology.ranks)}  # backends count their ranks from 0
    places = tuple(tuple(place[rank] for rank in ranks) for ranks in nodes)
    return HierarchicalBackend(
        shm(),
        ring,
        places,
        place[topology.rank],
        one_rail_bytes=config.small_bytes,
        rails=config.rails,
        share_bytes=limits.halving_bytes,
    )
