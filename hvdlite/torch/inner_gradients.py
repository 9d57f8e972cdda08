"""Gradients of the only bucket that come between the first and the last: nothing is to be done for one of them alone.

Their hooks are the `append` of a list, for which no Python runs. Still torch takes 0.6 us to call one, so once the
gradients have come as expected in several steps, each where there was none before, these hooks are taken away: a
gradient that is not there with the first one, and is there with the last one, has come in between.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat

import torch

_STEADY = 3  # steps as expected, until there are no hooks
_WORTH_IT = 8  # hooks

_gradient = operator.attrgetter("grad")


class Notes(list[torch.Tensor]):
    """Parameters whose gradients have come. Its `append` is a hook, by which another `Arrival` knows it."""


class InnerGradients:
    """Those of ``parameters``, in the order in which they should come.

    Attributes:
        notes: of those that have come, while there are hooks.
        have_hooks: whether there are.
    """

    def __init__(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        self.notes = Notes()
        self.have_hooks = False
        self._parameters = parameters
        self._none_was_there = False
        self._steady = 0

    def begin(self) -> bool:
        """The first gradient of a step has come; whether the others can be told from those of the step before."""
        self._none_was_there = len(self._parameters) >= _WORTH_IT and self._are(missing=True)
        return self.have_hooks or self._none_was_there

    def are_complete(self) -> bool:
        """The last gradient has come; whether all others have since `begin`, as expected."""
        if self.have_hooks:
            noted = self.notes
            complete = len(noted) == len(self._parameters) and all(map(operator.is_, noted, self._parameters))
        else:
            complete = self._are(missing=False)
        self._steady = self._steady + 1 if complete and self._none_was_there else 0
        return complete

    def end(self) -> None:
        """The end of a step."""
        self.notes.clear()
        self._none_was_there = False

    @property
    def need_no_hooks(self) -> bool:
        """Whether there are some, and the gradients have come as expected for long enough."""
        return self.have_hooks and self._steady >= _STEADY

    def hooked(self, have_hooks: bool) -> None:
        """There are hooks now, or none any more."""
        self.have_hooks = have_hooks
        self._steady = 0

    def take(self) -> list[torch.Tensor]:
        """The parameters whose gradients have come since `begin`, where not all have as expected.

        Without hooks none, if there were some before that.
        """
        if not self.have_hooks:
            known = self._parameters if self._none_was_there else ()
            return [parameter for parameter in known if parameter.grad is not None]
        noted = self.notes.copy()
        self.notes.clear()
        return noted

    def _are(self, *, missing: bool) -> bool:
        compare = operator.is_ if missing else operator.is_not
        return all(map(compare, map(_gradient, self._parameters), repeat(None)))
