"""What an allreduce costs across nodes: exact messages and bytes of a rank, and a model of the time.

Messages come from the schedules that hvdlite executes (hvdlite/collectives/algorithms.py). Times are those of LogGP
(Alexandrov et al. 1995, doi:10.1145/215399.215427): latency, overhead per message, time per byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from hvdlite.collectives import algorithms
from hvdlite.collectives.thresholds import PART_BYTES, limits_of, parts_of
from hvdlite.config import Config
from hvdlite.counters import Traffic
from hvdlite.memory.layout import shard_bounds
from hvdlite.topology import Topology
from schedules import DTYPE


@dataclass(frozen=True)
class Machine:
    """Seconds, and bytes per second. By default nodes with 100 Gbit/s and MPI over TCP; benchmarks/README.md says where
    the costs of Python come from."""

    latency_s: float = 20e-6  # of a message between nodes, from call to call
    link_bytes_per_s: float = 12.5e9  # of a node, in each direction
    memory_bytes_per_s: float = 100e9  # of a node, read and written by all its ranks together
    wake_s: float = 30e-6  # from a ring of a rank's doorbell until its coordinator runs
    cycle_s: float = 10e-6  # of a coordinator's look at everything it serves
    message_s: float = 5e-6  # to read or write a control message
    send_s: float = 5e-6  # to hand a control message to the kernel
    piece_s: float = 12e-6  # to send, receive and add one message of a ring


def traffic(topology: Topology, nbytes: int, config: Config) -> Traffic:
    """What the rank of ``topology`` sends and receives for one allreduce of ``nbytes`` in their home."""
    result = Traffic()
    nodes, rails = len(topology.nodes), topology.rails
    if topology.size > nodes and nbytes <= config.small_bytes:
        rails = 1
    if nodes == 1 or topology.local_rank >= rails:
        return result
    limits = limits_of(config.small_bytes, nodes)
    parts = parts_of(nbytes, rails, PART_BYTES, limits.halving_bytes) if topology.size > nodes else 1
    for part in range(parts):
        first, last = shard_bounds(nbytes // DTYPE.itemsize, parts, part, DTYPE.itemsize)
        begin, end = shard_bounds(last - first, rails, topology.local_rank, DTYPE.itemsize)
        numel = end - begin
        algorithm = limits.algorithm(numel * DTYPE.itemsize)
        schedule = algorithms.allreduce(
            algorithm, numel, DTYPE.itemsize, topology.node_index, nodes, config.segment_bytes
        )
        for sent in schedule.outgoing:
            result.sent((sent.stop - sent.start) * DTYPE.itemsize)
        for received in schedule.arriving:
            result.received((received.stop - received.start) * DTYPE.itemsize)
    return result


def hierarchical_s(nodes: int, local_size: int, nbytes: int, machine: Machine, config: Config) -> float:
    """As hvdlite does it: reduce-scatter in each node, an allreduce across nodes by each rail, allgather in it."""
    rails = local_size if nbytes > config.small_bytes else 1
    limits = limits_of(config.small_bytes, nodes)
    parts = parts_of(nbytes, rails, PART_BYTES, limits.halving_bytes) if local_size > 1 else 1
    share = nbytes / parts / rails
    algorithm = limits.algorithm(ceil(share))
    if algorithm is algorithms.Algorithm.DOUBLING:
        rounds = ceil(log2(nodes))
        across = rounds * (machine.latency_s + machine.piece_s + share * rails / machine.link_bytes_per_s)
    elif algorithm is algorithms.Algorithm.HALVING:
        across = _halving_s(nodes, share, machine.link_bytes_per_s / rails, machine, config)
    else:
        across = _ring_s(nodes, share, machine.link_bytes_per_s / rails, machine, config)
    # While one part is between nodes, the nodes work on its neighbours.
    in_node = _in_node_s(local_size, nbytes // parts, machine)
    return in_node + across + (parts - 1) * max(in_node, across)


def flat_ring_s(nodes: int, local_size: int, nbytes: int, machine: Machine, config: Config) -> float:
    """One ring through all ranks, node by node: every step waits for the links between nodes."""
    if nodes == 1:
        return _in_node_s(local_size, nbytes, machine)
    return _ring_s(nodes * local_size, nbytes, machine.link_bytes_per_s, machine, config)


def rings_s(nodes: int, local_size: int, nbytes: int, machine: Machine, config: Config) -> float:
    """`hierarchical_s`, but a ring across nodes for each rail, whatever the size."""
    across = _ring_s(nodes, nbytes / local_size, machine.link_bytes_per_s / local_size, machine, config)
    return _in_node_s(local_size, nbytes, machine) + across


Algorithm = Callable[[int, int, int, Machine, Config], float]
"""(nodes, ranks of each, bytes, machine, config) -> seconds from the last rank's begin to the end."""


def _ring_s(ranks: int, nbytes: float, bytes_per_s: float, machine: Machine, config: Config) -> float:
    """2(n-1) steps, in each of which a shard moves on, in pieces that follow one another."""
    if ranks == 1:
        return 0.0
    shard = nbytes / ranks
    pieces = max(1, ceil(shard / config.segment_bytes))
    wire_s = shard / pieces / bytes_per_s
    return 2 * (ranks - 1) * max(pieces * max(machine.piece_s, wire_s), machine.latency_s + machine.piece_s + wire_s)


def _halving_s(ranks: int, nbytes: float, bytes_per_s: float, machine: Machine, config: Config) -> float:
    """2 ceil(log2(n)) rounds, in which pieces follow one another."""
    moved = 2 * (ranks - 1) / ranks * nbytes
    busy_s = max(moved / bytes_per_s, moved / config.segment_bytes * machine.piece_s)
    return 2 * ceil(log2(ranks)) * (machine.latency_s + machine.piece_s) + busy_s


def _in_node_s(local_size: int, nbytes: int, machine: Machine) -> float:
    """Every copy is read once and written once, between two barriers."""
    if local_size == 1:
        return 0.0
    return 2 * local_size * nbytes / machine.memory_bytes_per_s + 2 * machine.wake_s
