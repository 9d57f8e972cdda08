"""DistributedOptimizer with any op but hvd.Adasum: its step() uses the gradients of all ranks."""

from __future__ import annotations

import numbers
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch

from hvdlite.errors import HorovodInternalError, UsageError
from hvdlite.torch.allreduce import allreduce
from hvdlite.torch.eager import eager
from hvdlite.torch.reducer import GradientReducer
from hvdlite.torch.wrapped_optimizer import WrappedOptimizer, parameters_of
from hvdlite.tracebacks import stacklevel


class GradientOptimizer(WrappedOptimizer):
    """Reduces gradients while backward runs, and waits for them before each step."""

    _hvd_reducer: GradientReducer
    _hvd_seen: list[torch.Tensor]  # all parameters, when it was looked last
    _hvd_should_synchronize: bool
    _hvd_synchronized: bool  # by the user
    _hvd_synchronized_inside: bool  # by a scaler, or by load_state_dict()

    def _hvd_reduce_by(self, reducer: GradientReducer) -> None:
        """Called once: ``reducer`` has hooks at this optimizer's parameters."""
        self._hvd_reducer = reducer
        self._hvd_seen = self._hvd_parameters()
        # Hooks belong to parameters, which may live longer, and be given to another optimizer.
        weakref.finalize(self, reducer.arrival.unwatch).atexit = False
        self._hvd_should_synchronize = True
        self._hvd_synchronized = False
        self._hvd_synchronized_inside = False

    def synchronize(self) -> None:
        if self.synchronizes_once and self._hvd_synchronized and not self._hvd_reducer.arrival.has_pending:
            return
        self._hvd_reduce()
        self._hvd_synchronized = True

    @eager
    def _hvd_reduce(self) -> None:
        """`GradientReducer.synchronize`, with parameters that the program has put into ``param_groups`` by itself."""
        parameters = self._hvd_parameters()
        # Not by ==, which compares elements where tensors differ.
        if len(parameters) != len(self._hvd_seen) or not all(map(operator.is_, parameters, self._hvd_seen)):
            known = {id(slot.param) for slot in self._hvd_reducer.arrival.slots}
            named = parameters_of(self.param_groups, self._hvd_arguments["named_parameters"])
            self._hvd_reducer.add([(name, parameter) for name, parameter in named if id(parameter) not in known])
            self._hvd_seen = parameters
        self._hvd_reducer.synchronize()

    def _hvd_parameters(self) -> list[torch.Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    def synchronize_pending(self) -> None:
        if self._hvd_reducer.arrival.has_pending:
            self.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        before = self._hvd_should_synchronize
        self._hvd_should_synchronize = False
        try:
            yield
        finally:
            self._hvd_should_synchronize = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._hvd_reducer.arrival.paused():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        if self._hvd_reducer.arrival.has_pending:
            raise UsageError(
                "set_backward_passes_per_step() was called between backward() and step(); call it after step()"
            )
        super().set_backward_passes_per_step(passes)
        self._hvd_reducer.arrival.passes = passes

    def _hvd_abandon(self) -> None:
        self._hvd_reducer.reset()
        self._hvd_reducer.follow()  # a rank that was alone has no hooks

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Synchronize, then do the step of the wrapped optimizer.

        With ``closure`` gradients are synchronized each time that it has been called, and the loss that it returns, a
        tensor or a number, is reduced like them, so that an optimizer that decides by the loss (LBFGS) decides alike on
        every rank.

        Raises:
            UsageError: called in `skip_synchronize` without `synchronize` before.
            DivergenceError: on all ranks after the step, where HVDLITE_CHECK_EVERY finds that they differ.
        """
        if closure is not None:
            self.synchronize_pending()
            kwargs["closure"] = self._synchronizing(closure)
        elif self._hvd_should_synchronize:
            arrival = self._hvd_reducer.arrival
            if self._hvd_synchronized_inside and not arrival.has_pending:
                if self._hvd_must_skip():
                    self._hvd_synchronized_inside = False
                    return None
            else:
                if self._hvd_synchronized and not self.synchronizes_once and not arrival.has_pending:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                        "it reduces the gradients a second time; call it inside `with optimizer.skip_synchronize():`",
                        stacklevel=stacklevel(),
                    )
                self.synchronize()
        elif self._hvd_reducer.arrival.has_pending:
            raise UsageError(
                "optimizer.step() was called inside `with optimizer.skip_synchronize():` with gradients that are on "
                "their way to other ranks. Call optimizer.synchronize() before it, on every rank; or leave out "
                "skip_synchronize(), which is for gradients that are changed in between, as by clipping."
            )
        if isinstance(self, torch.optim.SparseAdam):  # which takes no dense gradients, whatever they travelled as
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and not parameter.grad.is_sparse:
                        parameter.grad = parameter.grad.to_sparse(1)
        try:
            result = self._hvd_step_inside(self._hvd_reducer.recorder, kwargs)
        finally:
            self._hvd_synchronized = self._hvd_synchronized_inside = False
            self._hvd_reducer.recorder.stepping_thread = 0
        self._hvd_reducer.after_step(self)
        return result

    # Read by torch. The inner step() has the hooks of torch.optim, which would run twice around both. And learning rate
    # schedulers need not wrap step() to learn that it was called: it tells them, by _opt_called.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        options = self._hvd_reducer.options.reduce

        def reduced(loss: torch.Tensor) -> torch.Tensor:
            return allreduce(loss, op=options.reduction.op, process_set=options.process_set)

        def synchronized_closure() -> Any:
            loss = closure()
            if self._hvd_should_synchronize:
                self.synchronize()
            if not self._hvd_reducer.is_distributed:
                return loss
            if isinstance(loss, numbers.Real):
                return reduced(torch.tensor(float(loss), dtype=torch.float64, device="cpu")).item()
            return reduced(loss.detach()) if isinstance(loss, torch.Tensor) else loss

        return synchronized_closure

    # `torch.amp.GradScaler.step` reads _step_supports_amp_scaling before it looks at gradients. If that is false, it
    # unscales them and calls step() where it finds no overflow; if it is true, it calls step() in any case, and leaves
    # found_inf and grad_scale in attributes for that time.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether step() unscales gradients, and does nothing after an overflow.

        Reading it reduces gradients, unless `synchronize` did: what the scaler finds in them decides about the step
        and about its next scale, and must be the same on every rank.
        """
        reducer = self._hvd_reducer
        synchronized = self._hvd_synchronized or self._hvd_synchronized_inside
        if (
            not reducer.is_distributed
            or not self._hvd_should_synchronize
            or (synchronized and not reducer.arrival.has_pending)
        ):
            return self._hvd_unscales_inside
        self._hvd_reduce()
        self._hvd_synchronized_inside = True
        return True

    def _hvd_must_skip(self) -> bool:
        """Whether the scaler that called step() found an overflow; otherwise unscales gradients.

        Raises:
            UsageError: they were unscaled while they were on their way to other ranks.
        """
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        if self.grad_scale is None:
            del self.grad_scale, self.found_inf  # as the scaler would do after step()
            raise UsageError(
                "scaler.unscale_(optimizer) was called while gradients were on their way to other ranks. Call "
                "optimizer.synchronize() before it, and scaler.step(optimizer) inside `with "
                "optimizer.skip_synchronize():`."
            )
        if found.item():
            return True
        self._hvd_unscale()
        return False

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """`torch.optim.Optimizer.zero_grad`.

        Raises:
            UsageError: called between backward() and step(), when gradients are on their way; or after a step that was
                interrupted, if it cannot go on.
        """
        self._hvd_reducer.see_to_interrupt()
        if self._hvd_reducer.arrival.has_pending:
            self._hvd_reducer.arrival.check_only_owner()
            raise UsageError(
                "optimizer.zero_grad() was called between loss.backward() and optimizer.step(), when gradients are on "
                "their way to other ranks. Call zero_grad() before loss.backward(), and optimizer.step() after it on "
                "all ranks, or on none; to drop gradients, call optimizer.synchronize() first, on every rank."
            )
        self._hvd_synchronized = self._hvd_synchronized_inside = False
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """`torch.optim.Optimizer.load_state_dict`; gradients that are on their way are reduced first.

        Other ranks may wait for them. Whoever goes back between backward() and step(), as after a loss that is nan, can
        call zero_grad() next.
        """
        if self._hvd_reducer.arrival.has_pending:
            with suppress(HorovodInternalError):  # after a failure nobody waits for them
                self._hvd_reduce()
                self._hvd_synchronized_inside = True
        super().load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`torch.optim.Optimizer.add_param_group`; the new gradients are reduced as well."""
        super().add_param_group(param_group)
        first = len(self.param_groups) - 1
        try:
            added = parameters_of(self.param_groups[first:], self._hvd_arguments["named_parameters"], first)
        except ValueError:
            del self.param_groups[first]  # which would be stepped without being reduced
            raise
        self._hvd_reducer.add(added)
