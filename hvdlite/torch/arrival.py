"""When all gradients of a bucket are there: hooks of autograd, and the counts that they keep.

A hook is called once autograd has accumulated into its parameter; with 400 tiny parameters a step is the price of
Python per hook. Where all gradients are in one bucket nothing is to be done before the last has come, so only the
first and the last have hooks. The hook of the first looks at the gradients of those between them, that of the last
looks again: if all have changed, all have come. If not, or if the last has not come when backward ends, each gets a
hook, until gradients have come in order for a while. On GPUs each always has one, which notes the stream on which the
gradient is made: autograd uses that of the forward pass. A backward pass that reaches neither the first nor the last is
not counted; step() reduces in any case what is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress

import torch
from torch.autograd import Variable

from hvdlite import _native
from hvdlite.errors import UsageError
from hvdlite.torch.device import current_stream
from hvdlite.torch.eager import eager
from hvdlite.torch.gradients import Bucket, Slot
from hvdlite.torch.hooks import Hook, HookForNow, hook_for_good

_ORDERLY_STEPS = 100
"""After so many in a row in which the first and the last came in their places, those between them lose their hooks."""


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
    """

    def __init__(self, passes: int, begin: Callable[[], bool], complete: Callable[[Bucket], None]) -> None:
        self.slots: list[Slot] = []
        self.order: list[Slot] = []
        self.late: dict[Slot, None] = {}
        self.waits_for_sparse = False
        self._passes = passes
        self._begin = begin
        self._complete = complete
        self._hooks: list[Hook] = []
        self._are_for_now = False  # some of the hooks
        self._expected: list[Slot] = []  # of the only bucket, in the order in which gradients should come
        self._inner: list[Slot] = []  # all but the first and the last of `_expected`, while they have no hooks
        self._inner_parameters: list[torch.Tensor] = []
        self._snapshot: _native.GradientSnapshot | None = None  # of theirs, when the first of `_expected` had come
        self._came_as_expected = False  # all gradients, so that inner slots were not counted one by one
        self._orderly_steps = 0
        self._is_paused = False

    @property
    def has_pending(self) -> bool:
        """Whether gradients have come since the last `reset`."""
        return bool(self.order)

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
        if passes > 1:
            self._hook_inner()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients of backward passes in this context are not counted."""
        before = self._is_paused
        if self.order and not before:
            self.count_unseen()
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

    def watch(self, order: Sequence[Slot] = ()) -> None:
        """Register hooks for good, also in the middle of a backward pass.

        Args:
            order: in which the gradients of the only bucket should come; empty where there are several buckets, or
                where nobody knows yet.
        """
        self.unwatch()
        _watching.add(self)
        self._expected = list(order)
        self._inner = self._expected[1:-1] if self._can_leave_inner else []
        self._inner_parameters = [slot.param for slot in self._inner]
        without_hooks = set(self._inner)
        self.hook([slot for slot in self.slots if slot not in without_hooks], for_now=False)

    def unwatch(self) -> None:
        """Leave the parameters alone."""
        _watching.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._are_for_now = False
        if self._came_as_expected:  # inner slots were not counted one by one
            self._came_as_expected = False
            for slot in self._expected:
                slot.passes_left = 0
        self._snapshot = None
        self._expected = []
        self._inner = []
        self._orderly_steps = 0

    @property
    def _can_leave_inner(self) -> bool:
        """Whether inner slots need no hooks."""
        return self._passes == 1 and bool(self._expected) and not self._expected[0].is_on_device

    @property
    def watches_all(self) -> bool:
        """Whether all slots have hooks for good, and no order is expected."""
        return not self._are_for_now and not self._expected

    def shared_parameter(self) -> str | None:
        """The name of a parameter whose gradients another one counts as well: that of a second optimizer."""
        others = {id(slot.param) for other in _watching if other is not self for slot in other.slots}
        return next((slot.name for slot in self.slots if id(slot.param) in others), None)

    def _hook_of(self, slot: Slot) -> Callable[[Slot, torch.Tensor], None]:
        if self._inner and slot is self._expected[0]:
            return self._on_first
        if self._inner and slot is self._expected[-1]:
            return self._on_last
        return self._on_gradient

    def _hook_inner(self) -> None:
        """Each gradient is counted when it comes, from now on, also of a backward pass that runs."""
        inner, self._inner = self._inner, []
        self.hook(inner, for_now=True)
        self._snapshot = None

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
    def _on_first(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The gradient that should come first, of the only bucket."""
        self._on_gradient(slot, parameter)
        if self._inner and len(self.order) == 1:
            self._snapshot = _native.GradientSnapshot()
            self._snapshot.take(self._inner_parameters)
            Variable._execution_engine.queue_callback(self.count_unseen)

    @eager
    def _on_last(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The gradient that should come last, of the only bucket."""
        if self._is_paused:
            return
        bucket = slot.bucket
        if (
            self._snapshot is not None
            and len(self.order) == 1
            and bucket is not None
            and self._snapshot.have_all_changed(self._inner_parameters)
        ):
            self._snapshot = None
            self.order += self._expected[1:]
            slot.passes_left = bucket.missing = 0
            self._came_as_expected = True
            self._complete(bucket)
        else:
            self.count_unseen()
            self._on_gradient(slot, parameter)

    @eager
    def count_unseen(self) -> None:
        """Count the gradients that have come to inner slots without hooks; unless all have come in their order."""
        if not self._inner or self._came_as_expected:
            return
        come: list[Slot] = []
        if self._snapshot is not None:
            come = list(compress(self._inner, self._snapshot.changed(self._inner_parameters)))
        self._hook_inner()
        for slot in come:
            self._on_gradient(slot, slot.param)

    # At the end of a step.

    def reset(self) -> None:
        """No gradient has come."""
        is_orderly = (
            len(self.order) == len(self._expected) > 2
            and self.order[0] is self._expected[0]
            and self.order[-1] is self._expected[-1]
            and not self.late
        )
        for slot in (self.order[0], self.order[-1]) if self._came_as_expected and is_orderly else self.order:
            slot.passes_left = self._passes
        self._came_as_expected = False
        self._snapshot = None
        self.order.clear()
        self.late.clear()
        if not self._inner and self._can_leave_inner:
            self._orderly_steps = self._orderly_steps + 1 if is_orderly else 0
            if self._orderly_steps == _ORDERLY_STEPS:
                self.watch(self._expected)


_watching: weakref.WeakSet[Arrival] = weakref.WeakSet()
"""Those that have hooks."""
