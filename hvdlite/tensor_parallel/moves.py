"""Plain moves of whole tensors over a carrier, and what tensors can be moved."""

from __future__ import annotations

import torch

from hvdlite.tensor_parallel.carrier import Carrier, Rows

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def objection(name: str, *tensors: object) -> str | None:
    """Why ``tensors`` cannot take part together in what ``name`` says; None if they can."""
    dtypes = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            return f"{name}: expected a torch.Tensor, got {type(tensor).__name__}"
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return f"{name}: a {tensor.layout} tensor on {tensor.device}; pass dense tensors on the CPU"
        if tensor.dtype not in FLOATING:
            return f"{name}: dtype {tensor.dtype}; pass floats of 16, 32 or 64 bits"
        dtypes.append(tensor.dtype)
    if len(set(dtypes)) > 1:
        return f"{name}: dtypes {', '.join(map(str, dtypes))} are mixed; convert all to the same"
    return None


def gather_shares(carrier: Carrier, purpose: str, share: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's ``share``, of one shape; to be read until this rank's next exchange."""
    matrix = share.reshape(1, -1)
    whole = carrier.gather(Rows.of(f"{purpose} of {tuple(share.shape)}", matrix), matrix)
    return list(whole.view(carrier.size, *share.shape).unbind(0))


def sum_over_ranks(carrier: Carrier, purpose: str, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's ``tensor``, of one shape, new."""
    matrix = tensor.reshape(1, -1)
    rows = Rows.of(f"{purpose} of {tuple(tensor.shape)}", matrix)
    return carrier.all_reduce(rows, lambda out: out.copy_(matrix)).view(tensor.shape)


def scatter_sum(carrier: Carrier, purpose: str, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum of every rank's ``tensor``, (rows, ...), new; size divides the rows."""
    matrix = tensor.reshape(tensor.shape[0], -1)
    rows = Rows.of(f"{purpose} of {tuple(tensor.shape)}", matrix)
    scattered = carrier.reduce_scatter(rows, lambda out: out.copy_(matrix))
    return scattered.view(tensor.shape[0] // carrier.size, *tensor.shape[1:])
