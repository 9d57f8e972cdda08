"""Allreduce of float32, in place: hvdlite beside memcpy, MPI's own Allreduce and torch's Gloo, in one run.

    python -m hvdlite run -np 2 allreduce.py
    mpirun -np 2 python allreduce.py --json results/allreduce.json

The ways are measured in turns: in every round each of them makes one block of calls, in an order that moves on by one
from round to round, so that a disturbance of the machine hits all alike. benchmarks/README.md says what is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import hvdlite
import hvdlite.torch as hvd
from hvdlite import _native
from hvdlite.collectives.base import Backend
from hvdlite.collectives.select import build_backend
from hvdlite.dtypes import DType
from hvdlite.node import discover
from hvdlite.timeline.recorder import Recorder
from hvdlite.topology import Topology
from measure import add_json_option, describe, meet, provenance, slowest, summary, table, write_json
from peers import allow_coll_sm, start_gloo, with_coll_sm

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_CALLS = 60
BLOCK_BYTES = 32 << 20
PERIOD = 251  # of the input; a prime, so that no shard or chunk begins like another


class Way(ABC):
    """One way to sum ``array`` over the ranks, in place.

    Attributes:
        array: (numel of the largest size,) float32, where this way likes it best.
        is_peer: whether somebody could use it instead of hvdlite.
    """

    label: str
    is_peer = False
    array: np.ndarray

    @abstractmethod
    def prepare(self, numel: int) -> None:
        """The next calls sum ``array[:numel]``."""

    @abstractmethod
    def call(self) -> None: ...

    def expected_scale(self, ranks: int, calls: int) -> float:
        """What the pattern has been multiplied by after ``calls``; rank r contributes r + 1 times the pattern."""
        return ranks * (ranks + 1) / 2 * float(ranks) ** (calls - 1)


class Memcpy(Way):
    """The bound: one copy of the same bytes on all ranks at once, from one private array to another."""

    label = "memcpy"

    def __init__(self, rank: int, numel: int) -> None:
        self._source = np.full(numel, rank + 1, np.float32)
        self.array = np.empty(numel, np.float32)
        self._rank = rank

    def prepare(self, numel: int) -> None:
        np.copyto(self._source[:numel], self.array[:numel])
        self.array[:numel] = 0
        self._nbytes = 4 * numel

    def call(self) -> None:
        _native.copy(self.array.ctypes.data, self._source.ctypes.data, self._nbytes)

    def expected_scale(self, ranks: int, calls: int) -> float:
        return float(self._rank + 1)


class NodeBackend(Way):
    """hvdlite's shared-memory backend, called by this thread: what the collective itself costs."""

    label = "hvdlite backend"

    def __init__(self, backend: Backend, numel: int) -> None:
        self._backend = backend
        self._all = backend.allocate(numel, DType.FLOAT32)
        self.array = np.ctypeslib.as_array((ctypes.c_float * numel).from_address(self._all.address))

    def prepare(self, numel: int) -> None:
        self._buffer = self._all.narrow(0, numel)

    def call(self) -> None:
        self._backend.allreduce(self._buffer)


class Hvdlite(Way):
    """What users call: through the coordinator thread, whether ``array`` lives in a fusion buffer or elsewhere."""

    def __init__(self, label: str, array: np.ndarray) -> None:
        self.label = label
        self.array = array

    def prepare(self, numel: int) -> None:
        self._tensor = torch.from_numpy(self.array[:numel])
        self._name = f"{self.label}, {numel}"

    def call(self) -> None:
        hvd.allreduce_(self._tensor, op=hvd.Sum, name=self._name)


class Mpi(Way):
    is_peer = True

    def __init__(self, label: str, comm: MPI.Comm, array: np.ndarray) -> None:
        from mpi4py import MPI

        self.label = label
        self.array = array
        self._comm = comm
        self._in_place = MPI.IN_PLACE

    def prepare(self, numel: int) -> None:
        self._part = self.array[:numel]

    def call(self) -> None:
        self._comm.Allreduce(self._in_place, self._part)


class Gloo(Way):
    label = "Gloo"
    is_peer = True

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def prepare(self, numel: int) -> None:
        self._tensor = torch.from_numpy(self.array[:numel])

    def call(self) -> None:
        dist.all_reduce(self._tensor)


def ways(comm: MPI.Comm, numel: int) -> list[Way]:
    """All that this job can run; a collective call."""
    runtime = hvdlite.runtime()
    elsewhere = np.empty(numel, np.float32)
    slot = runtime.group.allocate(4 * numel).memory.view(np.float32)
    found: list[Way] = [Memcpy(comm.rank, numel)]
    coll_sm = None
    if len(runtime.topology.nodes) == 1:
        nodes, node = discover(comm, runtime.config.start_timeout_s)
        backend = build_backend(node, None, Topology(comm.rank, nodes), runtime.config, runtime.check, Recorder())
        found.append(NodeBackend(backend, numel))
        coll_sm = with_coll_sm(comm)
    found += [Hvdlite("hvd, in its slot", slot), Hvdlite("hvd, elsewhere", elsewhere)]
    found.append(Mpi("MPI", comm.Dup(), elsewhere))
    if coll_sm is not None:
        found.append(Mpi("MPI coll/sm", coll_sm, elsewhere))
    return [*found, Gloo(elsewhere)]


def calls_per_block(nbytes: int, ranks: int) -> int:
    """Enough to hide the clock and the start; few enough that n**calls times the input stays within float32."""
    growth = math.log2(ranks) if ranks > 1 else 0.0
    limit = int((120 - math.log2(PERIOD * (ranks + 1) ** 2)) / growth) if growth else MAX_CALLS
    return max(2, min(MAX_CALLS, limit - 1, BLOCK_BYTES // nbytes))


def block(way: Way, comm: MPI.Comm, pattern: np.ndarray, calls: int, check_all: bool) -> float:
    """Seconds per call. One call more goes before: it starts the ranks together and brings the data to where it lives.

    Raises:
        AssertionError: a result is wrong.
    """
    numel = len(pattern)
    part = way.array[:numel]
    np.multiply(pattern, np.float32(comm.rank + 1), out=part)
    way.prepare(numel)
    meet(comm)
    way.call()
    start = time.perf_counter()
    for _ in range(calls):
        way.call()
    seconds = (time.perf_counter() - start) / calls
    step = 1 if check_all else max(1, numel // 4096)
    scale = np.float32(way.expected_scale(comm.size, calls + 1))
    # Powers of two are exact; with other numbers of ranks every call rounds once more.
    expected = pattern[::step] * scale
    np.testing.assert_allclose(part[::step], expected, rtol=calls * 2e-7, err_msg=f"{way.label}, {numel}")
    return seconds


def measure(found: Sequence[Way], comm: MPI.Comm, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """One row per way; a round more goes before to warm up, and checks every element of the result."""
    numel = nbytes // 4
    pattern = np.arange(numel, dtype=np.float32) % PERIOD
    calls = calls_per_block(nbytes, comm.size)
    seconds: list[list[float]] = [[] for _ in found]
    for turn in range(rounds + 1):
        for i in range(len(found)):
            index = (turn + i) % len(found)
            taken = block(found[index], comm, pattern, calls, check_all=turn == 0)
            if turn > 0:
                seconds[index].append(taken)
    rows = []
    for way, own in zip(found, seconds, strict=True):
        median, p95 = summary(slowest(comm, own))
        algbw = nbytes / median / 1e9
        rows.append(
            {
                "way": way.label,
                "is_peer": way.is_peer,
                "bytes": nbytes,
                "median_us": median * 1e6,
                "p95_us": p95 * 1e6,
                "algbw_gbps": algbw,
                "busbw_gbps": None if isinstance(way, Memcpy) else algbw * 2 * (comm.size - 1) / comm.size,
                "rounds": rounds,
                "calls_per_round": calls,
            }
        )
    return rows


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    labels = list(dict.fromkeys(row["way"] for row in rows))
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    cell = {(row["way"], row["bytes"]): row for row in rows}
    for title, key, digits in (
        ("median, microseconds", "median_us", 1),
        ("95th percentile, microseconds", "p95_us", 1),
        ("busbw, GB/s", "busbw_gbps", 3),
    ):
        shown = [label for label in labels if cell[label, sizes[0]][key] is not None]
        print(f"\n{title}")
        print(
            table(
                ["bytes", *shown],
                [[_size(nbytes), *(f"{cell[label, nbytes][key]:.{digits}f}" for label in shown)] for nbytes in sizes],
            )
        )
    own = [label for label in labels if label.startswith("hv")]
    print("\nhow many times faster than the fastest peer (below 1: slower)")
    lines = []
    for nbytes in sizes:
        peer = min((row for row in rows if row["is_peer"] and row["bytes"] == nbytes), key=lambda row: row["median_us"])
        ratios = [f"{peer['median_us'] / cell[label, nbytes]['median_us']:.2f}" for label in own]
        lines.append([_size(nbytes), *ratios, peer["way"]])
    print(table(["bytes", *own, "fastest peer"], lines))


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--min-bytes", type=int, default=4, help="smallest size (default: %(default)s)")
    parser.add_argument("--max-bytes", type=int, default=256 << 20, help="largest size (default: %(default)s)")
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each way and size (default: %(default)s)")
    add_json_option(parser)
    options = parser.parse_args()

    torch.set_num_threads(1)
    allow_coll_sm()
    hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    start_gloo(comm)
    facts = provenance(comm, len(hvdlite.runtime().topology.nodes))
    if comm.rank == 0:
        print(describe(facts), flush=True)
    count = int(math.log(options.max_bytes / options.min_bytes, options.factor) + 1e-9) + 1
    sizes = [options.min_bytes * options.factor**i for i in range(count)]
    found = ways(comm, sizes[-1] // 4)
    rows: list[dict[str, Any]] = []
    for nbytes in sizes:
        rows += measure(found, comm, nbytes, options.rounds)
        if comm.rank == 0:
            print(f"  {_size(nbytes)} done", flush=True)
    if comm.rank == 0:
        print_tables(rows)
        write_json(options.json, {"benchmark": "allreduce", **facts, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
