"""Steps of programs whose optimizers are torch's own, for the timeline: what torch does without asking hvdlite."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from hvdlite.recorder import Lane, Recorder
from hvdlite.torch.wrapped_optimizer import WrappedOptimizer
from hvdlite_untraced import untraced


@untraced
class OptimizerSteps:
    """Records every step() of an optimizer in this process, by torch's hooks for all of them, until it is closed.

    An optimizer inside another one, as in ZeroRedundancyOptimizer, has no steps of its own; hvdlite's record theirs.
    Programs that record no timeline have no hooks: where there is one, torch.compile divides a step that it compiles.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._outermost: Optimizer | None = None  # in step(), or it has left that by an exception
        self._start_ns = 0
        self._hooks: tuple[RemovableHandle, ...] = ()

    def watch(self) -> None:
        """Begin, if a timeline is recorded. By threads of the program: to add a hook is no matter for a thread beside
        one that may just be calling them.
        """
        if not self._hooks and self._recorder.is_recording:
            self._hooks = (
                register_optimizer_step_pre_hook(self._begun),
                register_optimizer_step_post_hook(self._ended),
            )

    def close(self) -> None:
        """May be called again."""
        for hook in self._hooks:
            hook.remove()

    def _begun(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._outermost in (None, optimizer) and not isinstance(optimizer, WrappedOptimizer):
            self._outermost = optimizer
            self._start_ns = time.monotonic_ns()

    def _ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._outermost:
            self._outermost = None
            self._recorder.add(Lane.OPTIMIZER, "step", self._start_ns, time.monotonic_ns())


class BackwardWaits:
    """Records how long a backward waits for calls that began in it, if their futures are waited for in C++.

    DistributedDataParallel does so in a callback of autograd's engine, once all gradients are computed, and callbacks
    are called in the order in which they were asked for. The first call of a backward comes before it asks for its own,
    so one that is asked for here comes before that, and one that is asked for then comes after.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._backward = -1  # torch's number of the one that is watched

    def expect(self, title: str) -> None:
        """The future of the call ``title`` was taken; whoever took it waits for it at the end of the backward that
        this thread is in, if it is in one.
        """
        if not self._recorder.enabled:
            return
        backward = torch._C._current_graph_task_id()
        if backward in (-1, self._backward):
            return
        self._backward = backward
        start_ns = time.monotonic_ns()

        def wait_begins() -> None:
            begin_ns = time.monotonic_ns()
            self._recorder.add(Lane.BACKWARD, "backward", start_ns, begin_ns)
            at_the_end_of_backward(lambda: self._recorder.add(Lane.WAIT, title, begin_ns, time.monotonic_ns()))

        at_the_end_of_backward(wait_begins)


def at_the_end_of_backward(call: Callable[[], None]) -> None:
    """Of the one that this thread is in; by the thread that ends it, before what others have asked for later."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
