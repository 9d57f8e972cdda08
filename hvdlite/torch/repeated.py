"""Allreduces that a program does again and again, once ranks have agreed on their order.

Who waits for one has it done in one call; others are collected into bursts. Both look whether all is as it was before,
and usual; what is not, or is a mistake, is for the ways of any other operation.
"""

from __future__ import annotations

import torch

from hvdlite.dtypes import ReduceOp
from hvdlite.memory.base import Home
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.prepared import PreparedAllreduce, Tensors, can_be_prepared
from hvdlite.torch.compression import AnyCompressor, Compression, is_custom
from hvdlite.torch.device import is_on_device
from hvdlite.torch.handle import Handle, HandleInBurst
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.reduce_options import Adasum, reduce_options
from hvdlite.torch.tensor_view import contiguous_block, view_of

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_OPS = frozenset({type(None), int, ReduceOp})


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
    home = group.memory.find(address, tensor.nbytes) if in_place else None
    key = name, op, prescale, postscale, compression, tensor.dtype, tensor.shape, None if home is None else home.place
    prepared = PreparedAllreduce.known(
        group, key, lambda: _request(tensor, name, op, prescale, postscale, process_set, compression, home), home
    )
    if prepared is None:
        return None
    result = tensor if in_place else torch.empty_like(tensor)
    inputs = [address]
    outputs = inputs if in_place else [result.data_ptr()]
    group.perform(prepared, Tensors(inputs, outputs, home, (tensor, result)), name)
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
    key = name, op, prescale, postscale, tensor.dtype, tensor.shape
    request = group.requests.get(key)
    if request is None:
        made = _request(tensor, name, op, prescale, postscale, process_set, Compression.none, None)
        if made is None:
            return None
        request = group.requests.remember(key, made)
    result = tensor if in_place else torch.empty_like(tensor)
    # Its storages are owned as they are now, should `tensor.set_()` bring another.
    owner = tensor.untyped_storage() if in_place else (tensor.untyped_storage(), result)
    count = group.count if name is None else None
    taken = collector.take(request, address, address if in_place else result.data_ptr(), owner, count)
    return None if taken is None else HandleInBurst(*taken, group.recorder, name, result)


def _usual_address(tensor: torch.Tensor, name: str | None, op: int | None) -> int | None:
    """That of ``tensor``; None where it has no memory of its own, or not that of the host, or anything is unusual."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    if is_on_device(tensor) or type(op) not in _OPS or (name is not None and type(name) is not str):
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # inside torch.vmap, for example
        return None
    return address if address or (tensor.is_cpu and not tensor.numel()) else None


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
    if options.reduction.op is Adasum or is_custom(compression) or tensor.dtype is torch.bool:
        return None
    views = [view_of(contiguous_block(tensor, "allreduce"))]
    place = None if home is None else home.place
    return Allreduce.of(name, views, options.reduction, options.wire_dtype, place, False)
