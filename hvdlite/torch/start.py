"""Each operation started on tensors, without autograd: the one implementation beneath all public forms of it.

Of all functions: ``background`` is False where the caller waits for the operation at once, and so does it himself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.memory.large_pages import LEAST_BYTES, prefer_large_pages
from hvdlite.memory.views import TensorView
from hvdlite.operations.allgather import allgather_async
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.alltoall import alltoall_async
from hvdlite.operations.broadcast import broadcast_async
from hvdlite.operations.prepared_allreduce import allreduce_now
from hvdlite.operations.reducescatter import reducescatter_async, row_bounds
from hvdlite.torch.device import Now, is_on_device, new_empty, streaming_like
from hvdlite.torch.eager import eager
from hvdlite.torch.handle import Handle, label_of
from hvdlite.torch.process_set import ProcessSet, check_process_set
from hvdlite.torch.reduce_options import ReduceOptions
from hvdlite.torch.tensor_view import block_to_write, contiguous_block, copied_back, view_of, views_of


@eager
def start_allreduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    options: ReduceOptions,
    *,
    in_place: bool,
    grouped: bool,
    background: bool = True,
) -> Handle[list[torch.Tensor]]:
    """Reduce each of ``tensors``, by any op but Adasum."""
    label = label_of("allreduce", name)
    block = block_to_write if in_place else contiguous_block
    sources = [block(tensor, label) for tensor in tensors]
    if in_place and grouped:
        sources = _apart(sources)
    results = sources if in_place else [new_result(source, tuple(source.shape)) for source in sources]
    now = Now()
    inputs = views_of(sources, now)
    group = options.process_set.group()
    start = allreduce_async if background else allreduce_now
    pending = start(
        group,
        inputs,
        inputs if in_place else views_of(results, now),
        options.reduction,
        name=name,
        names=_member_names(name, len(tensors)) if grouped else None,
        wire_dtype=options.wire_dtype,
    )
    kept = list(tensors)
    return Handle(pending, group.recorder, label, lambda: copied_back(kept, results) if in_place else results)


@eager
def start_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    grouped: bool,
    needs_all: bool = True,
    background: bool = True,
) -> Handle[list[torch.Tensor]]:
    """Gather the rows of each of ``tensors``; a scalar is one row.

    Args:
        needs_all: it is an error where a rank has joined; otherwise that rank has no rows.
    """
    label = label_of("allgather", name)
    blocks = [contiguous_block(tensor, label) for tensor in tensors]
    sources = [block if block.dim() else block.reshape(1) for block in blocks]
    results: dict[int, torch.Tensor] = {}

    streaming = [streaming_like(source) for source in sources]

    def allocate(index: int, shape: tuple[int, ...]) -> TensorView:
        with streaming[index]():
            results[index] = new_result(sources[index], shape)
            return view_of(results[index])

    group = check_process_set(process_set).group()
    pending = allgather_async(
        group,
        views_of(sources),
        allocate,
        name=name,
        names=_member_names(name, len(tensors)) if grouped else None,
        needs_all=needs_all,
        background=background,
    )
    return Handle(pending, group.recorder, label, lambda: [results[i] for i in range(len(sources))])


@eager
def start_broadcast(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None,
    names: Sequence[str] | None,
    process_set: ProcessSet,
    *,
    needs_all: bool = True,
    background: bool = True,
) -> Handle[list[torch.Tensor]]:
    """Overwrite ``tensors`` with those of rank ``root_rank``, in one operation.

    Args:
        names: of the tensors.
        needs_all: it is an error where a rank has joined; otherwise only the root must not have.
    """
    label = label_of("broadcast", name)
    labels = [label] * len(tensors) if names is None else [f"{label} of {own!r}" for own in names]
    results = [block_to_write(tensor, own) for tensor, own in zip(tensors, labels, strict=True)]
    group = check_process_set(process_set).group()
    pending = broadcast_async(
        group,
        views_of(results),
        root_rank=root_rank,
        name=name,
        names=names,
        needs_all=needs_all,
        background=background,
    )
    kept = list(tensors)
    return Handle(pending, group.recorder, label, lambda: copied_back(kept, results))


@eager
def start_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    options: ReduceOptions,
    *,
    grouped: bool,
    background: bool = True,
) -> Handle[list[torch.Tensor]]:
    """Reduce each of ``tensors``, and keep this rank's rows."""
    label = label_of("reducescatter", name)
    sources = [contiguous_block(tensor, label) for tensor in tensors]
    if any(source.dim() == 0 for source in sources):
        raise ValueError(f"{label}: the tensor is a scalar; it needs a dimension to scatter")
    group = options.process_set.group()
    results = []
    for source in sources:
        bounds = row_bounds(source.shape[0], group.size)
        rows = bounds[group.rank + 1] - bounds[group.rank]
        results.append(new_result(source, (rows, *source.shape[1:])))
    now = Now()
    pending = reducescatter_async(
        group,
        views_of(sources, now),
        views_of(results, now),
        options.reduction,
        name=name,
        names=_member_names(name, len(tensors)) if grouped else None,
        wire_dtype=options.wire_dtype,
        background=background,
    )
    return Handle(pending, group.recorder, label, lambda: results)


@eager
def start_alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    background: bool = True,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """Send rows of ``tensor`` to each rank; the result has the rows received, and how many came from each rank."""
    label = label_of("alltoall", name)
    source = contiguous_block(tensor, label)
    group = check_process_set(process_set).group()
    counts = _checked_splits(source, splits, group.size, label)
    results: list[torch.Tensor] = []

    streaming = streaming_like(source)

    def allocate(_: int, shape: tuple[int, ...]) -> TensorView:
        with streaming():
            results.append(new_result(source, shape))
            return view_of(results[0])

    pending = alltoall_async(group, view_of(source), counts, allocate, name=name, background=background)
    return Handle(pending, group.recorder, label, lambda: (results[0], _as_tensor(pending.wait(), splits)))


def _as_tensor(counts: Sequence[int], splits: object) -> torch.Tensor:
    """Of int32, as Horovod's, where they fit; in the memory that has ``splits``."""
    fits = max(counts) <= torch.iinfo(torch.int32).max
    where = splits.device if isinstance(splits, torch.Tensor) else "cpu"
    return torch.tensor(counts, dtype=torch.int32 if fits else torch.int64, device=where)


def _apart(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, with copies of those that overlap others: what is large is reduced while the first is written."""
    result = list(tensors)
    end = 0
    for address, i in sorted((tensor.data_ptr(), i) for i, tensor in enumerate(tensors)):
        if address < end:
            result[i] = tensors[i].clone()
        end = max(end, address + tensors[i].nbytes)
    return result


def new_result(source: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor beside ``source``, of its element type, that will be written."""
    result = new_empty(source, shape)
    if result.nbytes >= LEAST_BYTES and not is_on_device(result):
        prefer_large_pages(result.data_ptr(), result.nbytes)
    return result


def _checked_splits(source: torch.Tensor, splits: torch.Tensor | None, size: int, label: str) -> list[int]:
    if source.dim() == 0:
        raise ValueError(f"{label}: the tensor is a scalar; it needs a dimension to split")
    rows = source.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"{label}: {rows} rows do not divide into {size} equal parts; pass splits")
        return [rows // size] * size
    counts = torch.as_tensor(splits, device="cpu")
    if counts.dim() != 1 or counts.dtype.is_floating_point or counts.dtype in (torch.bool, torch.complex64):
        raise ValueError(f"{label}: splits must be a tensor of one dimension of integers, got {splits!r}")
    listed: list[int] = counts.tolist()
    if len(listed) != size:
        raise ValueError(f"{label}: splits has {len(listed)} numbers for {size} ranks; pass one per rank")
    if min(listed) < 0 or sum(listed) > rows:
        raise ValueError(f"{label}: splits are {listed}, but the tensor has {rows} rows; pass parts of these")
    return listed


def _member_names(name: str | None, count: int) -> list[str] | None:
    """Names of the tensors of a group, where the group has one: ``name.0`` even of the only member."""
    return None if name is None else [f"{name}.{i}" for i in range(count)]
