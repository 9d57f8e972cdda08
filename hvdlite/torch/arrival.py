"""When all gradients of a bucket are there: hooks of autograd, and the counts that they keep.

A hook is called once autograd has accumulated into its parameter; with 400 tiny parameters a step is the price of
Python per hook. Where all gradients are in one bucket nothing is to be done before the last has come, so those between
the first and the last are not counted one by one (inner_gradients.py) but by the hook of the last, if they have come
as they should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.errors import UsageError
from hvdlite.torch.gradients import Bucket, Slot
from hvdlite.torch.inner_gradients import InnerGradients, Notes


class Arrival:
    """Counts the gradients of ``slots``, from the first of a step to its end.

    Args:
        passes: backward passes per step.
        begin: called at the first gradient of a step; whether gradients are counted.
        complete: called with each bucket when the last gradient that it counts on is there.

    Attributes:
        slots: all; each has a hook, unless this rank is alone, or the slot is an inner one that needs none.
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
        self._inner = InnerGradients()  # of all but the first and the last of `_expected`
        self._inner_hooks: list[RemovableHandle] = []
        self._came_as_expected = False  # all gradients, so that inner slots were not counted one by one
        self._is_paused = False

    @property
    def has_pending(self) -> bool:
        """Whether gradients have come since the last `reset`."""
        return bool(self.order or (self._inner.notes and not self._is_paused))

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
        self._hook_inner()  # which know of one pass only if there are none
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
            self._inner.notes.clear()

    # Hooks.

    def add(self, slot: Slot, *, is_watched: bool) -> None:
        """Count the gradients of ``slot`` as well."""
        slot.passes_left = self._passes
        self.slots.append(slot)
        if is_watched:
            self._hooks.append(_hook(slot.param, partial(self._on_gradient, slot)))

    def watch(self, order: Sequence[Slot] = ()) -> None:
        """Register hooks anew.

        Args:
            order: in which the gradients of the only bucket should come; empty where there are several buckets.
        """
        self.unwatch()
        self._expected = list(order)
        self._inner = InnerGradients([slot.param for slot in order[1:-1]])
        roles: dict[Slot, Callable[[Slot, torch.Tensor], None]] = {}
        if order:
            roles = {order[0]: self._on_first, order[-1]: self._on_last}
        inner = set(order[1:-1])
        for slot in self.slots:
            if slot not in inner:
                self._hooks.append(_hook(slot.param, partial(roles.get(slot, self._on_gradient), slot)))
        self._hook_inner()

    def unwatch(self) -> None:
        """Leave the parameters alone."""
        self._unhook_inner()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._count_expected()
        self._expected = []
        self._inner = InnerGradients()

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
                if isinstance(owner, Arrival | Notes) and owner is not self and owner is not self._inner.notes:
                    return slot.name
        return None

    def _hook_inner(self) -> None:
        if not self._inner.have_hooks:
            note = self._inner.notes.append
            self._inner_hooks = [_hook(slot.param, note) for slot in self._expected[1:-1]]
            self._inner.hooked(True)

    def _unhook_inner(self) -> None:
        for hook in self._inner_hooks:
            hook.remove()
        self._inner_hooks.clear()
        self._inner.hooked(False)

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

    def _on_first(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The gradient that should come first, of the only bucket."""
        if not self._is_paused and not self.order and not self._inner.begin():
            self._hook_inner()
        self._on_gradient(slot, parameter)

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
            and self._inner.are_complete()
        ):
            self._inner.notes.clear()
            self.order += self._expected[1:]
            slot.passes_left = bucket.missing = 0
            self._came_as_expected = True
            self._complete(bucket)
        else:
            self.count_noted()
            self._on_gradient(slot, parameter)

    def count_noted(self) -> None:
        """Count the gradients of inner slots that have come, if they did not all come as expected."""
        if self._came_as_expected and not self._inner.notes:
            return
        come = self._inner.take()
        self._hook_inner()
        if come:
            self._count_expected()  # some of these come once more
            slots = {id(slot.param): slot for slot in self.slots}
            for parameter in come:
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
        self._inner.end()
        if self._inner.need_no_hooks:
            self._unhook_inner()


def _hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    switched_on = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses hooks otherwise, and keeps them when it is switched off
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(switched_on)
    return handle
