"""From a call in Python to what was prepared for it, by native code alone (csrc/calls/, shortcut.h and collecting.h).

Forms of operations ask it first. What it does not know is done by prepared.py of operations/, and shown to it; what is
more than that, or a mistake, is for the ways of any other operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from hvdlite._native import Signature, exchange_tensors_by
from hvdlite.coordinator.request import NAMED
from hvdlite.dtypes import ReduceOp
from hvdlite.group import Group
from hvdlite.memory.base import Home
from hvdlite.operations.allgather import Allgather
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.alltoall import Alltoall
from hvdlite.operations.barrier import Barrier
from hvdlite.operations.broadcast import Broadcast
from hvdlite.operations.prepared import PreparedOperation, Tensors, can_be_prepared
from hvdlite.operations.reducescatter import Reducescatter
from hvdlite.torch import device
from hvdlite.torch.device import is_on_device
from hvdlite.torch.handle import HandleInBurst, StartedHandle
from hvdlite.torch.process_set import ProcessSet

Shortcut = Callable[..., Any]
"""(tensor, name, op, prescale, postscale, in_place) -> what the operation returns; None where nothing was done."""

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_OPS = frozenset({type(None), int, ReduceOp})
_NUMBERS = frozenset({float, int})

exchange_tensors_by(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))  # from torch 2.11 on


class Shortcuts(NamedTuple):
    """Of a process set: ``submit`` is of asynchronous allreduces, and returns a handle."""

    submit: Shortcut
    allreduce: Shortcut
    broadcast: Shortcut
    allgather: Shortcut
    alltoall: Shortcut
    reducescatter: Shortcut
    barrier: Shortcut


def show(
    process_set: ProcessSet,
    group: Group,
    prepared: PreparedOperation,
    tensor: torch.Tensor,
    name: str | None,
    op: object = None,
    prescale: object = None,
    postscale: object = None,
) -> None:
    """The shortcut what a caller passes for ``prepared``, if it is not known."""
    if prepared.signature is None:
        kind, home = prepared.request.label, prepared.home_memory
        prepared.signature = signature_of(kind, tensor, name, op, prescale, postscale, home)
        shorten(process_set, group)


def shorten(process_set: ProcessSet, group: Group) -> None:
    """Have callers ask what knows the operations of ``group``."""
    are_real = type(device.gpus) is device.Gpus  # else memory of the host may be said to be a GPU's
    if group.shortcuts is None and are_real:
        coordinator, label = group.world.coordinator, Allreduce.label
        shortcut = coordinator.at_once.shortcut
        makers = [partial(made, group.recorder) for made in (StartedHandle, HandleInBurst)]
        kinds = (Allreduce, Broadcast, Allgather, Alltoall, Reducescatter, Barrier)
        group.shortcuts = Shortcuts(
            shortcut.submitting_function(
                label, makers[0], coordinator.collector.native, makers[1], torch.empty_like, NAMED, group.unnamed(label)
            ),
            *[shortcut.function(kind.label, torch.empty_like) for kind in kinds],
        )
    process_set.shortcuts = group.shortcuts


def signature_of(
    kind: str,
    tensor: torch.Tensor,
    name: str | None,
    op: object,
    prescale: object,
    postscale: object,
    home: weakref.ref[Any] | None = None,
) -> Signature:
    """What a caller passes for an operation of ``kind``, for native code to compare."""
    return Signature(kind, tensor, name, op, prescale, postscale, not tensor.numel(), home)


def preparing_group(process_set: ProcessSet) -> Group | None:
    """That of ``process_set``, if what repeats is prepared there now."""
    if not issubclass(type(process_set), ProcessSet):
        return None
    group = process_set.group_of_members()
    return group if group is not None and can_be_prepared(group) else None


def usual_address(tensor: torch.Tensor, name: str | None, op: object = None, *, on_device: bool = False) -> int | None:
    """That of ``tensor``; None where it has no memory of its own, or not that of the host, or anything is unusual.

    Args:
        on_device: the memory of a GPU is wanted, and not that of the host.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    if is_on_device(tensor) is not on_device or type(op) not in _OPS or (name is not None and type(name) is not str):
        return None
    if tensor.is_neg():  # the imaginary part of a conjugate, which reads as minus what is there
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # inside torch.vmap, for example
        return None
    return address if address or (tensor.is_cpu and not tensor.numel()) else None


def number(factor: float) -> float:
    """That of a tensor or an array is what it is now, and may be another one the next time."""
    return factor if type(factor) in _NUMBERS else float(factor)


def performed(
    group: Group,
    prepared: PreparedOperation,
    tensor: torch.Tensor,
    address: int,
    result: torch.Tensor,
    name: str | None,
    home: Home | None = None,
) -> torch.Tensor:
    """``result``, once ``prepared`` is done with ``tensor``, which may be the same."""
    inputs = [address if prepared.gives else 0]
    outputs = inputs if result is tensor and prepared.gives else [result.data_ptr()]
    # Its storages are owned as they are now: if a signal ends the wait, `tensor.set_()` may bring another.
    group.perform(prepared, Tensors(inputs, outputs, home, (tensor.untyped_storage(), result)), name)
    return result
