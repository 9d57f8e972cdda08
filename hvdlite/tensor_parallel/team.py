"""Teams: the ranks that hold the parts of the same layers."""

from __future__ import annotations

import logging

import torch

from hvdlite.coordinator.request import rank_list
from hvdlite.errors import UsageError
from hvdlite.group import Group
from hvdlite.tensor_parallel.alone import LoneCarrier
from hvdlite.tensor_parallel.carrier import Carrier
from hvdlite.tensor_parallel.unfused import UnfusedCarrier
from hvdlite.tensor_parallel.window import WindowCarrier
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set

_LOG = logging.getLogger("hvdlite")

METHODS = ("auto", "window", "unfused")


class Team:
    """The ranks of ``process_set``, which hold the parts of the same layers and work on the same batch.

    Every rank of a team makes the same calls of `hvdlite.tensor_parallel` in the same order, from one thread at a time.

    Args:
        process_set: registered; only its members make a team of it.
        method: "window": through shared memory, which needs one node; "unfused": by hvdlite's operations; "auto": the
            first where there is one node, else the second.

    Raises:
        ValueError: ``method`` is none of these; this rank is no member.
        UsageError: ``method`` is "window", and the ranks are on several nodes.
    """

    def __init__(self, process_set: ProcessSet = global_process_set, method: str = "auto") -> None:
        if method not in METHODS:
            raise ValueError(f"method is {method!r}; pass one of {', '.join(map(repr, METHODS))}")
        self.process_set = check_process_set(process_set)
        self.method = method
        self._made: tuple[Group, Carrier] | None = None
        self._check_nodes(process_set.group())

    @property
    def size(self) -> int:
        return self.process_set.size()

    @property
    def rank(self) -> int:
        """This process's place in the team."""
        return self.process_set.rank()

    @property
    def carrier(self) -> Carrier:
        """What moves rows. The first use, and the first after a new hvd.init(), are collective."""
        group = self.process_set.group()
        if self._made is None or self._made[0] is not group:
            self._made = group, self._carrier_of(group)
        return self._made[1]

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Make shared memory for exchanges whose whole is of ``shape`` now, and not at their first use. Collective.

        The whole of an all-gather is what is gathered; of a reduction, the products of all ranks.
        """
        carrier = self.carrier
        if isinstance(carrier, WindowCarrier):
            carrier.reserve(torch.Size(shape).numel() * dtype.itemsize)

    def _carrier_of(self, group: Group) -> Carrier:
        if group.size == 1:
            return LoneCarrier(group.ranks, group.rank)
        self._check_nodes(group)
        name = f"tensor_parallel{group.next_number()}"
        if self.method == "unfused":
            return UnfusedCarrier(self.process_set, name)
        if len(group.world.topology.nodes) == 1:
            return WindowCarrier(group, name)
        if group.rank == 0:
            _LOG.warning(
                "%s and cannot map each other's memory: they go by hvdlite's operations, unfused. A tp_size that "
                "divides the ranks of a node is faster",
                _whereabouts(group),
            )
        return UnfusedCarrier(self.process_set, name)

    def _check_nodes(self, group: Group) -> None:
        if self.method == "window" and len(group.world.topology.nodes) > 1:
            raise UsageError(
                f"{_whereabouts(group)}, and method='window' needs them on one; pass method='auto' or a smaller tp_size"
            )

    def __deepcopy__(self, memo: object) -> Team:
        return self  # as part of a model that is copied

    def __reduce__(self) -> tuple[type, tuple[ProcessSet, str]]:
        return type(self), (self.process_set, self.method)

    def __repr__(self) -> str:
        return f"Team({self.process_set!r}, method={self.method!r})"


def _whereabouts(group: Group) -> str:
    nodes = group.world.topology.nodes
    where = ", ".join(f"{rank_list(ranks)} on one" for ranks in nodes)
    return f"tensor parallelism: ranks {list(group.ranks)} are on {len(nodes)} nodes ({where})"
