"""Allreduces and broadcasts that a program does again and again, once ranks have agreed on their order.

Who waits for one has it done in one call; others are collected into bursts. Both look whether all is as it was before,
and usual; what is not, or is a mistake, is for the ways of any other operation. What is as it was in the last period of
the plan is done by native code alone, which is asked before anything else (shortcuts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from hvdlite.group import Group
from hvdlite.memory.base import Home
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.broadcast import Broadcast, PreparedBroadcast
from hvdlite.operations.prepared import PreparedOperation, prepared_once
from hvdlite.operations.prepared_allreduce import PreparedAllreduce
from hvdlite.operations.prepared_on_device import PreparedOnDevice
from hvdlite.torch.compression import AnyCompressor, Compression, is_custom
from hvdlite.torch.device import Now, new_empty
from hvdlite.torch.handle import Handle, HandleInBurst, label_of
from hvdlite.torch.process_set import ProcessSet, global_process_set
from hvdlite.torch.reduce_options import Adasum, reduce_options
from hvdlite.torch.shortcuts import number, performed, preparing_group, shorten, show, signature_of, usual_address
from hvdlite.torch.tensor_view import contiguous_block, view_of

R = TypeVar("R")


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
                ask = shortcuts.allreduce if is_awaited else shortcuts.submit
                done: R | None = ask(tensor, name, op, prescale_factor, postscale_factor, in_place)
                if done is not None:
                    return done
            return function(tensor, average, name, op, prescale_factor, postscale_factor, process_set)

        return call

    return decorate


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
    group, address = preparing_group(process_set), usual_address(tensor, name, op)
    if group is None or is_custom(compression):  # which may be no key of a dictionary
        return None
    if compression is Compression.none and group.world.coordinator.collector.is_open:  # for what may come next
        handle = _begun_in_burst(group, tensor, name, op, prescale, postscale, process_set, in_place)
        if handle is not None:
            return handle.synchronize()
    if address is None:
        return _reduced_on_device(tensor, name, op, prescale, postscale, process_set, compression, in_place, group)
    home = group.memory.find(address, tensor.nbytes) if in_place else None
    prepared = _prepared(group, tensor, name, op, prescale, postscale, process_set, compression, home)
    if prepared is None:
        return None
    result = tensor if in_place else torch.empty_like(tensor)
    return performed(group, prepared, tensor, address, result, name, home)


def _prepared(
    group: Group,
    tensor: torch.Tensor,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: AnyCompressor,
    home: Home | None,
) -> PreparedAllreduce | None:
    prescale, postscale = number(prescale), number(postscale)
    place = None if home is None else home.place
    key = Allreduce, name, op, prescale, postscale, compression, tensor.dtype, tensor.shape, place

    def prepare() -> PreparedAllreduce | None:
        request = _request(tensor, name, op, prescale, postscale, process_set, compression, home)
        return PreparedAllreduce.of(group, request, home)

    prepared = prepared_once(group, key, prepare)
    if prepared is not None and compression is Compression.none:
        show(process_set, group, prepared, tensor, name, op, prescale, postscale)
    return prepared


def _reduced_on_device(
    tensor: torch.Tensor,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: AnyCompressor,
    in_place: bool,
    group: Group,
) -> torch.Tensor | None:
    """The same on a GPU: it is enqueued, in order with the current stream."""
    device = group.world.executor.device  # there once an operation has been done there
    address = None if device is None else usual_address(tensor, name, op, on_device=True)
    if device is None or address is None:
        return None
    prescale, postscale = number(prescale), number(postscale)
    key = PreparedOnDevice, name, op, prescale, postscale, compression, tensor.dtype, tensor.shape, tensor.device
    if in_place and device.memory.find(address, tensor.nbytes) is not None:  # which is reduced where it lives
        return None

    def prepare() -> PreparedOnDevice | None:
        here = Now().on_device(tensor)
        assert here is not None
        request = _request(tensor, name, op, prescale, postscale, process_set, compression, None)
        return PreparedOnDevice.of(group, device, request, here)

    prepared = prepared_once(group, key, prepare)
    if prepared is None:
        return None
    result = tensor if in_place else new_empty(tensor, tuple(tensor.shape))
    return performed(group, prepared, tensor, address, result, name)


def broadcast_at_once(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool
) -> torch.Tensor | None:
    """Likewise of a broadcast."""
    shortcuts = getattr(process_set, "shortcuts", None)
    if shortcuts is not None:
        done: torch.Tensor | None = shortcuts.broadcast(tensor, name, root_rank, None, None, in_place)
        if done is not None:
            return done
    group, address = preparing_group(process_set), usual_address(tensor, name, root_rank)
    if group is None or address is None or type(root_rank) is not int or root_rank not in group.ranks:
        return None

    def prepare() -> PreparedOperation | None:
        view = view_of(contiguous_block(tensor, label_of("broadcast", name)))
        request = Broadcast.of(name, [view], root_rank, True)
        return PreparedAllreduce.of(group, request, None) or PreparedBroadcast.of(group, request)

    prepared = prepared_once(group, (Broadcast, name, root_rank, tensor.dtype, tensor.shape), prepare)
    if prepared is None:
        return None
    show(process_set, group, prepared, tensor, name, root_rank)
    result = tensor if in_place else torch.empty_like(tensor)
    return performed(group, prepared, tensor, address, result, name)


def begun_at_once(
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
    group = preparing_group(process_set)
    if group is None:
        return None
    asked = tensor, name, op, prescale, postscale, process_set, in_place
    handle = _begun_in_burst(group, *asked)
    return _begun_alone(group, *asked) if handle is None else handle


def _begun_in_burst(
    group: Group,
    tensor: torch.Tensor,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    in_place: bool,
) -> Handle[torch.Tensor] | None:
    """As part of a burst."""
    collector = group.world.coordinator.collector
    if not collector.expects_bursts:
        return None
    address = usual_address(tensor, name, op)
    if address is None:
        return None
    prescale, postscale = number(prescale), number(postscale)
    key = name, op, prescale, postscale, tensor.dtype, tensor.shape
    request = group.requests.get(key)
    if request is None:
        made = _request(tensor, name, op, prescale, postscale, process_set, Compression.none, None)
        if made is None:
            return None
        request = group.requests.remember(key, made)
    result = tensor if in_place else torch.empty_like(tensor)
    # Storages are owned as they are now: while the operation is under way `tensor.set_()` may bring another.
    owner = tensor.untyped_storage() if in_place else (tensor.untyped_storage(), result)
    count = group.count if name is None else None
    taken = collector.take(request, address, address if in_place else result.data_ptr(), owner, count)
    if taken is None:
        return None
    burst, place = taken
    if collector.learn(burst, place, lambda: signature_of(Allreduce.label, tensor, name, op, prescale, postscale)):
        shorten(process_set, group)
    return HandleInBurst(group.recorder, burst, place, result, name)


def _begun_alone(
    group: Group,
    tensor: torch.Tensor,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    in_place: bool,
) -> Handle[torch.Tensor] | None:
    """Of few bytes."""
    coordinator = group.world.coordinator
    coordinator.settle_started()
    if not coordinator.at_once.is_free:
        return None
    address = usual_address(tensor, name, op)
    if address is None:
        return None
    home = group.memory.find(address, tensor.nbytes) if in_place else None
    prepared = _prepared(group, tensor, name, op, prescale, postscale, process_set, Compression.none, home)
    if prepared is None or not group.opens_for(prepared, name):
        return None
    handle: Handle[torch.Tensor] | None = group.shortcuts.submit(tensor, name, op, prescale, postscale, in_place)
    return handle


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
