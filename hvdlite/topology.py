"""Who is where: ranks, nodes and leaders, as plain facts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The place of ``rank`` among ``nodes``, each a tuple of ranks in the order of local ranks.

    Ranks are those of the job, of which ``nodes`` may hold some only: the members of a process set.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]

    @cached_property
    def size(self) -> int:
        return sum(len(node) for node in self.nodes)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(sorted(rank for node in self.nodes for rank in node))

    @cached_property
    def node_index(self) -> int:
        return next(i for i, node in enumerate(self.nodes) if self.rank in node)

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.nodes[self.node_index]

    @cached_property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @cached_property
    def local_size(self) -> int:
        return len(self.local_ranks)

    @cached_property
    def cross_rank(self) -> int:
        """Place among the ranks of all nodes that have the same local rank."""
        return sum(len(node) > self.local_rank for node in self.nodes[: self.node_index])

    @cached_property
    def cross_size(self) -> int:
        """How many nodes have a rank with this local rank."""
        return sum(len(node) > self.local_rank for node in self.nodes)

    @cached_property
    def is_homogeneous(self) -> bool:
        return len({len(node) for node in self.nodes}) == 1

    @cached_property
    def rails(self) -> int:
        """Local ranks that every node has: how many of a node's ranks take part in exchanges across nodes."""
        return min(len(node) for node in self.nodes)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The rank that speaks for each node."""
        return tuple(node[0] for node in self.nodes)

    @cached_property
    def is_leader(self) -> bool:
        return self.local_rank == 0

    def parent(self, fanout: int) -> int | None:
        """Node index of this node's parent in the tree of leaders; None at the root, node 0."""
        return (self.node_index - 1) // fanout if self.node_index else None

    def children(self, fanout: int) -> tuple[int, ...]:
        """Node indices of this node's children in the tree of leaders."""
        first = self.node_index * fanout + 1
        return tuple(range(first, min(first + fanout, len(self.nodes))))

    def subtree_ranks(self, node_index: int, fanout: int) -> tuple[int, ...]:
        """All ranks of the nodes below ``node_index`` and its own, ascending."""
        ranks: list[int] = []
        pending = [node_index]
        while pending:
            index = pending.pop()
            ranks.extend(self.nodes[index])
            first = index * fanout + 1
            pending.extend(range(first, min(first + fanout, len(self.nodes))))
        return tuple(sorted(ranks))
