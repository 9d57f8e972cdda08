"""Every collective of torch.distributed on a `Carrier`: what ranks agree on, and which memory it touches.

Each method looks at the tensors, and returns what does the work; that runs later, perhaps on another thread. Ranks
and roots are places in the group. Memory that is not contiguous passes through a copy, and so does an input that the
output would overwrite; in place, where the result of an input lies just there, it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce as fold
from typing import Any

import torch
from torch.distributed import ReduceOp

from hvdlite.distributed.blocks import (
    block_of,
    blocks_of,
    is_in_the_way,
    layout_of,
    numel_of,
    overlap,
    part_of,
    put_back,
    shares_of,
)
from hvdlite.distributed.call import call_on, call_on_several, call_on_sparse, call_without_shape
from hvdlite.distributed.carrier import NOTHING, Carrier
from hvdlite.distributed.reductions import Way, way_of
from hvdlite.engine import Engine

Run = Callable[[], None]
Tensors = Sequence[torch.Tensor]


class Collectives:
    """Those of the ranks of ``carrier``, of which this one is number ``rank`` of ``size``."""

    def __init__(self, carrier: Carrier, engine: Engine, rank: int, size: int) -> None:
        self._carrier = carrier
        self._engine = engine
        self._rank = rank
        self._size = size

    def barrier(self, name: str = "barrier") -> Run:
        call = call_without_shape(name)
        return lambda: self._carrier.meet(call)

    # Reductions.

    def all_reduce(self, tensors: Tensors, op: Any, root: int | None = None) -> Run:
        """Of several tensors of one type at once.

        Args:
            root: who gets the result; None: all do.
        """
        if root is not None:
            self._expect_rank(root)
        _expect(len(tensors) > 0, "there are no tensors to reduce; make no call then, on any rank")
        first = tensors[0]
        if first.is_sparse and self._carrier.takes_sparse:
            return in_turn([self._all_reduce_sparse(tensor, op) for tensor in tensors])
        way = way_of(op, first.dtype, self._engine)
        name = "all_reduce" if root is None else "reduce"
        if len(tensors) == 1:
            call = call_on(name, first.shape, first.dtype, way.name, root)
        else:
            call = call_on_several(name, tuple(tensor.shape for tensor in tensors), _only_dtype(tensors), way.name)
        blocks = blocks_of(tensors)
        if way.dtype is None:
            return lambda: put_back(tensors, [self._gathered_and_reduced(block, way, root) for block in blocks])
        layout = layout_of(tuple(map(numel_of, blocks)), way.dtype)
        inputs = [block.data_ptr() for block in blocks]
        outputs = inputs if root is None or root == self._rank else [0] * len(inputs)

        def run() -> None:
            self._carrier.allreduce(call, inputs, outputs, layout, way.reduction)
            put_back(tensors, blocks)

        return run

    def reduce_scatter(self, output: torch.Tensor, inputs: Tensors, op: Any) -> Run:
        """inputs[r] is for rank r; they may differ in size, as those of other ranks do."""
        _expect(len(inputs) == self._size, f"{len(inputs)} inputs for {self._size} ranks")
        _expect(_only_dtype(inputs) == output.dtype, "input and output are of different types")
        if any(tensor.shape != inputs[0].shape for tensor in inputs):
            return self._reduce_scatter_uneven(output, inputs, op)
        _expect(inputs[self._rank].numel() == output.numel(), "the output is not as large as each of the inputs")
        blocks = blocks_of(inputs)
        if is_in_the_way(part_of(output), [part_of(block) for block in blocks], self._rank):
            blocks = [block.clone() for block in blocks]
        return self._reduce_scatter("reduce_scatter", output, blocks, [b.data_ptr() for b in blocks], op)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, op: Any) -> Run:
        """Shares of ``whole`` are for the ranks, in order."""
        _expect(whole.dtype == output.dtype, "input and output are of different types")
        _expect(whole.numel() == self._size * output.numel(), "the input is not `world size` times the output")
        block = block_of(whole)
        nbytes = output.numel() * output.element_size()
        shares = shares_of(block, [nbytes] * self._size)
        if overlap(part_of(output), part_of(block)) and is_in_the_way(part_of(output), shares, self._rank):
            block = block.clone()
            shares = shares_of(block, [nbytes] * self._size)
        return self._reduce_scatter("reduce_scatter_tensor", output, [block], [share[0] for share in shares], op)

    def _reduce_scatter(self, name: str, output: torch.Tensor, keep: Tensors, places: list[int], op: Any) -> Run:
        way = way_of(op, output.dtype, self._engine)
        call = call_on(name, output.shape, output.dtype, way.name)
        result = block_of(output)
        nbytes = part_of(result)[1]

        def run() -> None:
            if way.dtype is None:
                table = output.new_empty((self._size, *output.shape))
                departures = [(place, nbytes) for place in places]
                self._carrier.alltoall(call, departures, shares_of(table, [nbytes] * self._size))
                result.copy_(_combined(table, way))
            else:
                layout = layout_of((numel_of(result),), way.dtype)
                self._carrier.reduce_scatter(call, places, result.data_ptr(), layout, way.reduction)
            put_back([output], [result])

        return partial(_holding, keep, run)

    def _reduce_scatter_uneven(self, output: torch.Tensor, inputs: Tensors, op: Any) -> Run:
        _expect(inputs[self._rank].numel() == output.numel(), "the output is not as large as the input of this rank")
        results = [tensor.clone() for tensor in inputs]
        runs = [self.all_reduce([tensor], op, root) for root, tensor in enumerate(results)]

        def run() -> None:
            for each in runs:
                each()
            output.detach().copy_(results[self._rank].view_as(output))

        return run

    def _gathered_and_reduced(self, block: torch.Tensor, way: Way, root: int | None) -> torch.Tensor:
        """Where no kernel reduces: all ranks get all contributions, and the wanted ones combine them."""
        table = block.new_empty((self._size, *block.shape))
        nbytes = [part_of(block)[1]] * self._size
        call = call_on("all_reduce" if root is None else "reduce", block.shape, block.dtype, way.name, root)
        self._carrier.spread(call, part_of(block), shares_of(table, nbytes), nbytes)
        return block if root is not None and root != self._rank else _combined(table, way)

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: Any) -> Run:
        _expect(tensor.is_sparse, "tensors of one call are sparse, or are not")
        _expect(bool(op == ReduceOp.SUM), "sparse tensors can only be added up, by ReduceOp.SUM")
        call = call_on_sparse("all_reduce of a sparse tensor", tensor.shape, tensor.dtype, tensor.sparse_dim())

        def run() -> None:
            own = tensor.detach().coalesce()
            counts = torch.empty(self._size, dtype=torch.int64, device="cpu")
            count = torch.tensor(own._nnz(), device="cpu")
            self._gather(count, list(counts.unbind()), "all_reduce of a sparse tensor: counts")
            nnz = [int(count) for count in counts]
            indices = [own.indices().new_empty((own.sparse_dim(), count)) for count in nnz]
            values = [own.values().new_empty((count, *own.values().shape[1:])) for count in nnz]
            for block, parts in ((own.indices(), indices), (own.values(), values)):
                nbytes = [part_of(part)[1] for part in parts]
                dense = block.contiguous()
                self._carrier.spread(call, part_of(dense), [part_of(part) for part in parts], nbytes)
            total = torch.sparse_coo_tensor(
                torch.cat(indices, dim=1),
                torch.cat(values),
                tensor.shape,
                dtype=tensor.dtype,
                device=tensor.device,
                check_invariants=False,
            ).coalesce()
            with torch.no_grad():
                tensor.copy_(total)  # a detached one would change its own indices

        return run

    # Movements.

    def broadcast(self, tensor: torch.Tensor, root: int) -> Run:
        self._expect_rank(root)
        call = call_on("broadcast", tensor.shape, tensor.dtype, None, root)
        block = block_of(tensor)
        is_root = self._rank == root
        part = part_of(block)
        arrivals = [NOTHING] * self._size
        if not is_root:
            arrivals[root] = part
        nbytes = [part[1] if rank == root else 0 for rank in range(self._size)]

        def run() -> None:
            self._carrier.spread(call, part if is_root else NOTHING, arrivals, nbytes)
            put_back([tensor], [block])

        return run

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor) -> Run:
        """outputs[r] is what rank r has, which may be of another shape."""
        _expect(len(outputs) == self._size, f"{len(outputs)} outputs for {self._size} ranks")
        own = outputs[self._rank]
        _expect(own.numel() == tensor.numel(), "the output for this rank is not as large as its input")
        _expect(_only_dtype(outputs) == tensor.dtype, "input and outputs are of different types")
        shapes = tuple(output.shape for output in outputs)
        if shapes.count(shapes[0]) == self._size:
            call = call_on("all_gather", tensor.shape, tensor.dtype)
        else:
            call = call_on_several("all_gather", shapes, tensor.dtype)
        block, results = block_of(tensor), blocks_of(outputs)
        arrivals = [part_of(result) for result in results]
        nbytes = [size for _, size in arrivals]
        if is_in_the_way(part_of(block), arrivals, self._rank):
            block = block.clone()

        def run() -> None:
            self._carrier.spread(call, part_of(block), arrivals, nbytes)
            put_back(outputs, results)

        return run

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Run:
        """The result is one tensor, of all ranks' in their order."""
        _expect(output.dtype == tensor.dtype, "input and output are of different types")
        _expect(output.numel() == self._size * tensor.numel(), "the output is not `world size` times the input")
        call = call_on("all_gather_into_tensor", tensor.shape, tensor.dtype)
        block, result = block_of(tensor), block_of(output)
        part = part_of(block)
        nbytes = [part[1]] * self._size
        arrivals = shares_of(result, nbytes)
        if overlap(part, part_of(result)) and is_in_the_way(part, arrivals, self._rank):
            block = block.clone()

        def run() -> None:
            self._carrier.spread(call, part_of(block), arrivals, nbytes)
            put_back([output], [result])

        return run

    def _gather(self, tensor: torch.Tensor, outputs: Tensors, name: str) -> None:
        call = call_on(name, tensor.shape, tensor.dtype)
        arrivals = [part_of(output) for output in outputs]
        self._carrier.spread(call, part_of(tensor), arrivals, [size for _, size in arrivals])

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Run:
        """``outputs`` are there on the root only."""
        self._expect_rank(root)
        call = call_on("gather", tensor.shape, tensor.dtype, None, root)
        block = block_of(tensor)
        nbytes = [part_of(block)[1]] * self._size
        arrivals = [NOTHING] * self._size
        results = blocks_of(outputs)
        if self._rank == root:
            _expect(len(outputs) == self._size, f"{len(outputs)} outputs for {self._size} ranks")
            _expect(all(o.numel() == tensor.numel() for o in outputs), "the outputs are not as large as the input")
            _expect(_only_dtype(outputs) == tensor.dtype, "input and outputs are of different types")
            arrivals = [part_of(result) for result in results]
            if is_in_the_way(part_of(block), arrivals, root):
                block = block.clone()

        def run() -> None:
            self._carrier.spread(call, part_of(block), arrivals, nbytes)
            put_back(outputs, results)

        return run

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int) -> Run:
        """``inputs`` are there on the root only."""
        self._expect_rank(root)
        call = call_on("scatter", output.shape, output.dtype, None, root)
        blocks, result = blocks_of(inputs), block_of(output)
        departures, arrivals = [NOTHING] * self._size, [NOTHING] * self._size
        arrivals[root] = part_of(result)
        if self._rank == root:
            _expect(len(inputs) == self._size, f"{len(inputs)} inputs for {self._size} ranks")
            _expect(all(i.numel() == output.numel() for i in inputs), "the inputs are not as large as the output")
            _expect(_only_dtype(inputs) == output.dtype, "inputs and output are of different types")
            if is_in_the_way(part_of(result), [part_of(block) for block in blocks], root):
                blocks = [block.clone() for block in blocks]
            departures = [part_of(block) for block in blocks]

        def run() -> None:
            self._carrier.alltoall(call, departures, arrivals)
            put_back([output], [result])

        return partial(_holding, blocks, run)

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> Run:
        _expect(len(outputs) == len(inputs) == self._size, "one input and one output for each rank are needed")
        call = call_without_shape("all_to_all", _only_dtype((*outputs, *inputs)))
        blocks, results = blocks_of(inputs), blocks_of(outputs)
        departures, arrivals = [part_of(block) for block in blocks], [part_of(result) for result in results]
        if any(is_in_the_way(arrival, departures, rank) for rank, arrival in enumerate(arrivals)):
            blocks = [block.clone() for block in blocks]
            departures = [part_of(block) for block in blocks]

        def run() -> None:
            self._carrier.alltoall(call, departures, arrivals)
            put_back(outputs, results)

        return partial(_holding, blocks, run)

    def all_to_all_single(
        self, output: torch.Tensor, whole: torch.Tensor, output_rows: Sequence[int], input_rows: Sequence[int]
    ) -> Run:
        """Rows of dimension 0; an empty list stands for equal shares."""
        call = call_without_shape("all_to_all_single", _only_dtype((output, whole)))
        block, result = block_of(whole), block_of(output)
        sizes = self._shares(whole, input_rows, "input")
        departures = shares_of(block, sizes)
        arrivals = shares_of(result, self._shares(output, output_rows, "output"))
        if overlap(part_of(block), part_of(result)) and any(
            is_in_the_way(arrival, departures, rank) for rank, arrival in enumerate(arrivals)
        ):
            block = block.clone()
            departures = shares_of(block, sizes)

        def run() -> None:
            self._carrier.alltoall(call, departures, arrivals)
            put_back([output], [result])

        return partial(_holding, [block], run)

    def _expect_rank(self, root: int) -> None:
        _expect(0 <= root < self._size, f"root {root} is no rank of the {self._size}")

    def _shares(self, tensor: torch.Tensor, rows: Sequence[int], what: str) -> list[int]:
        """Bytes of each rank's share of ``tensor``."""
        height = tensor.shape[0] if tensor.dim() else 1
        if not rows:
            _expect(height % self._size == 0, f"the {height} rows of the {what} are no multiple of the world size")
            rows = [height // self._size] * self._size
        _expect(len(rows) == self._size, f"the {what} has {len(rows)} split sizes for {self._size} ranks")
        _expect(sum(rows) == height, f"the split sizes of the {what} add up to {sum(rows)}, not to its {height} rows")
        row_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
        return [count * row_bytes for count in rows]


def in_turn(runs: Sequence[Run]) -> Run:
    """All of them, one after the other."""

    def run() -> None:
        for each in runs:
            each()

    return run


def _holding(memory: Tensors, run: Run) -> None:
    """``run``, which needs ``memory`` until it is done."""
    run()


def _combined(table: torch.Tensor, way: Way) -> torch.Tensor:
    assert way.combine is not None
    return fold(way.combine, table.unbind())


def _only_dtype(tensors: Tensors) -> torch.dtype:
    dtype = tensors[0].dtype
    _expect(all(tensor.dtype == dtype for tensor in tensors), "all tensors of a call must be of one type")
    return dtype


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(f"process group hvdlite: {otherwise}")
