"""When all gradients of a bucket are there: hooks of autograd, and the counts that they keep.

A hook is called once autograd has accumulated into its parameter; with 400 tiny parameters a step is the price of
Python per hook. Where all gradients are in one bucket nothing has to be done before step(), which reduces in any case
what is there. So once all have come for a while, the one that should before the others, and nobody has changed any on
its way, only the ends have hooks, the first and the last of the order that was agreed on, and step() loads the bucket.
If the ends do not come so, or somebody changes them, each gradient gets a hook again, for a while. A backward pass that
reaches neither is not counted.

On a GPU a hook notes the stream on which the gradient is made, as autograd uses that of the forward pass: who loads in
backward has to follow it. At the end of backward the stream of whoever has called it has followed them all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from hvdlite.errors import UsageError
from hvdlite.torch.device import current_stream
from hvdlite.torch.eager import eager
from hvdlite.torch.gradients import Bucket, Slot
from hvdlite.torch.hooks import Hook, HookForNow, hook_for_good

_ORDERLY_STEPS = 20
"""After so many in a row in which all gradients came, the first in its place, and none was changed on its way, those
between the ends lose their hooks."""


class Arrival:
    """Counts the gradients of ``slots``, from the first of a step to its end.

    Args:
        passes: backward passes per step.
        begin: called at the first gradient of a step; whether gradients are counted.
        complete: called with each bucket when the last gradient that it counts on is there.

    Attributes:
        slots: all; watched, unless this rank is alone.
        order: slots in the order in which their gradients have come since the last `reset`, once per backward pass.
        late: slots in ``order`` on which no bucket counts.
        waits_for_sparse: a gradient that could be sparse does not complete its bucket.
        watches_ends: only the ends have hooks, the first and the last gradient of the only bucket, and stand for all.
    """

    def __init__(self, passes: int, begin: Callable[[], bool], complete: Callable[[Bucket], None]) -> None:
        self.slots: list[Slot] = []
        self.order: list[Slot] = []
        self.late: dict[Slot, None] = {}
        self.waits_for_sparse = False
        self.watches_ends = False
        self._passes = passes
        self._begin = begin
        self._complete = complete
        self._hooks: list[Hook] = []
        self._are_for_now = False  # some of the hooks
        self._expected: list[Slot] = []  # of the only bucket, in the order in which gradients should come
        self._uncounted: set[Slot] = set()  # those between the ends, if they had no hooks when this step began
        self._came_as_expected = False  # the ends, which stand for all
        self._orderly_steps = 0
        self._is_paused = False

    @property
    def has_pending(self) -> bool:
        """Whether gradients have come since the last `reset`."""
        return bool(self.order)

    def has_come(self, slot: Slot) -> bool:
        """Whether a gradient of ``slot``, on which a bucket counts, has come since the last `reset`."""
        return slot.passes_left < self._passes or (slot in self._uncounted and slot.param.grad is not None)

    @property
    def passes(self) -> int:
        """Backward passes per step."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._passes = passes
        for slot in self.slots:
            slot.passes_left = passes
        if passes > 1:
            self.watch_closely()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients of backward passes in this context are not counted."""
        before = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before

    # Hooks.

    def add(self, slots: Sequence[Slot]) -> None:
        """Count the gradients of ``slots`` as well, once `hook` has seen them."""
        for slot in slots:
            slot.passes_left = self._passes
        self.slots += slots

    def hook(self, slots: Sequence[Slot], *, for_now: bool) -> None:
        """Hear of the gradients of ``slots``.

        Args:
            for_now: most of these hooks will be removed. Not from a hook of one of them.
        """
        self._are_for_now |= for_now
        register = HookForNow if for_now else hook_for_good
        self._hooks += [register(slot.param, partial(self._hook_of(slot), slot)) for slot in slots]

    def watch(self, order: Sequence[Slot] = (), *, ends_only: bool = False) -> None:
        """Register hooks, also in the middle of a backward pass.

        Args:
            order: in which the gradients of the only bucket should come; empty where there are several buckets, or
                where nobody knows yet.
            ends_only: see `watches_ends`.
        """
        self.unwatch()
        _watching.add(self)
        self._expected = list(order)
        self.watches_ends = ends_only
        inner = self._expected[1:-1] if self._can_leave_inner else []
        without = set(inner)
        self.hook([slot for slot in self.slots if slot not in without], for_now=False)
        if ends_only:
            self._uncounted = without
        elif inner:
            self.hook(inner, for_now=True)

    def unwatch(self) -> None:
        """Leave the parameters alone."""
        _watching.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._are_for_now = False
        if self._came_as_expected:  # those between the ends were not counted one by one
            self._came_as_expected = False
            for slot in self._expected:
                slot.passes_left = 0
        self._expected = []
        self._uncounted = set()
        self._orderly_steps = 0
        self.watches_ends = False

    def watch_closely(self) -> None:
        """Each gradient is counted when it comes, for a while from now on, also of a backward pass that runs."""
        self._orderly_steps = -1  # this one does not count
        if self.watches_ends:
            self.watches_ends = False
            self.hook(self._expected[1:-1], for_now=True)

    def note_changes(self) -> None:
        """Note in `Slot.changed` what somebody has done to the ends since they came, if they stand for all."""
        if self._came_as_expected:
            for slot in self._ends:
                slot.note_if_changed()

    @property
    def _ends(self) -> tuple[Slot, Slot]:
        return self._expected[0], self._expected[-1]

    @property
    def _can_leave_inner(self) -> bool:
        """Whether the ends could stand for all."""
        return self._passes == 1 and len(self._expected) > 2

    @property
    def watches_all(self) -> bool:
        """Whether all slots have hooks for good, and no order is expected."""
        return not self._are_for_now and not self._expected

    def shared_parameter(self) -> str | None:
        """The name of a parameter whose gradients another one counts as well: that of a second optimizer."""
        others = {id(slot.param) for other in _watching if other is not self for slot in other.slots}
        return next((slot.name for slot in self.slots if id(slot.param) in others), None)

    def _hook_of(self, slot: Slot) -> Callable[[Slot, torch.Tensor], None]:
        return self._on_last if self._expected and slot is self._expected[-1] else self._on_gradient

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

    @eager
    def _on_gradient(self, slot: Slot, parameter: torch.Tensor) -> None:
        if self._is_paused or parameter.grad is None:  # a hook of the program came first, and dropped it
            return
        if not self.order and not self._begin():
            return
        self.order.append(slot)
        slot.passes_left -= 1
        bucket = slot.bucket
        if not slot.active or bucket is None:
            self.late[slot] = None
            return
        if slot.is_on_device:
            bucket.streams.add(current_stream(parameter))
        if slot.passes_left > 0:
            return
        if slot.passes_left < 0:
            self.check_only_owner()
            raise UsageError(
                f"the gradient of '{slot.name}' was computed {self._passes - slot.passes_left} times before "
                f"optimizer.step(), but backward_passes_per_step is {self._passes}. Pass a larger one to "
                "hvd.DistributedOptimizer, or do the other passes inside optimizer.no_sync(). Where "
                "torch.utils.checkpoint runs a layer more than once, it needs use_reentrant=False."
            )
        if self.waits_for_sparse and slot.could_be_sparse and not slot.is_sparse:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            self._complete(bucket)

    @eager
    def _on_last(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The gradient that should come last, of the only bucket."""
        if not self.watches_ends or self._is_paused or parameter.grad is None:
            self._on_gradient(slot, parameter)
            return
        bucket = slot.bucket
        if bucket is not None and slot.active and len(self.order) == 1:
            self.order += self._expected[1:]
            slot.passes_left = bucket.missing = 0
            self._came_as_expected = True
            for end in self._ends:
                end.note_arrival()
            self._complete(bucket)
        else:
            self.watch_closely()
            self._on_gradient(slot, parameter)

    # At the end of a step.

    def reset(self) -> None:
        """No gradient has come."""
        order, expected = self.order, self._expected
        is_orderly = len(order) == len(expected) > 2 and order[0] is expected[0] and not self.late
        for slot in self._ends if self._came_as_expected and is_orderly else order:
            slot.passes_left = self._passes
        if self.watches_ends and order and not is_orderly:
            self.watch_closely()
        self._came_as_expected = False
        order.clear()
        self.late.clear()
        if self.watches_ends:
            return
        self._uncounted.clear()
        if self._can_leave_inner:
            self._orderly_steps = self._orderly_steps + 1 if is_orderly else 0
            if self._orderly_steps == _ORDERLY_STEPS:
                self.watch(expected, ends_only=True)


_watching: weakref.WeakSet[Arrival] = weakref.WeakSet()
"""Those that have hooks."""
