"""Allreduces and small broadcasts that a program does again and again, once ranks have agreed on their order.

Who waits for one has it done in one call; others are collected into bursts. Both look whether all is as it was before,
and usual; what is not, or is a mistake, is for the ways of any other operation. What is as it was in the last period of
the plan is done by native code alone (csrc/shortcut.h, csrc/collecting.h): `again` asks it first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from hvdlite._native import Signature
from hvdlite.coordinator.request import NAMED
from hvdlite.dtypes import ReduceOp
from hvdlite.group import Group
from hvdlite.memory.base import Home
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.broadcast import Broadcast
from hvdlite.operations.prepared import PreparedAllreduce, Tensors, can_be_prepared
from hvdlite.torch import device
from hvdlite.torch.compression import AnyCompressor, Compression, is_custom
from hvdlite.torch.device import is_on_device
from hvdlite.torch.handle import Handle, HandleInBurst, label_of
from hvdlite.torch.process_set import ProcessSet, global_process_set
from hvdlite.torch.reduce_options import Adasum, reduce_options
from hvdlite.torch.tensor_view import contiguous_block, view_of

R = TypeVar("R")

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_OPS = frozenset({type(None), int, ReduceOp})
_NUMBERS = frozenset({float, int})
_BROADCAST = object()  # where an allreduce has its factors


def again(*, in_place: bool, is_awaited: bool) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """A form of `hvd.allreduce` without compression, for which native code is asked before anything else."""

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @wraps(function)
        def call(
            tensor: Any,
            average: bool | None = None,
            name: str | None = None,
            op: int | None = None,
            prescale_factor: float = 1.0,
            postscale_factor: float = 1.0,
            process_set: ProcessSet = global_process_set,
        ) -> R:
            shortcuts = getattr(process_set, "shortcuts", None)
            if shortcuts is not None and average is None:
                done: R | None = shortcuts[is_awaited](tensor, name, op, prescale_factor, postscale_factor, in_place)
                if done is not None:
                    return done
            return function(tensor, average, name, op, prescale_factor, postscale_factor, process_set)

        return call

    return decorate


def _shorten(process_set: ProcessSet, group: Group) -> None:
    """Have `again` ask what knows the operations of ``group``."""
    are_real = type(device.gpus) is device.Gpus  # else memory of the host may be said to be a GPU's
    if group.shortcuts is None and are_real:
        coordinator, unnamed = group.world.coordinator, group.unnamed(Allreduce.label)
        make_handle = partial(HandleInBurst, group.recorder)
        group.shortcuts = (
            coordinator.collector.native.function(make_handle, torch.empty_like, NAMED, unnamed),
            coordinator.at_once.shortcut.function(torch.empty_like),
        )
    process_set.shortcuts = group.shortcuts


def reduced_at_once(
    tensor: torch.Tensor,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: AnyCompressor = Compression.none,
    *,
    in_place: bool,
) -> torch.Tensor | None:
    """What the operation returns; None where nothing was done, and it must be started as any other."""
    if not issubclass(type(process_set), ProcessSet):
        return None
    group = process_set.group_of_members()
    if group is None or not can_be_prepared(group):
        return None
    address = _usual_address(tensor, name, op)
    if address is None:
        return None
    if is_custom(compression):  # it may be no key of a dictionary
        return None
    prescale, postscale = _number(prescale), _number(postscale)
    home = group.memory.find(address, tensor.nbytes) if in_place else None
    key = name, op, prescale, postscale, compression, tensor.dtype, tensor.shape, None if home is None else home.place
    prepared = PreparedAllreduce.known(
        group, key, lambda: _request(tensor, name, op, prescale, postscale, process_set, compression, home), home
    )
    if prepared is None:
        return None
    if prepared.signature is None and compression is Compression.none:
        prepared.signature = _signature(tensor, name, op, prescale, postscale, prepared.home_memory)
        _shorten(process_set, group)
    return _performed(group, prepared, tensor, address, name, home, in_place=in_place)


def broadcast_at_once(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool
) -> torch.Tensor | None:
    """Likewise of a broadcast; native code is asked before anything else."""
    shortcuts = getattr(process_set, "shortcuts", None)
    if shortcuts is not None:
        done: torch.Tensor | None = shortcuts[True](tensor, name, root_rank, _BROADCAST, _BROADCAST, in_place)
        if done is not None:
            return done
    if not issubclass(type(process_set), ProcessSet) or type(root_rank) is not int:
        return None
    group = process_set.group_of_members()
    if group is None or not can_be_prepared(group) or root_rank not in group.ranks:
        return None
    address = _usual_address(tensor, name, root_rank)
    if address is None:
        return None

    def request() -> Broadcast:
        view = view_of(contiguous_block(tensor, label_of("broadcast", name)))
        return Broadcast.of(name, [view], root_rank, True)

    key = _BROADCAST, name, root_rank, tensor.dtype, tensor.shape
    prepared = PreparedAllreduce.known(group, key, request, None)
    if prepared is None:
        return None
    if prepared.signature is None:
        prepared.signature = _signature(tensor, name, root_rank, _BROADCAST, _BROADCAST, None)
        _shorten(process_set, group)
    return _performed(group, prepared, tensor, address, name, None, in_place=in_place)


def _performed(
    group: Group,
    prepared: PreparedAllreduce,
    tensor: torch.Tensor,
    address: int,
    name: str | None,
    home: Home | None,
    *,
    in_place: bool,
) -> torch.Tensor:
    result = tensor if in_place else torch.empty_like(tensor)
    inputs = [address if prepared.gives else 0]
    outputs = inputs if in_place and prepared.gives else [result.data_ptr()]
    # Its storages are owned as they are now: if a signal ends the wait, `tensor.set_()` may bring another.
    group.perform(prepared, Tensors(inputs, outputs, home, (tensor.untyped_storage(), result)), name)
    return result


def begun_in_burst(
    tensor: torch.Tensor,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    in_place: bool,
) -> Handle[torch.Tensor] | None:
    """The handle of the operation; None where nothing was done, and it must be started as any other."""
    if not issubclass(type(process_set), ProcessSet):
        return None
    group = process_set.group_of_members()
    if group is None:
        return None
    collector = group.world.coordinator.collector
    if not collector.expects_bursts:
        return None
    address = _usual_address(tensor, name, op)
    if address is None:
        return None
    prescale, postscale = _number(prescale), _number(postscale)
    key = name, op, prescale, postscale, tensor.dtype, tensor.shape
    request = group.requests.get(key)
    if request is None:
        made = _request(tensor, name, op, prescale, postscale, process_set, Compression.none, None)
        if made is None:
            return None
        request = group.requests.remember(key, made)
    result = tensor if in_place else torch.empty_like(tensor)
    # Likewise, while the operation is under way.
    owner = tensor.untyped_storage() if in_place else (tensor.untyped_storage(), result)
    count = group.count if name is None else None
    taken = collector.take(request, address, address if in_place else result.data_ptr(), owner, count)
    if taken is None:
        return None
    burst, place = taken
    if collector.learn(burst, place, lambda: _signature(tensor, name, op, prescale, postscale, None)):
        _shorten(process_set, group)
    return HandleInBurst(group.recorder, burst, place, result, name)


def _signature(
    tensor: torch.Tensor,
    name: str | None,
    op: int | None,
    prescale: object,
    postscale: object,
    home: weakref.ref[Any] | None,
) -> Signature:
    return Signature(tensor, name, op, prescale, postscale, not tensor.numel(), home)


def _usual_address(tensor: torch.Tensor, name: str | None, op: int | None) -> int | None:
    """That of ``tensor``; None where it has no memory of its own, or not that of the host, or anything is unusual."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    if is_on_device(tensor) or type(op) not in _OPS or (name is not None and type(name) is not str):
        return None
    if tensor.is_neg():  # the imaginary part of a conjugate, which reads as minus what is there
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # inside torch.vmap, for example
        return None
    return address if address or (tensor.is_cpu and not tensor.numel()) else None


def _number(factor: float) -> float:
    """That of a tensor or an array is what it is now, and may be another one the next time."""
    return factor if type(factor) in _NUMBERS else float(factor)


def _request(
    tensor: torch.Tensor,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: AnyCompressor,
    home: Home | None,
) -> Allreduce | None:
    """None for what is more than one reduction, or a mistake."""
    options = reduce_options(None, op, prescale, postscale, process_set, compression)
    if options.reduction.op is Adasum or tensor.dtype is torch.bool:
        return None
    views = [view_of(contiguous_block(tensor, "allreduce"))]
    place = None if home is None else home.place
    return Allreduce.of(name, views, options.reduction, options.wire_dtype, place, False)
