"""A carrier for each exchange: the one that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hvdlite.tensor_parallel.carrier import Carrier, Finish, Produce, Rows, Use
from hvdlite.tensor_parallel.meeting import Meeting
from hvdlite.tensor_parallel.methods import Method, method_for


class ChosenCarrier(Carrier):
    """Passes each exchange on to the carrier of ``options`` that is chosen for its function.

    Args:
        options: by method; the first one is that of "auto".
        methods: by function, as `methods.parse` returns them; the same on every rank.
        translate: what a method is on this kind of device.
    """

    def __init__(
        self,
        meeting: Meeting,
        options: Mapping[Method, Carrier],
        methods: Mapping[str, Method],
        translate: Callable[[Method], Method],
    ) -> None:
        super().__init__(meeting)
        self.options = options
        self._methods = methods
        self._translate = translate

    def gather(self, rows: Rows, shard: torch.Tensor, use: Use = lambda part, begin: None) -> torch.Tensor:
        return self._for(rows).gather(rows, shard, use)

    def reduce_scatter(self, rows: Rows, produce: Produce) -> torch.Tensor:
        return self._for(rows).reduce_scatter(rows, produce)

    def all_reduce(self, rows: Rows, produce: Produce) -> torch.Tensor:
        return self._for(rows).all_reduce(rows, produce)

    def begin_gather(self, rows: Rows, shard: torch.Tensor) -> Finish:
        return self._for(rows).begin_gather(rows, shard)

    def begin_reduce_scatter(self, rows: Rows, produce: Produce) -> Finish:
        return self._for(rows).begin_reduce_scatter(rows, produce)

    def reserve(self, nbytes: int, like: torch.Tensor) -> None:
        for carrier in self.options.values():
            carrier.reserve(nbytes, like)

    def _for(self, rows: Rows) -> Carrier:
        wanted = self._translate(method_for(rows.function, self._methods))
        return self.options[next(iter(self.options)) if wanted is Method.AUTO else wanted]
