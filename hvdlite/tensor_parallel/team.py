"""Teams: the ranks that hold the parts of the same layers."""

from __future__ import annotations

import torch

from hvdlite.tensor_parallel.carrier import Carrier
from hvdlite.tensor_parallel.carriers import Carriers, check_nodes
from hvdlite.tensor_parallel.meeting import Meeting
from hvdlite.tensor_parallel.methods import Methods, parse
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set


class Team:
    """The ranks of ``process_set``, which hold the parts of the same layers and work on the same batch.

    Every rank of a team makes the same calls of `hvdlite.tensor_parallel` in the same order, from one thread at a time.

    Args:
        process_set: registered; only its members make a team of it.
        method: how they exchange rows, the same on every rank: "auto", "window", "ring_exchange", "pipeline", "bulk",
            "multicast", "unfused" or "none"; or one for each of some functions,
            ``{"matmul_reduce_scatter": "pipeline"}``. See docs/tensor_parallel.md. HVDLITE_UB_METHOD goes before it.

    Raises:
        ValueError: ``method`` is none of these; this rank is no member.
        UsageError: ``method`` needs all ranks on one node, and they are on several.
    """

    def __init__(self, process_set: ProcessSet = global_process_set, method: Methods = "auto") -> None:
        self._methods = parse(method)
        self.process_set = check_process_set(process_set)
        self.method = method
        self._made: Carriers | None = None
        group = process_set.group()
        if group.config.ub_method:
            self._methods = parse(group.config.ub_method)
        check_nodes(group, self._methods)

    @property
    def size(self) -> int:
        """How many ranks share the layers."""
        return self.process_set.size()

    @property
    def rank(self) -> int:
        """This process's place in the team."""
        return self.process_set.rank()

    @property
    def meeting(self) -> Meeting:
        """Where the ranks say what they have come for. The first use, as of `carrier_for`, is collective."""
        return self._carriers.meeting

    def carrier_for(self, tensor: torch.Tensor) -> Carrier:
        """What moves rows of tensors like ``tensor``."""
        return self._carriers.carrier_for(tensor)

    @property
    def _carriers(self) -> Carriers:
        """Of this world: there are others after a new hvd.init()."""
        group = self.process_set.group()
        if self._made is None or self._made.group is not group:
            self._made = Carriers(self.process_set, group, self._methods)
        return self._made

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Make windows for activations of ``shape``, of all rows, now, and not at their first use. Collective."""
        like = torch.empty(0, dtype=dtype, device=device)
        self.carrier_for(like).reserve(torch.Size(shape).numel() * dtype.itemsize, like)

    def __deepcopy__(self, memo: object) -> Team:
        return self  # as part of a model that is copied

    def __reduce__(self) -> tuple[type, tuple[ProcessSet, Methods]]:
        return type(self), (self.process_set, self.method)

    def __repr__(self) -> str:
        return f"Team({self.process_set!r}, method={self.method!r})"
