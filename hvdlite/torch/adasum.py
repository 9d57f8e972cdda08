"""Adasum: combines the tensors of ranks pairwise, so that what two have in common counts once and the rest adds up.

Of two tensors ``a`` and ``b`` it makes ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``: their sum where they are
orthogonal, their mean where they are equal (Maleki et al. 2021, "Scaling Distributed Training with Adaptive
Summation"). Ranks 0 and 1, 2 and 3, ... are combined first, then the pairs, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.errors import HorovodInternalError
from hvdlite.torch.handle import Handle, label_of
from hvdlite.torch.process_set import ProcessSet, global_process_set
from hvdlite.torch.reduce_options import ReduceOptions
from hvdlite.torch.start import start_allgather
from hvdlite.torch.tensor_view import check_tensor, torch_dtype


def check_adasum(process_set: ProcessSet) -> None:
    """Raises:
    NotImplementedError: ``process_set`` is not the global one, or its number of ranks is no power of two.
    """
    if process_set.process_set_id != global_process_set.process_set_id:
        raise NotImplementedError("Adasum works on the global process set only; pass hvd.Average or hvd.Sum as op")
    size = process_set.group().size
    if size & (size - 1):
        raise NotImplementedError(
            f"Adasum needs a power of two of ranks, and there are {size}; run 2, 4, 8, ... ranks, or pass hvd.Average "
            "as op"
        )


def adasum_async(
    tensors: Sequence[torch.Tensor], name: str | None, options: ReduceOptions, *, in_place: bool, grouped: bool
) -> Handle[list[torch.Tensor]]:
    """Start to combine each of ``tensors`` with those of the other ranks.

    Every rank gathers the tensors of all and combines them itself, which `synchronize` does: size() * nbytes are
    received per rank, against 2 * nbytes of an allreduce. Everything between the inputs and the result is in fp64.
    Ranks get the same bits where they run on processors of one kind with as many threads.

    Args:
        tensors: floats, of the same shape and dtype on every rank.
        in_place: overwrite ``tensors``.

    Raises:
        NotImplementedError: see `check_adasum`.
        ValueError: a tensor is not of floats, or hvdlite cannot communicate it.
    """
    process_set, (_, prescale, postscale) = options.process_set, options.reduction
    check_adasum(process_set)
    label = label_of("allreduce", name)
    for tensor in tensors:
        if not check_tensor(tensor, label).is_floating_point():
            raise ValueError(f"{label}: Adasum combines floats, and the tensor is {tensor.dtype}; pass tensor.float()")
    gathers = []
    for i, tensor in enumerate(tensors):
        source = tensor.detach()
        if prescale != 1.0:
            source = source * prescale
        if options.wire_dtype is not None:
            source = source.to(torch_dtype(options.wire_dtype))
        own_name = f"{name}.{i}" if grouped and name is not None else name
        # A dimension in front, so that the gathering itself finds shapes that differ.
        gathers.append(start_allgather([source.unsqueeze(0)], own_name, process_set, grouped=False))
    kept = list(tensors)

    def finish() -> list[torch.Tensor]:
        results = []
        for gather, tensor in zip(gathers, kept, strict=True):
            combined = _combined(gather.synchronize()[0]).mul_(postscale).to(tensor.dtype)
            results.append(tensor.detach().copy_(combined) if in_place else combined)
        return kept if in_place else results

    return Handle(_Gathers(gathers), process_set.group().recorder, label, finish)


def _combined(tensors: torch.Tensor) -> torch.Tensor:
    """(...) in fp64 of (ranks, ...); of the first half of the ranks, and of the second, and of both."""
    half = len(tensors) // 2
    if half == 0:
        return tensors[0].double()
    return _pair(_combined(tensors[:half]), _combined(tensors[half:]))


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The formula; overwrites ``a`` and ``b``, which are in fp64."""
    dot = torch.dot(a.flatten(), b.flatten()).item()
    return a.mul_(_factor(dot, a)).add_(b.mul_(_factor(dot, b)))


def _factor(dot: float, tensor: torch.Tensor) -> float:
    flat = tensor.flatten()
    square = torch.dot(flat, flat).item()
    return 1.0 - dot / (2.0 * square) if square else 1.0


class _Gathers:
    """Several operations as one."""

    def __init__(self, handles: Sequence[Handle[list[torch.Tensor]]]) -> None:
        self._handles = handles

    def poll(self) -> bool:
        return all(handle.poll() for handle in self._handles)

    def wait(self) -> None:
        failure: HorovodInternalError | None = None
        for handle in self._handles:
            try:
                handle.synchronize()
            except HorovodInternalError as error:  # raised only when nothing is in flight any more
                failure = failure or error
        if failure is not None:
            raise failure
