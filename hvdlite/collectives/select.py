"""Which backend serves which ranks: the one place that decides.

    nodes    ranks per node     backend                                                  alltoall
    one      any                shm                                                      windows of shared memory
    several  one on every node  ring                                                     MPI
    several  otherwise          hierarchical: shm in the node, one ring per rail across  MPI

Within a backend, bytes decide: across nodes, `thresholds.limits_of`; hierarchical uses one rail up to ``small_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdlite._native import ReadyCounts
from hvdlite.collectives.across_nodes import AcrossNodes
from hvdlite.collectives.adder import HostAdder
from hvdlite.collectives.base import Backend
from hvdlite.collectives.early import MOST_BYTES, EarlyAllreduce
from hvdlite.collectives.exchange import Exchange
from hvdlite.collectives.shm import ShmBackend
from hvdlite.collectives.thresholds import limits_of
from hvdlite.config import Config
from hvdlite.memory.base import Memory
from hvdlite.node import Node
from hvdlite.recorder import Recorder
from hvdlite.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

    from hvdlite.collectives.hierarchical import HierarchicalBackend
    from hvdlite.collectives.ring import RingBackend

_OFFERS = 4  # times as long (8 ranks on 2 cores, 4 KiB: 225 us where nobody looks, 189 at 1, 74 at 4, 101 at 20)


def spin_us(config: Config, node: Node) -> int:
    """How long a rank looks for others before it sleeps.

    Where ranks share cores it looks for longer: it offers the core to the others with every look, and several of them
    have to have had it before what it waits for is there.
    """
    return config.spin_us if node.local_size <= node.cores else _OFFERS * config.spin_us


def build_backend(
    node: Node,
    memory: Memory,
    counts: ReadyCounts,
    cross: RingBackend | None,
    topology: Topology,
    config: Config,
    check: Callable[[], None],
    recorder: Recorder,
) -> Backend:
    """The backend for all ranks of ``topology``; a collective call.

    Args:
        node: the ranks on this machine.
        memory: of ``node``.
        counts: likewise.
        cross: of the ranks with this local rank on every node; None where a node has no such rank, or is the only one.
        check: raises once the world has failed.
    """
    nodes = topology.nodes

    def shm() -> ShmBackend:
        return ShmBackend(
            node,
            memory,
            spin_us=spin_us(config, node),
            window_bytes=config.chunk_bytes if len(nodes) == 1 else 0,
            timeout_s=config.collective_timeout_s,
            check=check,
            recorder=recorder,
        )

    if len(nodes) == 1:
        return shm()
    backend: AcrossNodes | None = cross
    if cross is None or any(len(ranks) > 1 for ranks in nodes):
        backend = hierarchical(shm(), cross, topology, config)
    assert backend is not None
    backend.early = EarlyAllreduce(
        cross if topology.is_leader else None,
        memory.allocate(MOST_BYTES),
        node.share(EarlyAllreduce.turns_bytes(node.local_size)),
        counts,
        memory,
        nodes=[len(ranks) for ranks in nodes],
        ranks=node.ranks,
        spin_us=spin_us(config, node),
        timeout_s=config.collective_timeout_s,
        check=check,
        recorder=recorder,
    )
    backend.early.configure(config)
    return backend


def build_exchange(
    backend: Backend,
    comm: MPI.Comm | None,
    topology: Topology,
    config: Config,
    check: Callable[[], None],
    recorder: Recorder,
) -> Exchange:
    """What carries an alltoall between all ranks of ``topology``.

    Args:
        backend: what `build_backend` has chosen.
        comm: of these ranks, and private; None on one node.
    """
    if isinstance(backend, ShmBackend):
        assert backend.exchange is not None
        return backend.exchange
    from hvdlite.collectives.pairwise import PairwiseExchange  # importing mpi4py starts MPI

    assert comm is not None
    return PairwiseExchange(comm, topology.ranks, timeout_s=config.collective_timeout_s, check=check, recorder=recorder)


def build_ring(
    node: Node,
    memory: Memory,
    comm_rail: MPI.Comm,
    topology: Topology,
    config: Config,
    check: Callable[[], None],
    recorder: Recorder,
) -> RingBackend:
    """The backend between the ranks with this local rank on every node.

    Args:
        comm_rail: private communicator of these ranks, in the order of nodes.
    """
    # One node needs no MPI, and importing mpi4py starts MPI.
    from hvdlite.collectives import mpi_functions
    from hvdlite.collectives.requests import Endpoint
    from hvdlite.collectives.ring import RingBackend

    return RingBackend(
        Endpoint(
            comm_rail,
            ranks=[ranks[node.local_rank] for ranks in topology.nodes],
            timeout_s=config.collective_timeout_s,
            check=check,
            functions=mpi_functions.loaded() if config.prepared_operations else None,
        ),
        memory,
        HostAdder(),
        segment_bytes=config.segment_bytes,
        limits=limits_of(config.small_bytes, len(topology.nodes)),
        recorder=recorder,
    )


def hierarchical(node: Backend, cross: Backend | None, topology: Topology, config: Config) -> HierarchicalBackend:
    """``node`` within each node, ``cross`` between those with the same local rank."""
    from hvdlite.collectives.hierarchical import HierarchicalBackend

    place = {rank: number for number, rank in enumerate(topology.ranks)}  # backends count their ranks from 0
    return HierarchicalBackend(
        node,
        cross,
        tuple(tuple(place[rank] for rank in ranks) for ranks in topology.nodes),
        place[topology.rank],
        one_rail_bytes=config.small_bytes,
        rails=config.rails,
        share_bytes=limits_of(config.small_bytes, len(topology.nodes)).halving_bytes,
    )
