"""Matmuls of layers that are split between ranks, with what has to move before or after: time over the matmul alone.

    python -m hvdlite run --mpi -np 2 tensor_parallel.py
    python -m hvdlite run --mpi -np 2 tensor_parallel.py --grid   # 512 to 8192 rows, hidden 1024 and 4096; 15 minutes
    mpirun -np 2 python tensor_parallel.py --json results/tensor_parallel.json

A column layer gathers rows and multiplies; a row layer multiplies and scatters the sum. The slowest rank counts, ways
take turns, and every result is checked against matmuls of integers. tensor_parallel_layer.py has a whole layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
from beside_compute import LONG_S, Row, compare, report, rounds_within
from measure import begin, describe, in_turns, meet, parser_for, slowest, write_json
from peers import start_gloo

if TYPE_CHECKING:
    from mpi4py import MPI

ALONE = "matmul alone"
WINDOW = "hvdlite, shared memory"
UNFUSED = "hvdlite, unfused"
CHOSEN = "hvdlite, chosen"  # what users get who choose nothing
RING = "hvdlite, ring"
GATHERS, SCATTERS = "all-gather, matmul", "matmul, reduce-scatter"
LIMITS = {
    (GATHERS, torch.float32): 1.02,
    (GATHERS, torch.bfloat16): 1.02,
    (SCATTERS, torch.float32): 1.05,
    (SCATTERS, torch.bfloat16): 1.10,
}
GRID = {"rows": [512, 2048, 8192], "hidden": [1024, 4096]}
CASE = ("what", "dtype", "rows", "hidden")
BLOCK_S = 0.1  # a turn takes about so long, but at most 100 calls
CASE_S = 15.0  # of all rounds on one shape, about, where more are asked for than fit

Way = Callable[[], torch.Tensor]

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before 2.13


class Layers:
    """A column layer of (hidden, outputs) and a row layer of (outputs, hidden), on ``rows`` rows; of -1, 0, 1."""

    def __init__(self, comm: MPI.Comm, rows: int, hidden: int, outputs: int, dtype: torch.dtype) -> None:
        self._comm, self._dtype = comm, dtype
        share = outputs // comm.size
        self._own = slice(comm.rank * rows // comm.size, (comm.rank + 1) * rows // comm.size)

        def signs(seed: int, *shape: int, zeros: int = 1) -> torch.Tensor:
            """-1 and 1, and 0 ``zeros`` times as often as either."""
            generator = torch.Generator().manual_seed(seed)
            found = torch.randint(-1, zeros + 1, shape, generator=generator, dtype=dtype)
            return found.masked_fill_(found > 1, 0)

        self._x = signs(0, rows, hidden)  # on all ranks the same; of the others each has a part of its own
        self._shard = self._x[self._own].clone()
        self._y, self._up, self._down = (
            signs(3 * comm.rank + 1, rows, share),
            signs(3 * comm.rank + 2, hidden, share, zeros=16),  # so many that no sum passes 256, which bfloat16 has
            signs(3 * comm.rank + 3, share, hidden, zeros=16),
        )
        self.expected = {GATHERS: self._x @ self._up, SCATTERS: self._scattered()}

    def _scattered(self) -> torch.Tensor:
        total = (self._y.float() @ self._down.float()).numpy()
        from mpi4py import MPI

        self._comm.Allreduce(MPI.IN_PLACE, total)
        return torch.from_numpy(total)[self._own].to(self._dtype)

    def ways(self, teams: dict[str, tp.Team]) -> dict[str, dict[str, Way]]:
        """By what is done, then by who does it."""
        x, y, up, down, shard = self._x, self._y, self._up, self._down, self._shard
        whole, product = torch.empty_like(x), torch.empty(len(x), down.shape[1], dtype=self._dtype)
        parts = list(whole.chunk(self._comm.size))

        def gloo_gather() -> torch.Tensor:
            dist.all_gather(parts, shard)
            return whole @ up

        def gloo_scatter() -> torch.Tensor:
            torch.mm(y, down, out=product)
            _reduce_scatter(result, product)
            return result

        def mpi_gather() -> torch.Tensor:
            self._comm.Allgather(_bytes(shard), _bytes(whole))
            return whole @ up

        def mpi_scatter() -> torch.Tensor:
            torch.mm(y, down, out=product)
            self._comm.Reduce_scatter_block(product.numpy(), result.numpy())
            return result

        result = torch.empty(len(shard), down.shape[1], dtype=self._dtype)
        gathers: dict[str, Way] = {
            ALONE: lambda: x @ up,
            **{name: partial(tp.all_gather_matmul, shard, up, team) for name, team in teams.items() if name != RING},
            "Gloo": gloo_gather,
            "MPI": mpi_gather,
        }
        scatters: dict[str, Way] = {
            ALONE: lambda: torch.mm(y, down),
            **{name: partial(tp.matmul_reduce_scatter, y, down, team) for name, team in teams.items()},
            "Gloo": gloo_scatter,
        }
        if self._dtype is torch.float32:  # MPI knows no bfloat16
            scatters["MPI"] = mpi_scatter
        return {GATHERS: gathers, SCATTERS: scatters}


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def measure(comm: MPI.Comm, ways: dict[str, Way], expected: torch.Tensor, rounds: int) -> dict[str, np.ndarray]:
    """Seconds per call of each way, by round.

    Raises:
        AssertionError: a result is wrong.
    """
    for label, way in ways.items():
        result = way()
        assert label == ALONE or torch.equal(result, expected), label
    start = time.perf_counter()
    ways[ALONE]()
    call_s = comm.bcast(time.perf_counter() - start)
    calls = min(100, max(1, round(BLOCK_S / call_s)))
    is_long = call_s > LONG_S
    seconds: dict[str, list[float]] = {label: [] for label in ways}
    for label in in_turns([*ways], rounds_within(CASE_S, rounds, (calls + (not is_long)) * call_s * len(ways))):
        if not is_long:
            ways[label]()
        meet(comm)
        start = time.perf_counter()
        for _ in range(calls):
            ways[label]()
        seconds[label].append((time.perf_counter() - start) / calls)
    return {label: slowest(comm, own) for label, own in seconds.items()}


def cases(
    comm: MPI.Comm, teams: dict[str, tp.Team], dtype: torch.dtype, rows: int, hidden: int, outputs: int, rounds: int
) -> list[Row]:
    """Both functions on one shape."""
    layers = Layers(comm, rows, hidden, outputs, dtype)
    found: list[Row] = []
    for what, ways in layers.ways(teams).items():
        times = measure(comm, ways, layers.expected[what], rounds)
        case = {"what": what, "dtype": str(dtype).removeprefix("torch."), "rows": rows, "hidden": hidden}
        case["outputs"] = outputs
        found += compare(times, ALONE, CHOSEN, {UNFUSED, "MPI", "Gloo"}, LIMITS[what, dtype], case)
    return found


def main() -> None:
    parser = parser_for(__doc__, rounds=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048], help="default: %(default)s")
    parser.add_argument(
        "--hidden", type=int, nargs="+", default=[1024], help="inputs of the column layer (%(default)s)"
    )
    parser.add_argument("--outputs", type=int, help="its outputs, of all ranks (default: 4 times its inputs)")
    parser.add_argument("--grid", action="store_true", help=f"all of {GRID}; without what is never chosen")
    options = parser.parse_args()
    if options.grid:
        options.rows, options.hidden = GRID["rows"], GRID["hidden"]
    torch.set_num_threads(1)
    comm, facts = begin()
    start_gloo(comm)
    methods = {UNFUSED: "unfused", CHOSEN: "auto"}
    if not options.grid:
        methods[WINDOW] = "window"
        if comm.size == 2:
            methods[RING] = "ring_exchange"
    teams = {name: tp.Team(method=method) for name, method in methods.items()}
    if comm.rank == 0:
        print(describe(facts), flush=True)
    found: list[dict[str, Any]] = []
    for hidden in options.hidden:
        for rows in options.rows:
            for dtype in (torch.float32, torch.bfloat16):
                outputs = options.outputs or 4 * hidden
                found += cases(comm, teams, dtype, rows, hidden, outputs, options.rounds)
                if comm.rank == 0:
                    print(f"  {rows} rows of {hidden}, {dtype} done", flush=True)
    if comm.rank == 0:
        print(report(found, CASE))
        write_json(options.json, {"benchmark": "tensor_parallel", **facts, "rows": found})
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
