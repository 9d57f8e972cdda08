"""Several nodes of several ranks: a node backend and a ring across nodes, composed.

The ranks with local rank r on every node form rail r. Each rail carries its own shard, so all network cards and
cores work. Nodes may be uneven: there are as many rails as the smallest node has ranks, and the ranks beyond
them take part within their node only.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.collectives.base import Backend, Range
from hvdlite.collectives.ring import RingBackend
from hvdlite.collectives.select import PART_BYTES, limits_of, parts_of
from hvdlite.collectives.shm import ShmBackend, share_of
from hvdlite.config import Config
from hvdlite.counters import Traffic
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.memory import Buffer, shard_bounds


class HierarchicalBackend(Backend):
    """Collectives between all ranks of ``nodes``.

    Args:
        node: this node's backend.
        cross: this rank's rail, in the order of ``nodes``; None for a rank beyond the rails.
        nodes: ranks of each node, in the order of local ranks.
        rank: of this process; one of ``nodes``.
        one_rail_bytes: up to this size only the leaders speak to other nodes.
        rails: above it, at most so many ranks of a node; 0 for no limit.
        part_bytes: an allreduce of so much or more is cut into parts of at least so much, so that the node reduces one
            while the network has another.
        share_bytes: what a rail carries of a part, at least: where a ring takes as long as other algorithms.
    """

    def __init__(
        self,
        node: ShmBackend,
        cross: RingBackend | None,
        nodes: tuple[tuple[int, ...], ...],
        rank: int,
        *,
        one_rail_bytes: int = 0,
        rails: int = 0,
        part_bytes: int = PART_BYTES,
        share_bytes: int = 0,
    ) -> None:
        self.rank = rank
        self.size = sum(len(ranks) for ranks in nodes)
        self._node = node
        self._cross = cross
        self._nodes = nodes
        self._index = next(index for index, ranks in enumerate(nodes) if rank in ranks)
        self._most_rails = min(len(ranks) for ranks in nodes)
        self._one_rail_bytes = one_rail_bytes
        self._rails_limit = rails or self._most_rails
        self._part_bytes = part_bytes
        self._share_bytes = share_bytes
        assert (node.size, nodes[self._index][node.rank]) == (len(nodes[self._index]), rank)
        assert (cross is not None) == (node.rank < self._most_rails)
        assert cross is None or (cross.rank, cross.size) == (self._index, len(nodes))

    @property
    def label(self) -> str:
        """What the next operation works on, for errors and the timeline."""
        return self._node.label

    @label.setter
    def label(self, label: str) -> None:
        self._node.label = label
        if self._cross is not None:
            self._cross.label = label

    @property
    def traffic(self) -> Traffic:
        return Traffic() if self._cross is None else self._cross.traffic

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        return self._node.allocate(numel, dtype)

    def allreduce(
        self, buf: Buffer, *, op: ReduceOp = ReduceOp.SUM, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        """Reduce-scatter in the node, allreduce of each shard on its rail, allgather in the node: two barriers in all.

        With n nodes and k rails a rank sends 2(n-1)/n * nbytes/k to other nodes. 16-bit floats are rounded once
        in the node and then on the rail. What is large is cut into parts: while one is between the nodes, the next is
        reduced within each node, and the one before is gathered there.
        """
        rails = self._rails(buf.nbytes)
        count = parts_of(buf.nbytes, rails, self._part_bytes, self._share_bytes)
        itemsize = buf.dtype.itemsize
        parts = [buf.narrow(*shard_bounds(buf.numel, count, number, itemsize)) for number in range(count)]
        carries = self._node.rank < rails
        shards = [shard_bounds(part.numel, rails, self._node.rank, itemsize) if carries else (0, 0) for part in parts]

        def reduce_in_node(number: int) -> None:
            self._node.open_reduce_scatter(parts[number], parts=rails, op=op, prescale=prescale)

        def gather_in_node(number: int) -> None:
            self._node.close_allgather(parts[number], [shards[number]])

        if carries:
            assert self._cross is not None
            own = [part.narrow(*shard) for part, shard in zip(parts, shards, strict=True)]
            self._cross.allreduce_each(own, op=op, postscale=postscale, prepare=reduce_in_node, deliver=gather_in_node)
            return
        for number in range(count):
            reduce_in_node(number)
            if number > 0:
                gather_in_node(number - 1)
        gather_in_node(count - 1)

    def reduce_scatter(
        self,
        buf: Buffer,
        *,
        parts: int,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """An allreduce, which leaves every rank with its part; twice the bytes that are needed across nodes."""
        assert 1 <= parts <= self.size, (parts, self.size)
        self.allreduce(buf, op=op, prescale=prescale, postscale=postscale)

    def allgather(self, buf: Buffer, blocks: Sequence[Sequence[Range]]) -> None:
        """Allgather in the node; each rail takes an equal share of every node's bytes around; the node spreads them."""
        assert len(blocks) == self.size, (len(blocks), self.size)
        itemsize = buf.dtype.itemsize
        rails = self._rails(itemsize * sum(stop - start for ranges in blocks for start, stop in ranges))
        self._node.allgather(buf, [blocks[rank] for rank in self._nodes[self._index]])
        arrived: list[Range] = []
        if self._cross is not None and self._node.rank < rails:
            shares = [  # of every node, what this rail carries
                [part[1:] for part in share_of([blocks[rank] for rank in ranks], rails, self._node.rank, itemsize)]
                for ranks in self._nodes
            ]
            self._cross.allgather(buf, shares)
            arrived = [part for index, parts in enumerate(shares) if index != self._index for part in parts]
        self._node.close_allgather(buf, arrived)

    def broadcast(self, buf: Buffer, root: int) -> None:
        """Broadcast in the root's node; each rail carries its shard to the other nodes, which spread them."""
        origin = next(index for index, ranks in enumerate(self._nodes) if root in ranks)
        rails = self._rails(buf.nbytes)
        shards = [shard_bounds(buf.numel, rails, rail, buf.dtype.itemsize) for rail in range(rails)]
        if self._index == origin:
            self._node.broadcast(buf, self._nodes[origin].index(root))
        if self._cross is not None and self._node.rank < rails:
            self._cross.broadcast(buf.narrow(*shards[self._node.rank]), origin)
        if self._index != origin:
            self._node.allgather(buf, [[shard] for shard in shards] + [[]] * (self._node.size - rails))

    def barrier(self) -> None:
        self._node.barrier()
        if self._cross is not None and self._node.rank == 0:
            self._cross.barrier()
        self._node.barrier()

    def configure(self, config: Config) -> None:
        self._one_rail_bytes = config.small_bytes
        self._rails_limit = config.rails or self._most_rails
        self._share_bytes = limits_of(config.small_bytes, len(self._nodes)).halving_bytes
        if self._cross is not None:
            self._cross.configure(config)

    def close(self) -> None:
        self._node.close()
        if self._cross is not None:
            self._cross.close()

    def _rails(self, nbytes: int) -> int:
        """How many rails share ``nbytes``."""
        return 1 if nbytes <= self._one_rail_bytes else min(self._rails_limit, self._most_rails)
