"""Plain moves of whole tensors over a carrier, and what tensors can be moved."""

from __future__ import annotations

import torch

from hvdlite.tensor_parallel.carrier import Carrier, Produce, Rows

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def objection(name: str, *tensors: object) -> str | None:
    """Why ``tensors`` cannot take part together in what ``name`` says; None if they can."""
    dtypes, devices = [], []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            return f"{name}: expected a torch.Tensor, got {type(tensor).__name__}"
        if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout is not torch.strided:
            return f"{name}: a {tensor.layout} tensor on {tensor.device}; pass dense tensors on the CPU or a GPU"
        if tensor.dtype not in FLOATING:
            return f"{name}: dtype {tensor.dtype}; pass floats of 16, 32 or 64 bits"
        dtypes.append(tensor.dtype)
        devices.append(tensor.device)
    if len(set(devices)) > 1:
        return f"{name}: tensors on {', '.join(map(str, devices))} are mixed; bring all to the same"
    if len(set(dtypes)) > 1:
        return f"{name}: dtypes {', '.join(map(str, dtypes))} are mixed; convert all to the same"
    return None


def gather_shares(carrier: Carrier, purpose: str, share: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's ``share``, of one shape; to be read until this rank's next exchange."""
    matrix = share.reshape(1, -1)
    whole = carrier.gather(_rows(purpose, share, matrix), matrix)
    return list(whole.view(carrier.size, *share.shape).unbind(0))


def sum_over_ranks(carrier: Carrier, purpose: str, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's ``tensor``, of one shape, new."""
    matrix = tensor.reshape(1, -1)
    return carrier.all_reduce(_rows(purpose, tensor, matrix), _copies(matrix)).view(tensor.shape)


def scatter_sum(carrier: Carrier, purpose: str, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum of every rank's ``tensor``, (rows, ...), new; size divides the rows."""
    matrix = tensor.unsqueeze(-1).flatten(1)  # also of no rows, which reshape would have to guess
    scattered = carrier.reduce_scatter(_rows(purpose, tensor, matrix), _copies(matrix))
    return scattered.view(tensor.shape[0] // carrier.size, *tensor.shape[1:])


def _rows(purpose: str, tensor: torch.Tensor, matrix: torch.Tensor) -> Rows:
    return Rows.of(purpose, f"of {tuple(tensor.shape)}", matrix)


def _copies(matrix: torch.Tensor) -> Produce:
    def produce(out: torch.Tensor, begin: int, onto: torch.Tensor | None = None) -> None:
        part = matrix[begin : begin + len(out)]
        if onto is None:
            out.copy_(part)
        else:
            torch.add(onto, part, out=out)

    return produce
