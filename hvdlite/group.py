"""Everything that one process set owns: communicators, shared page, backend, fusion buffers, coordinator thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdlite.collectives.select import build_backend
from hvdlite.config import Config
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.execute import Executor
from hvdlite.coordinator.thread import Coordinator
from hvdlite.coordinator.tree import Tree
from hvdlite.dtypes import DType
from hvdlite.fusion.fusion_buffer import FusionBuffers
from hvdlite.memory import align_up
from hvdlite.node import Node
from hvdlite.timeline.recorder import Recorder
from hvdlite.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI


class Group:
    """The machinery of one process set. Collective to build, over ``comm``; None where it is this process alone."""

    def __init__(
        self,
        comm: MPI.Comm | None,
        topology: Topology,
        node: Node,
        config: Config,
        recorder: Recorder,
        *,
        check: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
        on_notice: Callable[[dict[str, Any]], None],
    ) -> None:
        self.topology = topology
        self.node = node
        self._comm = comm
        self._check = check
        self.leaders: MPI.Comm | None = None  # rank in it = node index; on leaders of several nodes
        self._rail: MPI.Comm | None = None
        if comm is not None and len(topology.nodes) > 1:
            self.leaders = _split(comm, topology.is_leader, 0, topology.node_index)
            self._rail = _split(comm, topology.local_rank < topology.rails, topology.local_rank, topology.node_index)

        several_nodes = len(topology.nodes) > 1
        self._backend = build_backend(node, self._rail, topology.nodes, topology.rank, config, check, recorder)
        self.buffers = FusionBuffers(node)
        executor = Executor(
            self._backend,
            self._backend.allocate(align_up(config.staging_bytes), DType.UINT8),
            # On one node a chunk stays in cache on its way; across nodes it should fill the wire.
            config.staging_bytes if several_nodes else config.chunk_bytes,
            self.buffers,
            len(topology.nodes),
            recorder,
        )
        self._tree = Tree(
            None if self.leaders is None else self.leaders.Dup(),
            topology.parent(config.tree_fanout),
            topology.children(config.tree_fanout),
        )
        self.coordinator = Coordinator(
            topology,
            ControlPage(node),
            self._tree,
            executor,
            config,
            recorder,
            check=check,
            on_fatal=on_fatal,
            on_notice=on_notice,
        )

    def barrier(self) -> None:
        """Of the coordinator threads; called on them only."""
        self._backend.barrier()

    def release(self) -> None:
        """Free the communicators; collective, the last thing that the coordinator threads do together."""
        self._backend.close()
        self._tree.close(self._check)
        for comm in (self._rail, self.leaders, self._comm):
            if comm is not None:
                comm.Free()


def _split(comm: MPI.Comm, included: bool, color: int, key: int) -> MPI.Comm | None:
    """The ranks of one color, ordered by key; None for those not included. Collective over ``comm``."""
    from mpi4py import MPI

    part = comm.Split(color if included else MPI.UNDEFINED, key)
    return part if included else None
