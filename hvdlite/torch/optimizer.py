"""DistributedOptimizer: a torch optimizer that trains on all ranks together."""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from hvdlite.dtypes import ReduceOp
from hvdlite.torch.adasum import check_adasum
from hvdlite.torch.adasum_optimizer import AdasumOptimizer
from hvdlite.torch.bucket_maker import GradientOptions
from hvdlite.torch.compression import AnyCompressor, Compression, check_compression
from hvdlite.torch.gradient_optimizer import GradientOptimizer
from hvdlite.torch.other_wrappers import check_unwrapped
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set
from hvdlite.torch.reduce_options import Adasum, Average, check_op, reduce_options
from hvdlite.torch.reducer import GradientReducer
from hvdlite.torch.wrapped_optimizer import (
    WrappedOptimizer,
    check_all_have_names,
    check_named_parameters,
    check_passes,
    parameters_of,
    with_names,
)


class DistributedOptimizer(WrappedOptimizer):
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
            Those that come into its groups later, and are not among them, are called by their places there.
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

    Attributes:
        synchronizes_once: `synchronize` and step() do nothing where `synchronize` was called since the step before, and
            no gradient has come since. False at first: step() then reduces a second time, and warns, unless it is
            called inside `skip_synchronize`.

    Raises:
        UsageError: ``op`` is none of ours.
        ValueError: another argument makes no sense, ``optimizer`` was wrapped before, or its parameters belong to a
            DistributedDataParallel or FullyShardedDataParallel module; names it and the way out.
        NotInitializedError: hvdlite does not run; call hvd.init() first.
        NotImplementedError: `Adasum` with a number of ranks that is no power of two, or not on the global process set.
    """

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
    ) -> DistributedOptimizer:
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError(
                "the optimizer is a hvd.DistributedOptimizer already, and would reduce every gradient twice; pass the "
                "options to the first hvd.DistributedOptimizer(...), and leave the second one out"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer, as in "
                "hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())"
            )
        if num_groups:
            warnings.warn("num_groups is deprecated; pass groups", DeprecationWarning, stacklevel=2)
            groups = num_groups if groups is None else groups
        check_unwrapped(parameter for group in optimizer.param_groups for parameter in group["params"])
        named = None if named_parameters is None else check_named_parameters(named_parameters)
        if named is not None:
            check_all_have_names(optimizer.param_groups, named)
        parameters = parameters_of(optimizer.param_groups, named)
        checked_op = check_op(op)
        factor = _check_predivide_factor(gradient_predivide_factor, checked_op)
        positions = _check_groups(groups, parameters)
        arguments = {
            "named_parameters": named,
            "compression": check_compression(compression),
            "backward_passes_per_step": check_passes(backward_passes_per_step),
            "op": checked_op,
            "gradient_predivide_factor": gradient_predivide_factor,
            "groups": groups,
            "sparse_as_dense": sparse_as_dense,
            "process_set": check_process_set(process_set),
        }
        if checked_op is Adasum:
            check_adasum(process_set)
            combined: DistributedOptimizer = _become(optimizer, AdasumOptimizer, arguments)
            return combined
        reduce = reduce_options(None, checked_op, 1.0 / factor, factor, process_set, compression)
        options = GradientOptions(reduce, compression, sparse_as_dense)
        reducer = GradientReducer(parameters, options, positions, backward_passes_per_step)
        reduced: DistributedOptimizer = _become(optimizer, GradientOptimizer, arguments)
        cast(GradientOptimizer, reduced)._hvd_reduce_by(reducer)
        return reduced

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing: `__new__` returns an optimizer that was initialized by whoever made it."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        base = type(self).__bases__[-1]
        arguments = self._hvd_arguments
        if arguments["named_parameters"] is not None:
            named = with_names(self.param_groups, arguments["named_parameters"])
            arguments = {**arguments, "named_parameters": named}  # those that came later, too
        return _restore, (base, self.__getstate__(), arguments)


def _become(optimizer: torch.optim.Optimizer, kind: type[WrappedOptimizer], arguments: dict[str, Any]) -> Any:
    """``optimizer`` itself, of a class that is a `DistributedOptimizer`, of ``kind``, and its own."""
    base = type(optimizer)
    optimizer.__class__ = types.new_class(
        base.__name__,
        (DistributedOptimizer, kind, base),
        exec_body=lambda namespace: namespace.update(
            __module__=base.__module__, __qualname__=base.__qualname__, __doc__=base.__doc__
        ),
    )
    self: Any = optimizer
    self._hvd_start(arguments)
    return self


def _restore(base: type[torch.optim.Optimizer], state: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Undo `DistributedOptimizer.__reduce_ex__`, like pickle does for the wrapped class."""
    optimizer = base.__new__(base)
    optimizer.__setstate__(state)
    return DistributedOptimizer(optimizer, **arguments)


# What users pass, checked.


def _check_predivide_factor(factor: float, op: ReduceOp) -> float:
    if factor != 1.0 and op is not Average:
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
