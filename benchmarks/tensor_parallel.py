"""Matmuls of layers that are split between ranks, with what has to move before or after: time over the matmul alone.

    python -m hvdlite run --mpi -np 2 tensor_parallel.py
    mpirun -np 2 python tensor_parallel.py --json results/tensor_parallel.json

A column layer gathers rows and multiplies; a row layer multiplies and scatters the sum. The slowest rank counts, ways
take turns, and every result is checked against a matmul of integers that every rank can do alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import hvdlite
import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
from measure import (
    add_json_option,
    describe,
    estimate,
    in_turns,
    keep_collector_out,
    median_ratio,
    meet,
    provenance,
    show,
    slowest,
    table,
    write_json,
)
from peers import start_gloo

if TYPE_CHECKING:
    from mpi4py import MPI

ALONE = "matmul alone"
OWN = "hvdlite, shared memory"
BLOCK_S = 0.1  # a turn takes about so long, but at most 100 calls

Way = Callable[[], torch.Tensor]


class Layers:
    """A column layer of (hidden, outputs) and a row layer of (outputs, hidden), on ``rows`` rows; small integers."""

    def __init__(self, comm: MPI.Comm, rows: int, hidden: int, outputs: int, dtype: torch.dtype) -> None:
        self._comm, self._dtype = comm, dtype
        size, rank = comm.size, comm.rank
        own = slice(rank * rows // size, (rank + 1) * rows // size)
        part = slice(rank * outputs // size, (rank + 1) * outputs // size)
        generator = torch.Generator().manual_seed(0)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)

        self._x, self._y = integers(rows, hidden), integers(rows, outputs)[:, part].contiguous()
        self._up, self._down = integers(hidden, outputs)[:, part].contiguous(), integers(outputs, hidden)[part]
        self._shard = self._x[own].contiguous()
        self._own = own
        self.expected = {"all-gather, matmul": self._x @ self._up, "matmul, reduce-scatter": self._scattered()}

    def _scattered(self) -> torch.Tensor:
        total = (self._y.float() @ self._down.float()).numpy()
        from mpi4py import MPI

        self._comm.Allreduce(MPI.IN_PLACE, total)
        return torch.from_numpy(total)[self._own].to(self._dtype)

    def ways(self, window: tp.Team, unfused: tp.Team) -> dict[str, dict[str, Way]]:
        """By what is done, then by who does it."""
        x, y, up, down, shard = self._x, self._y, self._up, self._down, self._shard
        whole, product = torch.empty_like(x), torch.empty(len(x), down.shape[1], dtype=self._dtype)
        parts = list(whole.chunk(self._comm.size))

        def gloo_gather() -> torch.Tensor:
            dist.all_gather(parts, shard)
            return whole @ up

        def gloo_scatter() -> torch.Tensor:
            torch.mm(y, down, out=product)
            dist.all_reduce(product)  # there is no reduce-scatter
            return product[self._own]

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
            OWN: lambda: tp.all_gather_matmul(shard, up, window),
            "hvdlite, unfused": lambda: tp.all_gather_matmul(shard, up, unfused),
            "Gloo": gloo_gather,
            "MPI": mpi_gather,
        }
        scatters: dict[str, Way] = {
            ALONE: lambda: torch.mm(y, down),
            OWN: lambda: tp.matmul_reduce_scatter(y, down, window),
            "hvdlite, unfused": lambda: tp.matmul_reduce_scatter(y, down, unfused),
            "Gloo": gloo_scatter,
        }
        if self._dtype is torch.float32:  # MPI knows no bfloat16
            scatters["MPI"] = mpi_scatter
        return {"all-gather, matmul": gathers, "matmul, reduce-scatter": scatters}


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
    calls = int(comm.bcast(min(100, max(1, round(BLOCK_S / (time.perf_counter() - start))))))
    seconds: dict[str, list[float]] = {label: [] for label in ways}
    for label in in_turns([*ways], rounds):
        ways[label]()
        meet(comm)
        start = time.perf_counter()
        for _ in range(calls):
            ways[label]()
        seconds[label].append((time.perf_counter() - start) / calls)
    return {label: slowest(comm, own) for label, own in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048], help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=1024, help="inputs of the column layer (default: %(default)s)")
    parser.add_argument("--outputs", type=int, default=4096, help="its outputs, of all ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each way (default: %(default)s)")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    start_gloo(comm)
    keep_collector_out()
    facts = provenance(comm, len(hvdlite.runtime().topology.nodes))
    window, unfused = tp.Team(method="window"), tp.Team(method="unfused")
    found: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for rows in options.rows:
            layers = Layers(comm, rows, options.hidden, options.outputs, dtype)
            for what, ways in layers.ways(window, unfused).items():
                times = measure(comm, ways, layers.expected[what], options.rounds)
                for label, own in times.items():
                    over = estimate(median_ratio, own, times[ALONE])
                    row = {"what": what, "dtype": str(dtype).removeprefix("torch."), "rows": rows, "way": label}
                    found.append({**row, "median_ms": float(np.median(own)) * 1e3, "over_matmul": over})
    if comm.rank == 0:
        print(describe(facts))
        print(
            f"{options.hidden} x {options.outputs}; relative: time / that of the matmul alone, with its 95 % interval"
        )
        cells = []
        for row in found:
            what = f"{row['what']}, {row['dtype']}, {row['rows']} rows"
            cells.append([what, row["way"], f"{row['median_ms']:.2f}", show(row["over_matmul"], 3)])
        print(table(["", "way", "median ms", "relative"], cells))
        sizes = {"hidden": options.hidden, "outputs": options.outputs}
        write_json(options.json, {"benchmark": "tensor_parallel", **facts, **sizes, "rows": found})
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
