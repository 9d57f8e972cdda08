"""Matmuls of which each rank of a team does a part, with what must move before or after, and their gradients.

Shards of rows are along dimension 0; dimensions between the first and the last come along. Columns of a weight are
outputs. The gradients of each function are such matmuls again:

| function              | forward                     | backward                                              |
|-----------------------|-----------------------------|-------------------------------------------------------|
| all_gather_matmul     | gather x; x @ w + b         | reduce-scatter of grad @ w^T; gather x for x^T @ grad |
| matmul_reduce_scatter | reduce-scatter of x @ w + b | gather grad, once; grad @ w^T and x^T @ grad          |
| replicated_matmul     | x @ w + b                   | all-reduce of grad @ w^T; x^T @ grad                  |
| matmul_all_reduce     | all-reduce of x @ w + b     | grad @ w^T and x^T @ grad                             |
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvdlite.tensor_parallel.carrier import Carrier, Produce, Rows, Use
from hvdlite.tensor_parallel.methods import backward_of
from hvdlite.tensor_parallel.moves import FLOATING, objection
from hvdlite.tensor_parallel.team import Team
from hvdlite.torch.eager import eager

Gradients = tuple[torch.Tensor | None, ...]


@eager
def all_gather_matmul(
    x_shard: torch.Tensor, weight: torch.Tensor, team: Team, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The rows of all ranks, times this rank's columns of a weight; differentiable.

    On one node it is one matmul, which reads the shared memory into which every rank has copied its rows; on GPUs one
    for each rank's rows, as they come.

    Args:
        x_shard: (rows / size, ..., inputs), of the same shape and dtype on every rank.
        weight: (inputs, outputs of this rank), of the same shape on every rank.
        bias: (outputs of this rank,).

    Returns:
        (rows, ..., outputs of this rank).

    Raises:
        UsageError: the arguments of a rank do not fit together; on every rank, with the same text.
        MismatchError: ranks call different functions, or with other shapes or dtypes; on every rank.
        CollectiveError: a rank has failed, or did not come in time.
    """
    x, weight, bias = _operands(x_shard, weight, bias)
    carrier = _checked(team, "all_gather_matmul", x, weight, bias)
    product = _AllGatherMatmul.apply(_flat(x), weight, bias, carrier)  # type: ignore[no-untyped-call]
    return _shaped(product, x, x.shape[0] * carrier.size)


@eager
def matmul_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, team: Team, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of ``x @ weight``, and the bias once; differentiable.

    On one node the matmul writes into shared memory, from where every rank adds up its rows, 16-bit floats in fp32.

    Args:
        x: (rows, ..., inputs of this rank), of the same shape and dtype on every rank; size divides the rows.
        weight: (inputs of this rank, outputs), of the same shape on every rank.
        bias: (outputs,), equal on every rank, and so is its gradient.

    Returns:
        (rows / size, ..., outputs).

    Raises:
        UsageError, MismatchError, CollectiveError: as `all_gather_matmul`.
    """
    x, weight, bias = _operands(x, weight, bias)
    carrier = _checked(team, "matmul_reduce_scatter", x, weight, bias, scatters=True)
    product = _MatmulReduceScatter.apply(_flat(x), weight, bias, carrier)  # type: ignore[no-untyped-call]
    return _shaped(product, x, x.shape[0] // carrier.size)


@eager
def replicated_matmul(
    x: torch.Tensor, weight: torch.Tensor, team: Team, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x``, which every rank has, times this rank's columns of a weight; differentiable. Backward communicates only.

    Args:
        x: (rows, ..., inputs), equal on every rank, and so is its gradient.
        weight: (inputs, outputs of this rank).
        bias: (outputs of this rank,).

    Returns:
        (rows, ..., outputs of this rank).

    Raises:
        UsageError, MismatchError, CollectiveError: as `all_gather_matmul`, in backward; UsageError also in forward.
    """
    x, weight, bias = _operands(x, weight, bias)
    why = _misfit("replicated_matmul", x, weight, bias)
    if why:
        team.meeting.refuse(why)
    product = _ReplicatedMatmul.apply(_flat(x), weight, bias, team.carrier_for(x))  # type: ignore[no-untyped-call]
    return _shaped(product, x, x.shape[0])


@eager
def matmul_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, team: Team, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum over ranks of ``x @ weight``, and the bias once, on every rank; differentiable.

    Args:
        x: (rows, ..., inputs of this rank), of the same shape and dtype on every rank.
        weight: (inputs of this rank, outputs), of the same shape on every rank.
        bias: (outputs,), equal on every rank, and so is its gradient.

    Returns:
        (rows, ..., outputs), equal to the last bit on every rank.

    Raises:
        UsageError, MismatchError, CollectiveError: as `all_gather_matmul`.
    """
    x, weight, bias = _operands(x, weight, bias)
    carrier = _checked(team, "matmul_all_reduce", x, weight, bias)
    product = _MatmulAllReduce.apply(_flat(x), weight, bias, carrier)  # type: ignore[no-untyped-call]
    return _shaped(product, x, x.shape[0])


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, carrier: Carrier
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.carrier = carrier
        product = x.new_empty(carrier.size * x.shape[0], weight.shape[1])
        carrier.gather(_rows("all_gather_matmul", weight, x), x, _into(product, weight, bias))
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        carrier, name = ctx.carrier, backward_of("all_gather_matmul")
        for_x = for_weight = None
        # Each exchange beside the other's matmul.
        if ctx.needs_input_grad[1]:
            gathered = carrier.begin_gather(_rows(name, weight, x), x)
        if ctx.needs_input_grad[0]:
            whole = _rows(name, weight, grad, x.shape[1])
            scattered = carrier.begin_reduce_scatter(whole, _products(grad, weight.t()))
        if ctx.needs_input_grad[1]:
            for_weight = _weight_gradient(gathered(), grad, weight)
        if ctx.needs_input_grad[0]:
            for_x = scattered()
        return for_x, for_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, carrier: Carrier
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.carrier = carrier
        rows = _rows("matmul_reduce_scatter", weight, x, weight.shape[1])
        return carrier.reduce_scatter(rows, _products(x, weight, _once(bias, carrier)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        carrier = ctx.carrier
        rows = _rows(backward_of("matmul_reduce_scatter"), weight, grad)
        for_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        whole = carrier.gather(rows, grad, *([] if for_x is None else [_into(for_x, weight.t())]))
        for_weight = _weight_gradient(x, whole, weight) if ctx.needs_input_grad[1] else None
        return for_x, for_weight, whole.sum(0) if ctx.needs_input_grad[2] else None, None


class _ReplicatedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, carrier: Carrier
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.carrier = carrier
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        for_x = None
        if ctx.needs_input_grad[0]:
            rows = _rows(backward_of("replicated_matmul"), weight, x)
            for_x = ctx.carrier.all_reduce(rows, _products(grad, weight.t()))
        for_weight = _weight_gradient(x, grad, weight) if ctx.needs_input_grad[1] else None
        return for_x, for_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None


class _MatmulAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, carrier: Carrier
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        rows = _rows("matmul_all_reduce", weight, x, weight.shape[1])
        return carrier.all_reduce(rows, _products(x, weight, _once(bias, carrier)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        return (
            grad @ weight.t() if ctx.needs_input_grad[0] else None,
            _weight_gradient(x, grad, weight) if ctx.needs_input_grad[1] else None,
            grad.sum(0) if ctx.needs_input_grad[2] else None,
            None,
        )


def _rows(function: str, weight: torch.Tensor, matrix: torch.Tensor, columns: int | None = None) -> Rows:
    """As ``matrix``, or with other columns, of a matmul with ``weight``."""
    rows, own_columns = matrix.shape
    shape = rows, own_columns if columns is None else columns
    return _rows_of(function, weight.shape, shape, matrix.dtype, matrix.device)


@lru_cache(maxsize=1024)
def _rows_of(
    function: str, weight: torch.Size, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Rows:
    return Rows(function, f"with a weight {tuple(weight)}", shape, dtype, device)


def _once(bias: torch.Tensor | None, carrier: Carrier) -> torch.Tensor | None:
    """``bias``, where it is to be added to what all ranks add up."""
    return bias if carrier.rank == 0 else None


def _products(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Produce:
    """Rows of ``x @ weight + bias``, where they are wanted."""

    def produce(out: torch.Tensor, begin: int, onto: torch.Tensor | None = None) -> None:
        part = _from(x, begin, out.shape[0])
        if onto is None:
            _multiply(part, weight, bias, out)
        else:
            torch.addmm(onto, part, weight, out=out)
            if bias is not None:
                out.add_(bias)

    return produce


def _into(product: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Use:
    """Rows times ``weight``, to their places in ``product``."""

    def use(part: torch.Tensor, begin: int) -> None:
        _multiply(part, weight, bias, _from(product, begin, part.shape[0]))

    return use


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def _from(matrix: torch.Tensor, begin: int, rows: int) -> torch.Tensor:
    return matrix if rows == matrix.shape[0] else matrix[begin : begin + rows]


def _weight_gradient(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x^T @ grad, which lies in memory as ``weight`` does, so that autograd need not copy it."""
    return (grad.t() @ x).t() if weight.t().is_contiguous() else x.t() @ grad


def _operands(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """These in the dtype that `torch.autocast` wants of operands of a matmul; as they are where there is none."""
    wanted = _autocast_dtype(x.device.type) if isinstance(x, torch.Tensor) else None
    if wanted is None:
        return x, weight, bias
    return _cast(x, wanted), _cast(weight, wanted), bias if bias is None else _cast(bias, wanted)


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(tensor: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
    is_cast = isinstance(tensor, torch.Tensor) and tensor.dtype in FLOATING and tensor.dtype != torch.float64
    return tensor.to(wanted) if is_cast else tensor


def _flat(x: torch.Tensor) -> torch.Tensor:
    """A row for all but the last dimension."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _shaped(product: torch.Tensor, x: torch.Tensor, rows: int) -> torch.Tensor:
    """``product`` with the dimensions of ``x`` between the first and the last."""
    return product if x.dim() == 2 else product.view(rows, *x.shape[1:-1], product.shape[1])


def _checked(
    team: Team,
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scatters: bool = False,
) -> Carrier:
    """The carrier of an exchange in which all ranks take part; where this rank cannot, all ranks hear why."""
    why = _misfit(name, x, weight, bias)
    if not why and scatters and x.shape[0] % team.size:
        why = f"{name}: the {x.shape[0]} rows of x {tuple(x.shape)} do not divide among {team.size} ranks"
    if why:
        team.meeting.refuse(why)
    return team.carrier_for(x)


def _misfit(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why these cannot be multiplied; None if they can."""
    why = objection(name, x, weight, *([] if bias is None else [bias]))
    if why:
        return why
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[0]:
        return f"{name}: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit; pass (rows, ..., n) and (n, m)"
    if bias is not None and tuple(bias.shape) != (weight.shape[1],):
        return f"{name}: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}; pass ({weight.shape[1]},)"
    return None
