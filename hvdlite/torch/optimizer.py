"""DistributedOptimizer: a torch optimizer whose step() uses the gradients of all ranks."""

from __future__ import annotations

import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdlite.timeline.recorder import Lane
from hvdlite.torch.adasum import Adasum, check_adasum
from hvdlite.torch.allreduce import Average, allreduce, check_op
from hvdlite.torch.compression import AnyCompressor, Compression
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set
from hvdlite.torch.reducer import GradientReducer, Reduction
from hvdlite.torch.tensor_view import check_tensor


class DistributedOptimizer(torch.optim.Optimizer):
    """Makes ``optimizer`` reduce its gradients over all ranks, while backward runs, before each step.

    It stays the same object, of a subclass of its class: whoever holds it already (a learning rate scheduler, for
    example) goes on with the distributed one, and parameter groups, state and hooks are its own.

    Clip gradients, or unscale them with `torch.amp.GradScaler`, between `synchronize` and step()::

        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    Where nothing is clipped, ``scaler.step(optimizer)`` is enough. Either way all ranks skip a step in which one of
    them had an overflow.

    From the first step on ``p.grad`` is memory that later steps overwrite, after zero_grad() as well: clone what you
    want to keep.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        named_parameters: ``model.named_parameters()``, for messages; may name more parameters than ``optimizer`` has.
        compression: of gradients on their way: a member of `Compression`, or a `Compressor` of your own.
        backward_passes_per_step: passes whose gradients are added up on their own rank before they are reduced.
        op: `Average`, `Sum`, `Min`, `Max` or `Product` of the gradients; or `Adasum` of what the step of each rank does
            to the parameters, see `hvdlite.torch.adasum_optimizer`.
        gradient_predivide_factor: gradients are divided by it before they are added, and by size() / it afterwards.
        num_groups: deprecated, use ``groups``.
        groups: reduce gradients in this many groups, or in these groups of parameters, and not by size.
        sparse_as_dense: make sparse gradients dense (for the step of SparseAdam sparse again). Without it those of
            embeddings stay sparse with `Average` and `Sum`: rows are gathered, see `sparse_allreduce_async`; a
            `Compressor` of your own does not see them.
        process_set: who takes part; on other ranks every step is of their own gradients.

    Raises:
        ValueError: an argument makes no sense; names it and the way out.
        NotInitializedError, ShutDownError: hvdlite does not run; call hvd.init() first.
        NotImplementedError: `Adasum` with a number of ranks that is no power of two, or not on the global process set.
    """

    _hvd_arguments: dict[str, Any]
    _hvd_inner_step: Callable[..., Any] | None
    _hvd_reducer: GradientReducer
    _hvd_should_synchronize: bool
    _hvd_synchronized: bool
    _hvd_synchronized_by_scaler: bool
    found_inf: torch.Tensor | None
    grad_scale: torch.Tensor | None
    _opt_called: bool

    def __new__(
        cls,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        compression: AnyCompressor = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("optimizer is a DistributedOptimizer already; wrap it only once")
        if num_groups:
            warnings.warn("num_groups is deprecated; pass groups", DeprecationWarning, stacklevel=2)
            groups = num_groups if groups is None else groups
        named = None if named_parameters is None else _check_named_parameters(named_parameters)
        parameters = parameters_of(optimizer.param_groups, named)
        reduction = Reduction(
            check_op(op),
            _check_predivide_factor(gradient_predivide_factor, op),
            compression,
            sparse_as_dense,
            check_process_set(process_set),
        )
        passes = _check_passes(backward_passes_per_step)
        positions = _check_groups(groups, parameters)
        if op == Adasum:
            from hvdlite.torch.adasum_optimizer import AdasumOptimizer  # a subclass of this one

            check_adasum(process_set)
            cls, parameters, positions = AdasumOptimizer, [], []
        reducer = GradientReducer(parameters, reduction, positions, passes)
        # Hooks belong to parameters, which may live longer, and be given to another optimizer.
        weakref.finalize(optimizer, reducer.close).atexit = False

        base = type(optimizer)
        optimizer.__class__ = types.new_class(
            base.__name__,
            (cls, base),
            exec_body=lambda namespace: namespace.update(
                __module__=base.__module__, __qualname__=base.__qualname__, __doc__=base.__doc__
            ),
        )
        self: Any = optimizer
        self._hvd_reducer = reducer
        self._hvd_should_synchronize = True
        self._hvd_synchronized = False
        self._hvd_synchronized_by_scaler = False
        self._hvd_arguments = {
            "named_parameters": named,
            "compression": compression,
            "op": op,
            "gradient_predivide_factor": gradient_predivide_factor,
            "groups": groups,
            "sparse_as_dense": sparse_as_dense,
            "process_set": process_set,
        }
        # A learning rate scheduler made before this has put a wrapper of step() into the object, which hides ours.
        self._hvd_inner_step = vars(self).pop("step", None)
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing: `__new__` returns an optimizer that was initialized by whoever made it."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        arguments = {**self._hvd_arguments, "backward_passes_per_step": self._hvd_reducer.passes}
        return _restore, (type(self).__bases__[1], self.__getstate__(), arguments)

    def synchronize(self) -> None:
        """Wait until every gradient is the reduced one. A parameter without gradient on this rank counts as zeros.

        Raises:
            HorovodInternalError: a gradient could not be reduced; says why.
        """
        self._hvd_reducer.synchronize()
        self._hvd_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """step() in this context takes the gradients as they are, since synchronize() was called before."""
        self._hvd_should_synchronize = False
        try:
            yield
        finally:
            self._hvd_should_synchronize = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context accumulate gradients on their own rank; a pass outside reduces the sum."""
        with self._hvd_reducer.paused():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change ``backward_passes_per_step``; between steps, on all ranks alike.

        Raises:
            ValueError: ``passes`` is below 1.
            AssertionError: called between backward() and step().
        """
        if self._hvd_reducer.has_pending:
            raise AssertionError(
                "set_backward_passes_per_step() was called between backward() and step(); call it after step()"
            )
        self._hvd_reducer.passes = _check_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Synchronize, then do the step of the wrapped optimizer.

        With ``closure`` gradients are synchronized each time that it has been called, and the loss that it returns is
        reduced like them, so that an optimizer that decides by the loss (LBFGS) decides alike on every rank.
        """
        reducer = self._hvd_reducer
        if closure is not None:
            if reducer.has_pending:
                self.synchronize()
            kwargs["closure"] = self._synchronizing(closure)
        elif self._hvd_should_synchronize and (reducer.has_pending or not self._hvd_synchronized_by_scaler):
            if self._hvd_synchronized and not reducer.has_pending:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): it "
                    "reduces the gradients a second time; call it inside `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
        elif self._hvd_should_synchronize and self._hvd_must_skip():
            self._hvd_synchronized_by_scaler = False
            return None
        return self._hvd_step_inside(kwargs)

    # Read by torch. The inner step() has the hooks of torch.optim, which would run twice around both. And learning rate
    # schedulers need not wrap step() to learn that it was called: it tells them, by _opt_called.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _hvd_step_inside(self, kwargs: dict[str, Any]) -> Any:
        """The step of the wrapped optimizer."""
        self._hvd_synchronized = self._hvd_synchronized_by_scaler = False
        self._opt_called = True
        inner = self._hvd_inner_step or super().step
        if self._hvd_arguments["sparse_as_dense"] and isinstance(self, torch.optim.SparseAdam):  # it takes no others
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and not parameter.grad.is_sparse:
                        parameter.grad = parameter.grad.to_sparse(1)
        with self._hvd_reducer.recorder.span(Lane.OPTIMIZER, "step"):
            return inner(**kwargs)

    # `torch.amp.GradScaler.step` reads _step_supports_amp_scaling before it looks at gradients. If that is false, it
    # unscales them and calls step() where it finds no overflow; if it is true, it calls step() in any case, and leaves
    # found_inf and grad_scale in attributes for that time.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether step() unscales gradients, and does nothing after an overflow.

        Reading it reduces gradients, unless `synchronize` did: what the scaler finds in them decides about the step
        and about its next scale, and must be the same on every rank.
        """
        synchronized = self._hvd_synchronized or self._hvd_synchronized_by_scaler
        if (
            not self._hvd_reducer.is_distributed
            or not self._hvd_should_synchronize
            or (synchronized and not self._hvd_reducer.has_pending)
        ):
            return self._hvd_unscales_inside
        self._hvd_reducer.synchronize()
        self._hvd_synchronized_by_scaler = True
        return True

    @property
    def _hvd_unscales_inside(self) -> bool:
        """`_step_supports_amp_scaling` of the wrapped optimizer; fused ones do."""
        inherited = getattr(super(), "_step_supports_amp_scaling", False)
        return bool(vars(self).get("_step_supports_amp_scaling", inherited))

    def _hvd_must_skip(self) -> bool:
        """Whether the scaler that called step() found an overflow; otherwise unscales gradients.

        Raises:
            RuntimeError: they were unscaled while they were on their way to other ranks.
        """
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        if self.grad_scale is None:
            del self.grad_scale, self.found_inf  # as the scaler would do after step()
            raise RuntimeError(
                "scaler.unscale_(optimizer) was called while gradients were on their way to other ranks. Call "
                "optimizer.synchronize() before it, and scaler.step(optimizer) inside `with "
                "optimizer.skip_synchronize():`."
            )
        if found.item():
            return True
        self._hvd_unscale()
        return False

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

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        reduction = self._hvd_reducer.reduction

        def synchronized_closure() -> Any:
            loss = closure()
            if self._hvd_should_synchronize:
                self._hvd_reducer.synchronize()
            if isinstance(loss, torch.Tensor) and self._hvd_reducer.is_distributed:
                loss = allreduce(loss.detach(), op=reduction.op, process_set=reduction.process_set)
            return loss

        return synchronized_closure

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Of every parameter; Horovod's name, which programs read."""
        named = parameters_of(self.param_groups, self._hvd_arguments["named_parameters"])
        return {parameter: name for name, parameter in named}

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """`torch.optim.Optimizer.zero_grad`.

        Raises:
            AssertionError: called between backward() and step(), when gradients are on their way.
        """
        if self._hvd_reducer.has_pending:
            raise AssertionError(
                "optimizer.zero_grad() was called between loss.backward() and optimizer.step(), when gradients are on "
                "their way to other ranks. Call optimizer.synchronize() first, on every rank."
            )
        self._hvd_synchronized = self._hvd_synchronized_by_scaler = False
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`torch.optim.Optimizer.add_param_group`; the new gradients are reduced as well."""
        super().add_param_group(param_group)
        first = len(self.param_groups) - 1
        self._hvd_reducer.add(parameters_of(self.param_groups[first:], self._hvd_arguments["named_parameters"], first))


def _restore(base: type[torch.optim.Optimizer], state: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Undo `DistributedOptimizer.__reduce_ex__`, like pickle does for the wrapped class."""
    optimizer = base.__new__(base)
    optimizer.__setstate__(state)
    return DistributedOptimizer(optimizer, **arguments)


# What users pass, checked.


def _check_named_parameters(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    named = list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor) for item in named):
        raise ValueError("named_parameters must yield pairs of name and parameter; pass model.named_parameters()")
    duplicates = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if duplicates:
        raise ValueError(
            f"named_parameters has these names several times: {', '.join(duplicates)}. Give each model a prefix of its "
            "own, as in model.named_parameters(prefix='generator')."
        )
    return named


def parameters_of(
    groups: Sequence[Mapping[str, Any]], named: list[tuple[str, torch.Tensor]] | None, first_group: int = 0
) -> list[tuple[str, torch.Tensor]]:
    """The parameters of ``groups`` that can have gradients, each with its name.

    Raises:
        ValueError: one has no name in ``named``, or hvdlite cannot communicate its gradient.
    """
    names = {id(parameter): name for name, parameter in named or ()}
    parameters = []
    for number, group in enumerate(groups, first_group):
        for i, parameter in enumerate(group["params"]):
            name = f"group{number}.{i}" if named is None else names.get(id(parameter))
            if name is None:
                raise ValueError(
                    f"named_parameters lacks parameter {i} of group {number}, of shape {tuple(parameter.shape)}; pass "
                    "model.named_parameters() of all models whose parameters the optimizer has"
                )
            if parameter.is_floating_point() or parameter.is_complex():  # quantized weights have no gradients
                parameters.append((name, check_tensor(parameter, f"parameter '{name}'")))
    return parameters


def _check_passes(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes}; it must be at least 1")
    return passes


def _check_predivide_factor(factor: float, op: int) -> float:
    if factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor goes with op=hvd.Average only; leave one of them out")
    if factor <= 0:
        raise ValueError(f"gradient_predivide_factor is {factor}; it must be above 0")
    return factor


def _check_groups(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, parameters: Sequence[tuple[str, torch.Tensor]]
) -> int | list[list[int]]:
    """``groups`` as a number, or as positions in ``parameters``; parameters of others are left out."""
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups is {groups}; pass a number of groups, or a list of lists of parameters")
        return groups or []
    position = {id(parameter): i for i, (_, parameter) in enumerate(parameters)}
    taken: set[int] = set()
    positions = []
    for group in groups or ():
        if not (isinstance(group, list | tuple) and all(isinstance(member, torch.Tensor) for member in group)):
            raise ValueError("groups must be a number, or a list of lists of parameters")
        members = [position[id(member)] for member in group if id(member) in position]
        twice = [i for i, count in Counter(members).items() if count > 1 or i in taken]
        if twice:
            raise ValueError(f"groups has parameter '{parameters[twice[0]][0]}' several times; name it once")
        taken.update(members)
        positions.append(members)
    return positions
