"""Which backend serves which ranks: the one place that decides.

    device  nodes    ranks per node     backend
    cpu     one      any                shm
    cpu     several  one on every node  ring
    cpu     several  otherwise          hierarchical: shm in the node, one ring per rail across

Within a backend, bytes decide: ring takes recursive doubling up to ``small_bytes``, hierarchical uses one rail
up to the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdlite.collectives.base import Backend
from hvdlite.collectives.shm import ShmBackend
from hvdlite.config import Config
from hvdlite.node import Node
from hvdlite.timeline.recorder import Recorder
from hvdlite.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI


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

    ring = None
    if comm_rail is not None:
        ring = RingBackend(
            comm_rail,
            ranks=[ranks[node.local_rank] for ranks in nodes],
            segment_bytes=config.segment_bytes,
            small_bytes=config.small_bytes,
            timeout_s=config.collective_timeout_s,
            check=check,
            recorder=recorder,
        )
    if ring is not None and all(len(ranks) == 1 for ranks in nodes):
        return ring
    place = {rank: number for number, rank in enumerate(topology.ranks)}  # backends count their ranks from 0
    places = tuple(tuple(place[rank] for rank in ranks) for ranks in nodes)
    return HierarchicalBackend(
        shm(), ring, places, place[topology.rank], one_rail_bytes=config.small_bytes, rails=config.rails
    )
