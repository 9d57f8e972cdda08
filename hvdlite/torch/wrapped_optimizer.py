"""What both kinds of `hvdlite.torch.DistributedOptimizer` have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hvdlite.recorder import NO_SPAN, Lane, Recorder
from hvdlite.timeline.groups import ALONE
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.tensor_view import check_parameter


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer whose class was replaced by a subclass, with a step() that concerns all ranks.

    Attributes:
        synchronizes_once: see `DistributedOptimizer`.
    """

    synchronizes_once = False

    _hvd_arguments: dict[str, Any]
    _hvd_inner_step: Callable[..., Any] | None
    found_inf: torch.Tensor | None
    grad_scale: torch.Tensor | None
    _opt_called: bool

    def _hvd_start(self, arguments: dict[str, Any]) -> None:
        """Called once, when the class of this object has been replaced."""
        self._hvd_arguments = arguments
        # A learning rate scheduler made before this has put a wrapper of step() into the object, which hides ours.
        self._hvd_inner_step = vars(self).pop("step", None)

    def synchronize(self) -> None:
        """Wait until every gradient is the reduced one. A parameter without gradient on this rank counts as zeros.

        Raises:
            HorovodInternalError: a gradient could not be reduced; says why.
        """
        raise NotImplementedError

    def synchronize_pending(self) -> None:
        """`synchronize`, if gradients have come since the last time; not those of passes in `no_sync`."""
        raise NotImplementedError

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """step() in this context takes the gradients as they are, since synchronize() was called before."""
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context accumulate gradients on their own rank; a pass outside reduces the sum."""
        yield

    @property
    def backward_passes_per_step(self) -> int:
        """As it was given; assignment is `set_backward_passes_per_step`."""
        passes: int = self._hvd_arguments["backward_passes_per_step"]
        return passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change ``backward_passes_per_step``; between steps, on all ranks alike.

        Raises:
            ValueError: ``passes`` is below 1.
            UsageError: called between backward() and step().
        """
        self._hvd_arguments["backward_passes_per_step"] = check_passes(passes)

    def _hvd_abandon(self) -> None:
        """Drop gradients that were on their way when hvdlite was shut down; it runs again."""

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Of every parameter; Horovod's name, which programs read."""
        named = parameters_of(self.param_groups, self._hvd_arguments["named_parameters"])
        return {parameter: name for name, parameter in named}

    def _hvd_step_inside(self, recorder: Recorder, kwargs: dict[str, Any]) -> Any:
        """The step of the wrapped optimizer."""
        self._opt_called = True
        inner = self._hvd_inner_step or super().step
        with self._hvd_span_of_step(recorder) if recorder.enabled else NO_SPAN:
            return inner(**kwargs)

    def _hvd_span_of_step(self, recorder: Recorder) -> AbstractContextManager[None]:
        """It says which ranks step together."""
        process_set: ProcessSet = self._hvd_arguments["process_set"]
        label = str(process_set.process_set_id) if process_set.included() else ALONE
        return recorder.span(Lane.OPTIMIZER, "step", dtype=label)

    @property
    def _hvd_unscales_inside(self) -> bool:
        """`_step_supports_amp_scaling` of the wrapped optimizer; fused ones do."""
        inherited = getattr(super(), "_step_supports_amp_scaling", False)
        return bool(vars(self).get("_step_supports_amp_scaling", inherited))

    def _hvd_unscale(self) -> None:
        """Multiply gradients by 1 / grad_scale, unless the wrapped optimizer does."""
        if self._hvd_unscales_inside:
            return
        if self.grad_scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(1.0 / self.grad_scale.item())
        self.grad_scale = self.found_inf = None  # optimizers that cannot use these refuse to see them


# What users pass, checked.


def check_named_parameters(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Raises:
    ValueError: these are no pairs of name and parameter; several have one name.
    """
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if not all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor) for item in named):
        raise ValueError("named_parameters must yield pairs of name and parameter; pass model.named_parameters()")
    duplicates = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if duplicates:
        raise ValueError(
            f"named_parameters has these names several times: {', '.join(duplicates)}. Give each model a prefix of its "
            "own, as in model.named_parameters(prefix='generator')."
        )
    return named


def check_all_have_names(groups: Sequence[Mapping[str, Any]], named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises:
    ValueError: ``named`` lacks a parameter of ``groups``.
    """
    known = {id(parameter) for _, parameter in named}
    for number, group in enumerate(groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"named_parameters lacks parameter {i} of group {number}, of shape {tuple(parameter.shape)}; pass "
                    "model.named_parameters() of all models whose parameters the optimizer has"
                )


def with_names(
    groups: Sequence[Mapping[str, Any]], named: Iterable[tuple[str, torch.Tensor]] | None, first_group: int = 0
) -> list[tuple[str, torch.Tensor]]:
    """The parameters of ``groups``, each with its name; one that came later than ``named`` has that of its place."""
    names = {id(parameter): name for name, parameter in named or ()}
    return [
        (names.get(id(parameter), f"group{number}.{i}"), parameter)
        for number, group in enumerate(groups, first_group)
        for i, parameter in enumerate(group["params"])
    ]


def parameters_of(
    groups: Sequence[Mapping[str, Any]], named: Iterable[tuple[str, torch.Tensor]] | None, first_group: int = 0
) -> list[tuple[str, torch.Tensor]]:
    """Those of `with_names` that can have gradients, which quantized weights have not.

    Raises:
        ValueError: hvdlite cannot communicate the gradient of one.
    """
    return [
        (name, check_parameter(parameter, name))
        for name, parameter in with_names(groups, named, first_group)
        if parameter.is_floating_point() or parameter.is_complex()
    ]


def check_passes(passes: int) -> int:
    """Raises:
    ValueError: below 1, or no whole number.
    """
    if not hasattr(passes, "__index__") or passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes!r}; it must be a whole number, at least 1")
    return passes
