"""An array that is summed over the ranks in one of several ways, and the bounds of that: a copy, and the wire."""

from __future__ import annotations

import ctypes
import select
import socket
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

import hvdlite
import hvdlite.torch as hvd
from hvdlite import _native
from hvdlite.collectives.base import Backend
from hvdlite.collectives.select import build_backend, build_ring
from hvdlite.config import Config
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.dtypes import DType
from hvdlite.links import interfaces
from hvdlite.memory.host import HostMemory
from hvdlite.node import discover
from hvdlite.operations.allocate import allocate
from hvdlite.recorder import Recorder
from hvdlite.topology import Topology
from peers import PIECE_BYTES, with_coll_sm

if TYPE_CHECKING:
    from mpi4py import MPI

_LOW_WATER_BYTES = 256 << 10


class Way(ABC):
    """One way to sum ``array`` over the ranks, in place.

    Attributes:
        array: (numel of the largest size,) float32, where this way likes it best.
        is_peer: whether somebody could use it instead of hvdlite.
        is_bound: whether it is no sum, but what a sum cannot do without.
    """

    label: str
    is_peer = False
    is_bound = False
    array: np.ndarray

    @abstractmethod
    def prepare(self, numel: int) -> None:
        """The next calls sum ``array[:numel]``."""

    @abstractmethod
    def call(self) -> None: ...

    def expected_scale(self, ranks: int, calls: int) -> float:
        """What the pattern has been multiplied by after ``calls``; rank r contributes r + 1 times the pattern."""
        return ranks * (ranks + 1) / 2 * float(ranks) ** (calls - 1)


class Memcpy(Way):
    """One copy of the same bytes on all ranks at once, from one private array to another."""

    label = "memcpy"
    is_bound = True

    def __init__(self, rank: int, numel: int) -> None:
        self._source = np.full(numel, rank + 1, np.float32)
        self.array = np.empty(numel, np.float32)
        self._rank = rank

    def prepare(self, numel: int) -> None:
        np.copyto(self._source[:numel], self.array[:numel])
        self.array[:numel] = 0
        self._arguments = (self.array.ctypes.data, self._source.ctypes.data, 4 * numel)

    def call(self) -> None:
        _native.copy(*self._arguments)

    def expected_scale(self, ranks: int, calls: int) -> float:
        return float(self._rank + 1)


class Wire(Way):
    """What each of N hosts must send for an allreduce, 2 (N - 1) / N of the bytes, over one TCP connection to the next.

    All hosts at the same time; a collective call. Ranks other than a host's first do nothing.
    """

    label = "TCP"
    is_bound = True

    def __init__(self, comm: MPI.Comm, topology: Topology, array: np.ndarray) -> None:
        self.array = array
        self._hosts = len(topology.nodes)
        self._rank = comm.rank
        self._next: socket.socket | None = None
        address = interfaces.select(Config.from_env().network_interfaces)[0].address
        with socket.create_server((address, 0)) as listener:
            addresses: list[tuple[str, int]] = comm.allgather(listener.getsockname())
            if topology.is_leader:
                following = topology.leaders[(topology.node_index + 1) % self._hosts]
                self._next = socket.create_connection(addresses[following])
                self._previous = listener.accept()[0]
                self._arrival = select.poll()
                self._arrival.register(self._previous, select.POLLIN)

    def prepare(self, numel: int) -> None:
        nbytes = 2 * (self._hosts - 1) * 4 * numel // self._hosts
        self._outgoing, self._incoming = bytes(nbytes), memoryview(bytearray(nbytes))

    def call(self) -> None:
        if self._next is None:
            return
        sender = threading.Thread(target=self._next.sendall, args=(self._outgoing,))
        sender.start()
        received = 0
        while received < len(self._incoming):
            # Woken for every packet, the receiver takes twice the processor time. Poll tells when the mark is reached;
            # recv would sleep on with a part of the bytes in its hands, as only what is left in the queue counts.
            mark = min(_LOW_WATER_BYTES, len(self._incoming) - received)
            self._previous.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
            self._arrival.poll()
            received += self._previous.recv_into(self._incoming[received:], 0, socket.MSG_DONTWAIT)
        sender.join()

    def expected_scale(self, ranks: int, calls: int) -> float:
        return float(self._rank + 1)


class HvdliteBackend(Way):
    """What the coordinator calls, called by this thread: what the collective itself costs."""

    label = "hvdlite backend"

    def __init__(self, comm: MPI.Comm, numel: int) -> None:
        from mpi4py import MPI

        runtime = hvdlite.runtime()
        nodes, node = discover(comm, runtime.config.start_timeout_s)
        topology = Topology(comm.rank, nodes)
        rail = None
        if len(nodes) > 1:
            takes_part = topology.local_rank < topology.rails
            rail = comm.Split(topology.local_rank if takes_part else MPI.UNDEFINED, topology.node_index)
        memory, rest = HostMemory(node), (topology, runtime.config, runtime.check, Recorder())
        cross = None if rail in (None, MPI.COMM_NULL) else build_ring(node, memory, rail, *rest)
        self._backend: Backend = build_backend(node, memory, ControlPage(node).counts, cross, *rest)
        self._all = self._backend.memory.allocate(4 * numel).buffer(0, numel, DType.FLOAT32)
        self.array = np.ctypeslib.as_array((ctypes.c_float * numel).from_address(self._all.address))

    def prepare(self, numel: int) -> None:
        self._buffer = self._all.narrow(0, numel)

    def call(self) -> None:
        self._backend.allreduce(self._buffer).wait()


class Hvdlite(Way):
    """What users call: through the coordinator, whether ``array`` lives in a fusion buffer or elsewhere."""

    def __init__(self, label: str, array: np.ndarray) -> None:
        self.label = label
        self.array = array

    def prepare(self, numel: int) -> None:
        self._tensor = torch.from_numpy(self.array[:numel])
        self._name = f"{self.label}, {numel}"

    def call(self) -> None:
        hvd.allreduce_(self._tensor, op=hvd.Sum, name=self._name)


class Mpi(Way):
    is_peer = True

    def __init__(self, label: str, comm: MPI.Comm, array: np.ndarray) -> None:
        from mpi4py import MPI

        self.label = label
        self.array = array
        self._comm = comm
        self._in_place = MPI.IN_PLACE

    def prepare(self, numel: int) -> None:
        self._part = self.array[:numel]

    def call(self) -> None:
        self._comm.Allreduce(self._in_place, self._part)


class MpiPieces(Mpi):
    """One call after the other, for pieces that fit into the cache."""

    def prepare(self, numel: int) -> None:
        step = PIECE_BYTES // self.array.itemsize
        self._parts = [self.array[start : min(start + step, numel)] for start in range(0, numel, step)]

    def call(self) -> None:
        for part in self._parts:
            self._comm.Allreduce(self._in_place, part)


class Gloo(Way):
    label = "Gloo"
    is_peer = True

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def prepare(self, numel: int) -> None:
        self._tensor = torch.from_numpy(self.array[:numel])

    def call(self) -> None:
        dist.all_reduce(self._tensor)


def ways(comm: MPI.Comm, numel: int) -> list[Way]:
    """All that this job can run; a collective call."""
    runtime = hvdlite.runtime()
    elsewhere = torch.empty(numel, dtype=torch.float32).numpy()  # where users have theirs
    slot = allocate(runtime.group, 4 * numel).memory.view(np.float32)
    found: list[Way] = [Memcpy(comm.rank, numel)]
    if len(runtime.topology.nodes) > 1:
        found.append(Wire(comm, runtime.topology, elsewhere))
    found += [
        HvdliteBackend(comm, numel),
        Hvdlite("hvd, in its slot", slot),
        Hvdlite("hvd, elsewhere", elsewhere),
        Mpi("MPI", comm.Dup(), elsewhere),
        MpiPieces("MPI, pieces", comm.Dup(), elsewhere),
    ]
    coll_sm = with_coll_sm(comm) if len(runtime.topology.nodes) == 1 else None
    if coll_sm is not None:
        found.append(Mpi("MPI coll/sm", coll_sm, elsewhere))
    return [*found, Gloo(elsewhere)]
