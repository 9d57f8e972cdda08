"""A carrier for each exchange: the one that was asked for, or the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hvdlite.tensor_parallel.carrier import Carrier, Finish, Produce, Rows, Use
from hvdlite.tensor_parallel.meeting import Meeting
from hvdlite.tensor_parallel.methods import Method, can_be_chosen, method_for
from hvdlite.tensor_parallel.tuning import Tuner
from hvdlite.torch.device import wait_for


class ChosenCarrier(Carrier):
    """Passes each exchange on to the carrier of ``options`` that is chosen for its function.

    Args:
        options: by method.
        methods: by function, as `methods.parse` returns them; the same on every rank. "auto" is left to ``tuner``, and
            of functions for which nothing can be chosen it is the first of ``tried``.
        translate: what a method is on this kind of device.
        tried: of ``options``, those that "auto" may mean; all where none are listed.
    """

    def __init__(
        self,
        meeting: Meeting,
        options: Mapping[Method, Carrier],
        methods: Mapping[str, Method],
        translate: Callable[[Method], Method],
        tuner: Tuner,
        tried: Sequence[Method] = (),
    ) -> None:
        super().__init__(meeting)
        self.options = options
        self._methods = methods
        self._translate = translate
        self._tuner = tuner
        self._tried = list(tried or options)
        self._settled: dict[Rows, Carrier] = {}
        self._begun: _Begun | None = None  # a gather, until its result is asked for

    def gather(self, rows: Rows, shard: torch.Tensor, use: Use = lambda part, begin: None) -> torch.Tensor:
        return self._for(rows, lambda carrier: carrier.gather(rows, shard, use)).gather(rows, shard, use)

    def reduce_scatter(self, rows: Rows, produce: Produce) -> torch.Tensor:
        return self._for(rows, lambda carrier: carrier.reduce_scatter(rows, produce)).reduce_scatter(rows, produce)

    def all_reduce(self, rows: Rows, produce: Produce) -> torch.Tensor:
        return self._for(rows, lambda carrier: carrier.all_reduce(rows, produce)).all_reduce(rows, produce)

    def begin_gather(self, rows: Rows, shard: torch.Tensor) -> Finish:
        chosen = self._for(rows, lambda carrier: carrier.gather(rows, shard))
        self._begun = begun = _Begun(chosen.begin_gather(rows, shard))

        def finish() -> torch.Tensor:
            self._begun = None
            return begun.finish()

        return finish

    def begin_reduce_scatter(self, rows: Rows, produce: Produce) -> Finish:
        try:
            chosen = self._for(rows, lambda carrier: carrier.reduce_scatter(rows, produce))
            return chosen.begin_reduce_scatter(rows, produce)
        except BaseException:
            self._begun = None  # nobody will ask for the gather any more
            raise

    def reserve(self, nbytes: int, like: torch.Tensor) -> None:
        for carrier in self.options.values():
            carrier.reserve(nbytes, like)

    def _for(self, rows: Rows, exchange: Callable[[Carrier], object]) -> Carrier:
        carrier = self._settled.get(rows)
        if carrier is None:
            carrier = self._settled[rows] = self._choose(rows, exchange)
        return carrier

    def _choose(self, rows: Rows, exchange: Callable[[Carrier], object]) -> Carrier:
        wanted = self._translate(method_for(rows.function, self._methods))
        if wanted is not Method.AUTO:
            return self.options[wanted]
        if len(self._tried) == 1 or not can_be_chosen(rows.function):
            return self.options[self._tried[0]]

        def attempt(method: Method) -> None:
            if self._begun is not None:
                self._begun.settle()
            exchange(self.options[method])
            wait_for(rows.device)

        return self.options[self._tuner.choose(str(rows), self._tried, attempt)]


class _Begun:
    """A gather that has been begun."""

    def __init__(self, finish: Finish) -> None:
        self.finish = finish

    def settle(self) -> None:
        """Keep its result, since many exchanges come before it is asked for."""
        kept = self.finish().clone()
        self.finish = lambda: kept
