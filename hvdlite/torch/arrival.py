"""When all gradients of a bucket are there: hooks of autograd, and the counts that they keep.

A hook is called once autograd has accumulated into its parameter; with 400 tiny parameters a step is the price of
Python per hook. Where all gradients are in one bucket nothing is to be done before the last has come, so the hooks of
those between the first and the last are the `append` of a list: no Python runs. The hook of the last compares that
list with the order in which the gradients should come, and counts all at once if they are the same; one by one if not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.errors import UsageError
from hvdlite.torch.gradients import Bucket, Slot


class _Notes(list[torch.Tensor]):
    """Parameters whose gradients have come. Its `append` is a hook, by which another `Arrival` knows it."""


class Arrival:
    """Counts the gradients of ``slots``, from the first of a step to its end.

    Args:
        passes: backward passes per step.
        begin: called at the first gradient of a step; whether gradients are counted.
        complete: called with each bucket when the last gradient that it counts on is there.

    Attributes:
        slots: all; each has a hook, unless this rank is alone.
        order: slots in the order in which their gradients have come since the last `reset`, once per backward pass.
        late: slots in ``order`` on which no bucket counts.
        waits_for_sparse: a gradient that could be sparse does not complete its bucket.
    """

    def __init__(self, passes: int, begin: Callable[[], bool], complete: Callable[[Bucket], None]) -> None:
        self.slots: list[Slot] = []
        self.order: list[Slot] = []
        self.late: dict[Slot, None] = {}
        self.waits_for_sparse = False
        self._passes = passes
        self._begin = begin
        self._complete = complete
        self._hooks: list[RemovableHandle] = []
        self._expected: list[Slot] = []  # of the only bucket, in the order in which gradients should come
        self._inner_parameters: list[torch.Tensor] = []  # of all but the first and the last of `_expected`
        self._noted = _Notes()  # inner parameters whose gradients have come, but are not counted yet
        self._came_as_expected = False  # all gradients, so that inner slots were not counted one by one
        self._is_paused = False

    @property
    def has_pending(self) -> bool:
        """Whether gradients have come since the last `reset`."""
        return bool(self.order or (self._noted and not self._is_paused))

    def has_come(self, slot: Slot) -> bool:
        """Whether a gradient of ``slot``, on which a bucket counts, has come since the last `reset`."""
        return self._came_as_expected or slot.passes_left < self._passes

    @property
    def passes(self) -> int:
        """Backward passes per step."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._passes = passes
        for slot in self.slots:
            slot.passes_left = passes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients of backward passes in this context are not counted."""
        before = self._is_paused
        if not before:
            self.count_noted()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before
            self._noted.clear()

    # Hooks.

    def add(self, slot: Slot, *, is_watched: bool) -> None:
        """Count the gradients of ``slot`` as well."""
        slot.passes_left = self._passes
        self.slots.append(slot)
        if is_watched:
            self._hook(slot, partial(self._on_gradient, slot))

    def watch(self, order: Sequence[Slot] = ()) -> None:
        """Register hooks anew.

        Args:
            order: in which the gradients of the only bucket should come; empty where there are several buckets.
        """
        self.unwatch()
        self._expected = list(order)
        self._inner_parameters = [slot.param for slot in order[1:-1]]
        inner = set(order[1:-1])
        for slot in self.slots:
            if slot in inner:
                self._hook(slot, self._noted.append)
            else:
                self._hook(slot, partial(self._on_last if order and slot is order[-1] else self._on_gradient, slot))

    def unwatch(self) -> None:
        """Leave the parameters alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._count_expected()
        self._expected = []

    @property
    def expects_an_order(self) -> bool:
        """Whether hooks were registered for an only bucket."""
        return bool(self._expected)

    def shared_parameter(self) -> str | None:
        """The name of a parameter whose gradients another one counts as well: that of a second optimizer."""
        for slot in self.slots:
            hooks = getattr(slot.param, "_post_accumulate_grad_hooks", None) or {}
            for hook in hooks.values():
                owner = getattr(getattr(hook, "func", hook), "__self__", None)
                if isinstance(owner, Arrival | _Notes) and owner is not self and owner is not self._noted:
                    return slot.name
        return None

    def _hook(self, slot: Slot, hook: Callable[[torch.Tensor], None]) -> None:
        param = slot.param
        switched_on = param.requires_grad
        param.requires_grad_(True)  # torch refuses hooks otherwise, and keeps them when it is switched off
        self._hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        param.requires_grad_(switched_on)

    def check_only_owner(self) -> None:
        """Raises:
        UsageError: a second DistributedOptimizer has parameters of this one's.
        """
        name = self.shared_parameter()
        if name is not None:
            raise UsageError(
                f"two DistributedOptimizers have the parameter '{name}': each reduces its gradients, and one of them "
                "was not stepped. Keep one for all steps; or delete the first before you make a second one (del "
                "optimizer, and whatever else refers to it, such as learning rate schedulers)."
            )

    # In backward.

    def _on_gradient(self, slot: Slot, _: torch.Tensor) -> None:
        if self._is_paused or not (self.order or self._begin()):
            return
        self.order.append(slot)
        slot.passes_left -= 1
        bucket = slot.bucket
        if not slot.active or bucket is None:
            self.late[slot] = None
            return
        if slot.passes_left > 0:
            return
        if slot.passes_left < 0:
            self.check_only_owner()
            raise UsageError(
                f"the gradient of '{slot.name}' was computed {self._passes - slot.passes_left} times before "
                f"optimizer.step(), but backward_passes_per_step is {self._passes}. Pass a larger one to "
                "hvd.DistributedOptimizer, or do the other passes inside optimizer.no_sync()."
            )
        if self.waits_for_sparse and slot.could_be_sparse and not slot.is_sparse:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            self._complete(bucket)

    def _on_last(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The gradient that should come last, of the only bucket."""
        if self._is_paused:
            return
        bucket = slot.bucket
        if (
            self.order == self._expected[:1]
            and self._passes == 1
            and bucket is not None
            and bucket.missing == len(self._expected) - 1  # all are counted on
            and len(self._noted) == len(self._inner_parameters)
            and all(map(operator.is_, self._noted, self._inner_parameters))
        ):
            self._noted.clear()
            self.order += self._expected[1:]
            slot.passes_left = bucket.missing = 0
            self._came_as_expected = True
            self._complete(bucket)
        else:
            self.count_noted()
            self._on_gradient(slot, parameter)

    def count_noted(self) -> None:
        """Count the gradients of inner slots, whose hooks have only made notes."""
        if not self._noted:
            return
        noted = self._noted.copy()
        self._noted.clear()
        self._count_expected()  # some of these come once more
        slots = {id(slot.param): slot for slot in self.slots}
        for parameter in noted:
            self._on_gradient(slots[id(parameter)], parameter)

    def _count_expected(self) -> None:
        """Write the counts of slots whose gradients came as expected, if they did."""
        if self._came_as_expected:
            self._came_as_expected = False
            for slot in self._expected:
                slot.passes_left = 0

    # At the end of a step.

    def reset(self) -> None:
        """No gradient has come."""
        is_as_expected = self._came_as_expected and len(self.order) == len(self._expected)
        for slot in (self.order[0], self.order[-1]) if is_as_expected else self.order:
            slot.passes_left = self._passes
        self._came_as_expected = False
        self.order.clear()
        self.late.clear()
        self._noted.clear()
