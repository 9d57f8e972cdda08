"""hvd.sparse_allreduce_async: a sparse tensor is reduced by gathering the rows that each rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdlite.dtypes import ReduceOp
from hvdlite.errors import MismatchError, UsageError
from hvdlite.rank_list import rank_list
from hvdlite.torch.eager import eager
from hvdlite.torch.handle import label_of, only
from hvdlite.torch.process_set import ProcessSet, global_process_set
from hvdlite.torch.reduce_options import Average, ReduceOptions, Sum, check_op, reduce_options
from hvdlite.torch.start import start_allgather
from hvdlite.torch.tensor_view import check_tensor, torch_dtype

_HEADER = 4  # integers before the shape: nnz, op, sparse_dim, number of dimensions


@eager
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to combine a sparse ``tensor`` with those of the other ranks.

    Every rank receives the entries of all ranks, so the cost grows with their number: it is below that of a dense
    allreduce as long as the entries of all ranks together are fewer than twice the elements of the dense tensor.

    Args:
        tensor: COO, of the same shape, sparse_dim and dtype on every rank; with any number of entries, also none.
        name: the same on every rank; None counts unnamed operations.
        op: `Average` or `Sum`; 16-bit floats are added in fp32.
        process_set: who takes part.

    Returns:
        A function that sleeps until the operation is complete and returns a new coalesced tensor, the same one every
        time; it raises HorovodInternalError, on every rank, where ranks contradict one another.

    Raises:
        UsageError: ``op`` is another.
        DuplicateNameError, ValueError: ``name`` is in flight; hvdlite cannot reduce this tensor like that.
    """
    return SparseReduction(tensor, name, reduce_options(None, check_op(op), 1.0, 1.0, process_set)).wait


class SparseReduction:
    """A sparse allreduce under way; see `sparse_allreduce_async`."""

    def __init__(self, tensor: torch.Tensor, name: str | None, options: ReduceOptions) -> None:
        self._label = label_of("sparse allreduce", name)
        op, prescale, self._postscale = options.reduction
        self._check(tensor, op)
        self._ranks = options.process_set.group().ranks
        self._divisor = len(self._ranks) if op is Average else 1
        self._dtype = tensor.dtype
        own = tensor.detach().coalesce()
        self._shape = tuple(own.shape)
        self._sparse_dim = own.sparse_dim()
        values = own.values()
        if prescale != 1.0:
            values = values * prescale
        if options.wire_dtype is not None and values.is_floating_point():
            values = values.to(torch_dtype(options.wire_dtype))
        check_tensor(values, self._label)
        # One row of integers per rank says all, so that nobody has to know how many entries the others have.
        facts = [values.shape[0], int(op), self._sparse_dim, len(self._shape), *self._shape]
        row = torch.cat([torch.tensor(facts, device="cpu"), own.indices().t().flatten().cpu()])
        self._row, self._values = (
            only(
                start_allgather(
                    [part],
                    None if name is None else f"{name}.{what}",
                    options.process_set,
                    grouped=False,
                    needs_all=False,
                )
            )
            for what, part in (("indices", row), ("values", values))
        )
        self._result: torch.Tensor | None = None

    @eager
    def wait(self) -> torch.Tensor:
        """Sleep until it is complete; its result. Raises what it ended in, when nothing of it is in flight any more."""
        if self._result is None:
            try:
                rows = self._row.synchronize()
            finally:
                values = self._values.synchronize()
            self._result = self._combined(self._indices(rows).to(values.device), values)
        return self._result

    def _check(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        if op not in (Average, Sum):
            raise UsageError(
                f"{self._label}: op is {op.label}; pass hvd.Average or hvd.Sum, or tensor.to_dense() to allreduce"
            )
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{self._label}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.sparse_coo:
            raise ValueError(f"{self._label}: the layout is {tensor.layout}; pass tensor.to_sparse()")
        if tensor.dtype is torch.bool:
            raise ValueError(f"{self._label}: bool does not reduce; convert the tensor to uint8")

    def _indices(self, rows: torch.Tensor) -> torch.Tensor:
        """(sparse_dim, entries of all ranks) from the rows of all ranks.

        Raises:
            MismatchError: op or shape differ.
        """
        parts, said = [], []
        while rows.numel():
            nnz, op, sparse_dim, dims = rows[:_HEADER].tolist()
            start = _HEADER + dims
            end = start + nnz * sparse_dim
            said.append((ReduceOp(op).label, tuple(rows[_HEADER:start].tolist())))
            parts.append(rows[start:end])
            rows = rows[end:]
        for what, values in zip(("op", "shape"), zip(*said, strict=True), strict=True):
            others = [rank for rank, value in enumerate(values) if value != values[0]]
            if others:
                other = values[others[0]]
                raise MismatchError(
                    f"{self._label}: {what} is {values[0]} on {self._who(values, values[0])} but {other} on "
                    f"{self._who(values, other)}. Pass the same {what} on every rank."
                )
        return torch.cat(parts).view(-1, self._sparse_dim).t()

    def _who(self, values: Sequence[object], wanted: object) -> str:
        return rank_list([rank for rank, value in zip(self._ranks, values, strict=True) if value == wanted])

    def _combined(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        wide = torch.float32 if self._dtype.itemsize == 2 and self._dtype.is_floating_point else self._dtype
        total = _coo(indices, values.to(wide), self._shape).coalesce()
        entries = total.values()
        if self._divisor > 1:
            entries = entries.div(self._divisor, rounding_mode=None if wide.is_floating_point else "trunc")
        if self._postscale != 1.0:
            entries = entries * self._postscale
        return _coo(total.indices(), entries.to(self._dtype), self._shape, is_coalesced=True)


def no_entries(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sparse zeros of the shape of ``like``, with one sparse dimension."""
    indices = like.new_empty(1, 0, dtype=torch.int64)
    return _coo(indices, like.new_empty(0, *like.shape[1:], dtype=dtype), tuple(like.shape), is_coalesced=True)


def _coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool | None = None
) -> torch.Tensor:
    # Indices come from tensors, so they are valid; torch warns where nobody says whether it shall check them.
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, check_invariants=False, is_coalesced=is_coalesced
    )
