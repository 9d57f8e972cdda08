"""A whole transformer layer that is split between ranks, forward and backward: time over that of its compute alone.

    python -m hvdlite run --mpi -np 2 tensor_parallel_layer.py
    mpirun -np 2 python tensor_parallel_layer.py --json results/tensor_parallel_layer.json

Attention and MLP, each with a LayerNorm before it; between split layers activations are in shards of rows (sequence
parallelism), or whole. The compute alone is that of a rank: its heads and features, and its rows of the norms, where
gathers and scatters take no time. Beside it hvdlite as it chooses itself, by shared memory and unfused, and torch's
DTensor over Gloo. The slowest rank counts, ways take turns, and results and gradients are checked against the unsplit
layer.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import gelu, scaled_dot_product_attention

import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
from beside_compute import LONG_S, Row, compare, report, rounds_within
from hvdlite.tensor_parallel.part import Part
from measure import begin, describe, in_turns, meet, parser_for, slowest, write_json
from peers import start_gloo

if TYPE_CHECKING:
    from mpi4py import MPI

ALONE = "compute alone"
CHOSEN, WINDOW, UNFUSED = "hvdlite, chosen", "hvdlite, shared memory", "hvdlite, unfused"
DTENSOR = "DTensor, Gloo"
METHODS = {CHOSEN: "auto", WINDOW: "window", UNFUSED: "unfused"}
DIRECTIONS = ("forward", "backward", "both")
LIMIT = 1.08
CASE_S = 25.0  # of all rounds of a case, about, where more are asked for than fit
CASE = ("direction", "dtype", "rows", "hidden", "form")
COLUMNS, ROWS = ("qkv", "up"), ("out", "down")  # the layers that are split by outputs, and by inputs
HEAD_WIDTH = 64
# Of the difference to fp32, as a share. Torch adds up gradients of a LayerNorm in bfloat16: unsplit they are 0.14 off.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
TOLERANCE_OF_NORMS = {torch.float32: 1e-4, torch.bfloat16: 0.3}


class Layer(nn.Module):
    """(positions, batch, hidden) to the same. Queries, keys and values of a head are side by side."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_width = min(HEAD_WIDTH, hidden // 2)
        self.norm1, self.norm2 = nn.LayerNorm(hidden, dtype=dtype), nn.LayerNorm(hidden, dtype=dtype)
        self.qkv: nn.Module = nn.Linear(hidden, 3 * hidden, dtype=dtype)
        self.out: nn.Module = nn.Linear(hidden, hidden, dtype=dtype)
        self.up: nn.Module = nn.Linear(hidden, 4 * hidden, dtype=dtype)
        self.down: nn.Module = nn.Linear(4 * hidden, hidden, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attend(self.qkv(self.norm1(x))))
        return x + self.down(gelu(self.up(self.norm2(x))))

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """(positions, batch, 3 * features of this rank) to (positions, batch, features of this rank)."""
        queries, keys, values = qkv.unflatten(2, (-1, 3, self.head_width)).permute(3, 1, 2, 0, 4)
        return scaled_dot_product_attention(queries, keys, values, is_causal=True).permute(2, 0, 1, 3).flatten(2)


# The ways.


def on_team(layer: Layer, team: tp.Team, *, by_rows: bool) -> Layer:
    column = partial(tp.ColumnParallelLinear.split, sequence_parallel=by_rows)
    row = partial(tp.RowParallelLinear.split, sequence_parallel=by_rows)
    tp.parallelize(layer, dict.fromkeys(COLUMNS, column) | dict.fromkeys(ROWS, row), team)
    if by_rows:
        for norm in (layer.norm1, layer.norm2):
            tp.sum_gradients(norm, team)
    return layer


def on_mesh(layer: Layer, mesh: DeviceMesh, *, by_rows: bool) -> Layer:
    column = partial(ColwiseParallel, input_layouts=Shard(0)) if by_rows else ColwiseParallel
    row = partial(RowwiseParallel, output_layouts=Shard(0)) if by_rows else RowwiseParallel
    plan: dict[str, Any] = {name: column() for name in COLUMNS} | {name: row() for name in ROWS}
    if by_rows:
        plan |= {name: SequenceParallel(sequence_dim=0) for name in ("norm1", "norm2")}
    parallelize_module(layer, mesh, plan)
    return layer


def alone(layer: Layer, comm: MPI.Comm, like: torch.Tensor, *, by_rows: bool) -> Layer:
    """This rank's compute; ``like``: all rows."""
    memory = torch.randn_like(like)
    for name in (*COLUMNS, *ROWS):
        linear = getattr(layer, name)
        assert isinstance(linear, nn.Linear)
        is_column = name in COLUMNS
        own = nn.Linear(
            linear.in_features // (1 if is_column else comm.size),
            linear.out_features // (comm.size if is_column else 1),
            dtype=linear.weight.dtype,
        )
        moved = _Instantly(memory) if by_rows else nn.Identity()
        setattr(layer, name, nn.Sequential(*([moved, own] if is_column else [own, moved])))
    return layer


class _Instantly(nn.Module):
    """In place of a gather or a scatter of rows: whatever there is, and no copy."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self._memory = memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = _Moved.apply(x, self._memory)  # type: ignore[no-untyped-call]
        return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.memory = memory
        return _other_form(x, memory)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _other_form(grad, ctx.memory), None


def _other_form(x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """All rows for some, or some for all."""
    return memory[: len(memory) // hvd.size()].detach() if len(x) == len(memory) else memory.detach()


# Measuring.


class Case:
    """One shape, in one form: all ways of it.

    Args:
        by_rows: with sequence parallelism.
    """

    def __init__(
        self, comm: MPI.Comm, teams: dict[str, tp.Team], shape: tuple[int, int, int], dtype: torch.dtype, by_rows: bool
    ) -> None:
        self._comm, self._by_rows = comm, by_rows
        torch.manual_seed(0)
        whole = Layer(shape[2], dtype)
        x, upstream = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        self._unsplit = copy.deepcopy(whole).float()
        self._expected_x = x.to(torch.float32, copy=True).requires_grad_()
        self._expected = self._unsplit(self._expected_x)
        self._expected.backward(upstream.float())
        self._x, self._upstream = self._own(x).clone().requires_grad_(), self._own(upstream).clone()
        self.ways = {ALONE: alone(copy.deepcopy(whole), comm, x, by_rows=by_rows)}
        for name, team in teams.items():
            self.ways[name] = on_team(copy.deepcopy(whole), team, by_rows=by_rows)
        mesh = DeviceMesh("cpu", torch.arange(comm.size))
        self.ways[DTENSOR] = on_mesh(copy.deepcopy(whole), mesh, by_rows=by_rows)
        for layer in self.ways.values():
            layer.zero_grad()

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.chunk(self._comm.size)[self._comm.rank] if self._by_rows else rows

    def step(self, way: str) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        layer = self.ways[way]
        layer.zero_grad()
        self._x.grad = None
        start = time.perf_counter()
        self.result = layer(self._x)
        half = time.perf_counter()
        self.result.backward(self._upstream)
        return half - start, time.perf_counter() - half

    def check(self, way: str) -> None:
        """The result of `step`, and its gradients.

        Raises:
            AssertionError: some are wrong.
        """
        assert self._x.grad is not None
        assert self._expected_x.grad is not None
        compared = {
            "y": (self.result, self._own(self._expected)),
            "x": (self._x.grad, self._own(self._expected_x.grad)),
        }
        for name, parameter in self._unsplit.named_parameters():
            layer, kind = name.split(".")
            dim = 0 if layer in COLUMNS else 1 if layer in ROWS and kind == "weight" else None
            grad, expected = self.ways[way].get_parameter(name).grad, parameter.grad
            assert expected is not None
            if isinstance(grad, DTensor):
                grad = grad.to_local() if dim is not None else grad.full_tensor()
            assert grad is not None
            part = expected if dim is None else Part(dim).of(expected, self._comm.rank, self._comm.size)
            compared[name] = grad, part
        for name, (found, wanted) in compared.items():
            off = ((found - wanted).norm() / wanted.norm()).item()
            tolerance = (TOLERANCE_OF_NORMS if name.startswith("norm") else TOLERANCE)[self._x.dtype]
            assert off < tolerance, f"{way}: {name} is off by {off}"


def measure(comm: MPI.Comm, case: Case, rounds: int) -> dict[str, dict[str, np.ndarray]]:
    """Seconds of each direction and way, by round."""
    for way in case.ways:
        case.step(way)
        if way != ALONE:
            case.check(way)
    step_s = comm.bcast(sum(case.step(ALONE)))
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in case.ways}
    is_long = step_s > LONG_S
    for way in in_turns([*case.ways], rounds_within(CASE_S, rounds, (2 - is_long) * step_s * len(case.ways))):
        if not is_long:
            case.step(way)
        meet(comm)
        seconds[way].append(case.step(way))
    found: dict[str, dict[str, np.ndarray]] = {direction: {} for direction in DIRECTIONS}
    for way, own in seconds.items():
        halves = np.array(own)
        for direction, taken in zip(DIRECTIONS, (*halves.T, halves.sum(1)), strict=True):
            found[direction][way] = slowest(comm, taken.tolist())
    return found


def run(comm: MPI.Comm, teams: dict[str, tp.Team], case: Row, context: int, rounds: int) -> list[Row]:
    batch, odd = divmod(case["rows"], context)
    assert not odd, f"{case['rows']} rows are no sequences of {context}"
    shape = context, batch, case["hidden"]
    made = Case(comm, teams, shape, getattr(torch, case["dtype"]), case["form"] == "rows")
    times = measure(comm, made, rounds)
    found: list[Row] = []
    for direction in DIRECTIONS:
        found += compare(times[direction], ALONE, CHOSEN, {UNFUSED, DTENSOR}, LIMIT, {"direction": direction, **case})
    return found


def main() -> None:
    parser = parser_for(__doc__, rounds=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048], help="positions x batch (%(default)s)")
    parser.add_argument("--context", type=int, default=512, help="positions of a sequence (default: %(default)s)")
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024], help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm, facts = begin()
    start_gloo(comm)
    teams = {name: tp.Team(method=method) for name, method in METHODS.items()}
    if comm.rank == 0:
        print(describe(facts), flush=True)
    found: list[Row] = []
    for hidden in options.hidden:
        for rows in options.rows:
            for dtype in ("float32", "bfloat16"):
                for form in ("rows", "whole"):  # of activations between split layers
                    case = {"dtype": dtype, "rows": rows, "hidden": hidden, "form": form}
                    found += run(comm, teams, case, options.context, options.rounds)
                    if comm.rank == 0:
                        print(f"  {rows} rows of {hidden}, {dtype}, {form} done", flush=True)
    if comm.rank == 0:
        print(report(found, CASE))
        write_json(options.json, {"benchmark": "tensor_parallel_layer", **facts, "rows": found})
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
