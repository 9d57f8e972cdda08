"""Likewise, as repeated.py has it of allreduces, operations that move rows between ranks; and barriers.

Each returns None where nothing was done, and the operation must be started as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdlite.memory.views import TensorView
from hvdlite.operations.allgather import Allgather
from hvdlite.operations.alltoall import Alltoall
from hvdlite.operations.barrier import PreparedBarrier
from hvdlite.operations.prepared import has_come_before, prepared_once
from hvdlite.operations.prepared_telling import PreparedTelling
from hvdlite.operations.reducescatter import PreparedReducescatter, Reducescatter
from hvdlite.operations.telling import Telling
from hvdlite.torch.compression import AnyCompressor, Compression, is_custom
from hvdlite.torch.handle import label_of
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.reduce_options import ReduceOptions
from hvdlite.torch.shortcuts import number, performed, preparing_group, show, usual_address
from hvdlite.torch.start import new_result
from hvdlite.torch.tensor_view import contiguous_block, view_of

_NO_TENSOR = torch.empty(0, device="cpu")


def gathered_at_once(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor | None:
    """An allgather."""
    shortcuts = getattr(process_set, "shortcuts", None)
    if shortcuts is not None:
        done: torch.Tensor | None = shortcuts.allgather(tensor, name, None, None, None, False)
        if done is not None:
            return done

    def request(view: TensorView) -> Telling:
        return Allgather.of(name, [view], True)

    return _told_at_once(Allgather, tensor, name, process_set, request, lambda _: [len(_rows_of(tensor))])


def exchanged_at_once(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor | None:
    """An alltoall of equal parts."""
    shortcuts = getattr(process_set, "shortcuts", None)
    if shortcuts is not None:
        done: torch.Tensor | None = shortcuts.alltoall(tensor, name, None, None, None, False)
        if done is not None:
            return done

    def request(view: TensorView) -> Telling:
        return Alltoall.of(name, [view])

    def parts(size: int) -> Sequence[int] | None:
        if not tensor.dim() or len(tensor) % size:
            return None
        return [len(tensor) // size] * size

    return _told_at_once(Alltoall, tensor, name, process_set, request, parts)


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar is one."""
    return tensor if tensor.dim() else tensor.reshape(1)


def _told_at_once(
    kind: type[Telling],
    tensor: torch.Tensor,
    name: str | None,
    process_set: ProcessSet,
    request: Callable[[TensorView], Telling],
    numbers: Callable[[int], Sequence[int] | None],
) -> torch.Tensor | None:
    """An operation of ``kind``.

    Args:
        numbers: of rows, which this rank of so many gives; None: it is a mistake.
    """
    group, address = preparing_group(process_set), usual_address(tensor, name)
    if group is None or address is None:
        return None

    def prepare() -> PreparedTelling | None:
        source = _rows_of(contiguous_block(tensor, label_of(kind.label, name)))
        given = numbers(group.size)
        if given is None:
            return None
        rest = source.shape[1:]
        prepared = PreparedTelling.of(group, request(view_of(source)), given, _resized)
        if prepared is not None:
            prepared.new_result = lambda tensor, rows: new_result(tensor, (rows, *rest))
        return prepared

    key = kind, name, tensor.dtype, tensor.shape
    if not has_come_before(group, key):
        return None
    prepared = prepared_once(group, key, prepare)
    if prepared is None:
        return None
    assert prepared.new_result is not None and prepared.direct is not None
    show(process_set, group, prepared, tensor, name)
    result = prepared.new_result(tensor, prepared.direct.result_rows)
    return performed(group, prepared, tensor, address, result, name)


def _resized(result: torch.Tensor, shape: tuple[int, ...]) -> TensorView:
    """In memory of its size, since `torch.save`, for example, writes all that a tensor has."""
    if result.shape != shape:
        with torch.inference_mode(result.is_inference()):  # as that of the thread which has made it
            result.set_(new_result(result, shape))  # type: ignore[call-overload]
    return view_of(result)


def scattered_at_once(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    options: ReduceOptions,
    compression: AnyCompressor,
) -> torch.Tensor | None:
    """A reducescatter, for which the shortcut was asked already; ``options`` say the same."""
    process_set = options.process_set
    group, address = preparing_group(process_set), usual_address(tensor, name, op)
    if group is None or address is None or is_custom(compression) or not tensor.dim():
        return None
    reduction, wire_dtype = options.reduction, options.wire_dtype

    def prepare() -> PreparedReducescatter | None:
        view = view_of(contiguous_block(tensor, label_of("reducescatter", name)))
        prepared = PreparedReducescatter.of(group, Reducescatter.of(name, [view], reduction, wire_dtype))
        if prepared is not None:
            shape = prepared.rows, *tensor.shape[1:]
            prepared.new_result = lambda tensor, _: new_result(tensor, shape)
        return prepared

    prepared = prepared_once(group, (Reducescatter, name, reduction, wire_dtype, tensor.dtype, tensor.shape), prepare)
    if prepared is None:
        return None
    if compression is Compression.none:
        show(process_set, group, prepared, tensor, name, op, number(prescale), number(postscale))
    assert prepared.new_result is not None
    return performed(group, prepared, tensor, address, prepared.new_result(tensor, 0), name)


def met_at_once(process_set: ProcessSet) -> bool | None:
    """A barrier, which has the shortcut of an operation on a tensor of nothing."""
    shortcuts = getattr(process_set, "shortcuts", None)
    if shortcuts is not None and shortcuts.barrier(_NO_TENSOR, None, None, None, None, True) is not None:
        return True
    group = preparing_group(process_set)
    if group is None:
        return None
    prepared = prepared_once(group, PreparedBarrier, lambda: PreparedBarrier.of(group))
    if prepared is None:
        return None
    show(process_set, group, prepared, _NO_TENSOR, None)
    performed(group, prepared, _NO_TENSOR, 0, _NO_TENSOR, None)
    return True
