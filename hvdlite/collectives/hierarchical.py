"""Several nodes of several ranks: any backend within a node and any across nodes, composed by their contract.

The ranks with local rank r on every node form rail r. Each rail carries its own shard, so all network cards and
cores work. Nodes may be uneven: there are as many rails as the smallest node has ranks, and the ranks beyond
them take part within their node only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvdlite.collectives.across_nodes import AcrossNodes
from hvdlite.collectives.base import DONE, Backend, Completion
from hvdlite.collectives.thresholds import PART_BYTES, limits_of, parts_of
from hvdlite.config import Config
from hvdlite.counters import Traffic
from hvdlite.dtypes import SUM, DType, Reduction
from hvdlite.memory.layout import Range, shard_bounds, share_of
from hvdlite.memory.views import Buffer


class HierarchicalBackend(AcrossNodes):
    """Collectives between all ranks of ``nodes``.

    Args:
        node: this node's backend; its memory is that of all.
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
        node: Backend,
        cross: Backend | None,
        nodes: tuple[tuple[int, ...], ...],
        rank: int,
        *,
        one_rail_bytes: int,
        rails: int = 0,
        part_bytes: int = PART_BYTES,
        share_bytes: int = 0,
    ) -> None:
        self.rank = rank
        self.size = sum(len(ranks) for ranks in nodes)
        self.memory = node.memory
        self.recorder = node.recorder
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
    def traffic(self) -> Traffic:
        return Traffic() if self._cross is None else self._cross.traffic

    def allreduce(self, buf: Buffer, reduction: Reduction = SUM, *, label: str = "") -> Completion:
        """Reduce-scatter in the node, allreduce of each shard on its rail, allgather in the node: two barriers in all.

        With n nodes and k rails a rank sends 2(n-1)/n * nbytes/k to other nodes. 16-bit floats are rounded once
        in the node and then on the rail. What is large is cut into parts: while one is between the nodes, the next is
        reduced within each node, and the one before is gathered there.
        """
        in_node, across = reduction.split()
        rails = self._rails(buf.nbytes)
        cross = self._cross if self._node.rank < rails else None
        count = parts_of(buf.nbytes, rails, self._part_bytes, self._share_bytes)
        itemsize = buf.dtype.itemsize
        parts = [buf.narrow(*shard_bounds(buf.numel, count, number, itemsize)) for number in range(count)]
        shards = [self._rail_blocks([shard_bounds(p.numel, rails, r, itemsize)] for r in range(rails)) for p in parts]
        between_nodes: Completion = DONE
        for number, (part, blocks) in enumerate(zip(parts, shards, strict=True)):
            self._node.reduce_scatter(part, blocks, in_node, stays_open=True, label=label).wait()
            before = between_nodes
            if cross is not None:
                ((start, stop),) = blocks[self._node.rank]
                between_nodes = cross.allreduce(part.narrow(start, stop), across, label=label)
            before.wait()
            if number > 0:
                self._node.allgather(parts[number - 1], shards[number - 1], closes=True, label=label).wait()
        between_nodes.wait()
        return self._node.allgather(parts[-1], shards[-1], closes=True, label=label)

    def reduce_scatter(
        self,
        buf: Buffer,
        blocks: Sequence[Sequence[Range]],
        reduction: Reduction = SUM,
        *,
        stays_open: bool = False,
        label: str = "",
    ) -> Completion:
        """Each rail reduces its share of every node's blocks in the node, then across nodes; the node spreads its own.

        With n nodes and k rails a rank sends (n-1)/n * nbytes/k to other nodes.
        """
        in_node, across = reduction.split()
        itemsize = buf.dtype.itemsize
        rails = self._rails(itemsize * _total(blocks))
        shares = [self._shares(blocks, rails, rail, itemsize) for rail in range(rails)]
        carried = self._rail_blocks([part for ranges in share for part in ranges] for share in shares)
        self._node.reduce_scatter(buf, carried, in_node, stays_open=True, label=label).wait()
        if self._cross is not None and self._node.rank < rails:
            self._cross.reduce_scatter(buf, shares[self._node.rank], across, label=label).wait()
        own = self._rail_blocks(share[self._index] for share in shares)
        return self._node.allgather(buf, own, closes=True, label=label)

    def allgather(
        self, buf: Buffer, blocks: Sequence[Sequence[Range]], *, closes: bool = False, label: str = ""
    ) -> Completion:
        """Allgather in the node; each rail takes an equal share of every node's bytes around; the node spreads them."""
        assert len(blocks) == self.size, (len(blocks), self.size)
        itemsize = buf.dtype.itemsize
        rails = self._rails(itemsize * _total(blocks))
        in_node = [blocks[rank] for rank in self._nodes[self._index]]
        self._node.allgather(buf, in_node, closes=closes, label=label).wait()
        shares = [self._shares(blocks, rails, rail, itemsize) for rail in range(rails)]
        if self._cross is not None and self._node.rank < rails:
            self._cross.allgather(buf, shares[self._node.rank], label=label).wait()
        arrived = self._rail_blocks(
            [part for index, ranges in enumerate(share) if index != self._index for part in ranges] for share in shares
        )
        return self._node.allgather(buf, arrived, closes=True, label=label)

    def broadcast(self, buf: Buffer, root: int, *, label: str = "") -> Completion:
        """Broadcast in the root's node; each rail carries its shard to the other nodes, which spread them."""
        origin = next(index for index, ranks in enumerate(self._nodes) if root in ranks)
        rails = self._rails(buf.nbytes)
        shards = [shard_bounds(buf.numel, rails, rail, buf.dtype.itemsize) for rail in range(rails)]
        if self._index == origin:
            self._node.broadcast(buf, self._nodes[origin].index(root), label=label).wait()
        if self._cross is not None and self._node.rank < rails:
            self._cross.broadcast(buf.narrow(*shards[self._node.rank]), origin, label=label).wait()
        if self._index == origin:
            return DONE
        return self._node.allgather(buf, self._rail_blocks([shard] for shard in shards), label=label)

    def barrier(self) -> None:
        self._node.barrier()
        if self._cross is not None and self._node.rank == 0:
            self._cross.barrier()
        self._node.barrier()

    def prepare(self, buf: Buffer) -> None:
        self._node.prepare(buf)

    def configure(self, config: Config) -> None:
        super().configure(config)
        self._one_rail_bytes = config.small_bytes
        self._rails_limit = config.rails or self._most_rails
        self._share_bytes = limits_of(config.small_bytes, len(self._nodes)).halving_bytes
        if self._cross is not None:
            self._cross.configure(config)

    def supports(self, dtype: DType) -> bool:
        return self._node.supports(dtype)

    def late(self) -> Sequence[int]:
        return [self._nodes[self._index][local_rank] for local_rank in self._node.late()]

    def check_health(self) -> None:
        self._node.check_health()

    def wake(self) -> None:
        self._node.wake()

    def close(self) -> None:
        self._node.close()
        if self._cross is not None:
            self._cross.close()

    def _rails(self, nbytes: int) -> int:
        """How many rails share ``nbytes``."""
        return 1 if nbytes <= self._one_rail_bytes else min(self._rails_limit, self._most_rails)

    def _shares(self, blocks: Sequence[Sequence[Range]], rails: int, rail: int, itemsize: int) -> list[list[Range]]:
        """Of every node's blocks, what ``rail`` carries."""
        return [
            [part[1:] for part in share_of([blocks[rank] for rank in ranks], rails, rail, itemsize)]
            for ranks in self._nodes
        ]

    def _rail_blocks(self, by_rail: Iterable[Sequence[Range]]) -> list[Sequence[Range]]:
        """Blocks of this node's ranks, of which those beyond the rails have none."""
        blocks = list(by_rail)
        return blocks + [[]] * (self._node.size - len(blocks))


def _total(blocks: Sequence[Sequence[Range]]) -> int:
    return sum(stop - start for ranges in blocks for start, stop in ranges)
