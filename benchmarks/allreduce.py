"""Allreduce of float32, in place: hvdlite beside memcpy, MPI's own Allreduce and torch's Gloo, in one run.

    python -m hvdlite run --mpi -np 2 allreduce.py
    mpirun -np 2 python allreduce.py --json results/allreduce.json
    python across_hosts.py --hosts 2 --ranks 2 --rate 1gbit allreduce.py --bytes 67108864 --rounds 5 --calls 1

The ways are measured in turns: in every round each of them makes one block of calls, in an order that changes from
round to round, so that a disturbance of the machine hits all alike. benchmarks/README.md says what is timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import hvdlite
from measure import (
    begin,
    describe,
    estimate,
    in_turns,
    median_ratio,
    meet,
    parser_for,
    show,
    size,
    slowest,
    summary,
    table,
    write_json,
)
from peers import allow_coll_sm, start_gloo
from summing import Way, ways

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_CALLS = 60
BLOCK_BYTES = 32 << 20
PERIOD = 251  # of the input; a prime, so that no shard or chunk begins like another
TCP_SHARE = 1448 / 1514  # of the bytes of a full Ethernet frame, the rest being headers
SIZES = sorted([4 << 2 * i for i in range(14)] + [32 << 10])


def calls_per_block(nbytes: int, ranks: int) -> int:
    """Enough to hide the clock and the start; few enough that n**calls times the input stays within float32."""
    growth = math.log2(ranks) if ranks > 1 else 0.0
    limit = int((120 - math.log2(PERIOD * (ranks + 1) ** 2)) / growth) if growth else MAX_CALLS
    return max(2, min(MAX_CALLS, limit - warm_calls(nbytes), BLOCK_BYTES // nbytes))


def warm_calls(nbytes: int) -> int:
    """Calls that go before a block: until the order of operations is frozen, as it is in training all the time."""
    return 12 if nbytes <= BLOCK_BYTES else 1


def block(way: Way, comm: MPI.Comm, pattern: np.ndarray, calls: int, check_all: bool) -> tuple[float, float]:
    """Seconds per call, and bytes that this host sent to others per call.

    `warm_calls` go before the clock starts: they start the ranks together and bring the data to where it lives.

    Raises:
        AssertionError: a result is wrong.
    """
    numel = len(pattern)
    part = way.array[:numel]
    np.multiply(pattern, np.float32(comm.rank + 1), out=part)
    way.prepare(numel)
    sent = sent_by_host()
    meet(comm)
    warm = warm_calls(4 * numel)
    for _ in range(warm):
        way.call()
    start = time.perf_counter()
    for _ in range(calls):
        way.call()
    seconds = (time.perf_counter() - start) / calls
    meet(comm)
    sent = sent_by_host() - sent
    step = 1 if check_all else max(1, numel // 4096)
    scale = np.float32(way.expected_scale(comm.size, calls + warm))
    # Powers of two are exact; with other numbers of ranks every call rounds once more.
    expected = pattern[::step] * scale
    np.testing.assert_allclose(part[::step], expected, rtol=(calls + warm) * 2e-7, err_msg=f"{way.label}, {numel}")
    return seconds, sent / (calls + warm)


def sent_by_host() -> int:
    """Bytes that this host has sent over its links so far, with all headers."""
    counters = Path("/sys/class/net").glob("*/statistics/tx_bytes")
    return sum(int(path.read_text()) for path in counters if path.parts[-3] != "lo")


def measure(
    found: Sequence[Way], comm: MPI.Comm, nbytes: int, rounds: int, calls: int, bound_us: float | None
) -> list[dict[str, Any]]:
    """One row per way; a round more goes before to warm up, and checks every element of the result."""
    numel = nbytes // 4
    pattern = np.arange(numel, dtype=np.float32) % PERIOD
    for way in found:
        block(way, comm, pattern, calls, check_all=True)
    taken: dict[str, list[tuple[float, float]]] = {way.label: [] for way in found}
    for way in in_turns(found, rounds):
        taken[way.label].append(block(way, comm, pattern, calls, check_all=False))
    times = {label: slowest(comm, [seconds for seconds, _ in own]) * 1e6 for label, own in taken.items()}
    rows = []
    for way in found:
        median, p95 = summary(times[way.label])
        algbw = nbytes / median / 1e3
        row = {
            "way": way.label,
            "is_peer": way.is_peer,
            "bytes": nbytes,
            "median_us": median,
            "p95_us": p95,
            "algbw_gbps": algbw,
            "busbw_gbps": None if way.is_bound else algbw * 2 * (comm.size - 1) / comm.size,
            "rounds": rounds,
            "calls_per_round": calls,
        }
        if not way.is_peer and not way.is_bound:
            others = [other.label for other in found if other.is_peer or other.is_bound]
            row["times_as_fast"] = {other: estimate(median_ratio, times[other], times[way.label]) for other in others}
        if bound_us is not None:
            row["of_bound"] = estimate(lambda taken: np.median(taken, axis=-1) / bound_us, times[way.label])
        if len(hvdlite.runtime().topology.nodes) > 1:
            row["sent_by_host_bytes"] = float(np.median([sent for _, sent in taken[way.label]]))
        rows.append(row)
    return rows


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    labels = list(dict.fromkeys(row["way"] for row in rows))
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    cell = {(row["way"], row["bytes"]): row for row in rows}
    for title, key, digits in (
        ("median, microseconds", "median_us", 1),
        ("95th percentile, microseconds", "p95_us", 1),
        ("busbw, GB/s", "busbw_gbps", 3),
        ("bytes that rank 0's host sends", "sent_by_host_bytes", 0),
    ):
        shown = [label for label in labels if cell[label, sizes[0]].get(key) is not None]
        if shown:
            print(f"\n{title}")
            lines = [[size(n), *(f"{cell[label, n][key]:.{digits}f}" for label in shown)] for n in sizes]
            print(table(["bytes", *shown], lines))
    own = [label for label in labels if "times_as_fast" in cell[label, sizes[0]]]
    if not own or not any(row["is_peer"] for row in rows):
        return
    print("\nhow many times faster than the fastest peer (below 1: slower)")
    lines = []
    for nbytes in sizes:
        peer = min((row for row in rows if row["is_peer"] and row["bytes"] == nbytes), key=lambda row: row["median_us"])
        ratios = [f"{cell[label, nbytes]['times_as_fast'][peer['way']]['value']:.2f}" for label in own]
        lines.append([size(nbytes), *ratios, peer["way"]])
    print(table(["bytes", *own, "fastest peer"], lines))


def crossing(nbytes: int, hosts: int) -> float:
    """Bytes that each of ``hosts`` must send to others, however the sum is computed (bandwidth-optimal)."""
    return 2 * (hosts - 1) / hosts * nbytes


def print_bounds(rows: Sequence[dict[str, Any]], link_gbit: float) -> None:
    print(f"\ntime / (bytes that must cross / {link_gbit:g} Gbit/s); of that rate TCP has {100 * TCP_SHARE:.1f} %")
    print(table(["bytes", "way", ""], [[size(row["bytes"]), row["way"], show(row["of_bound"], 3)] for row in rows]))


def main() -> None:
    parser = parser_for(__doc__, rounds=20, of="each way and size")
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, metavar="N", help="default: 4, 16, ... 256 MiB")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="only these (default: all)")
    parser.add_argument("--calls", type=int, help="of each block (default: 2 to 60, by the size)")
    parser.add_argument("--link-gbit", type=float, help="rate of each host's link, to compare times with")
    options = parser.parse_args()

    torch.set_num_threads(1)
    allow_coll_sm()
    comm, facts = begin()
    start_gloo(comm)
    if comm.rank == 0:
        print(describe(facts), flush=True)
    found = ways(comm, max(options.bytes) // 4)
    unknown = {*(options.ways or ())} - {way.label for way in found}
    if unknown:
        parser.error(f"no such way here: {', '.join(unknown)}; there are {', '.join(way.label for way in found)}")
    chosen = [way for way in found if not options.ways or way.label in options.ways]
    rows: list[dict[str, Any]] = []
    for nbytes in options.bytes:
        bound_us = options.link_gbit and crossing(nbytes, facts["nodes"]) * 8e-3 / options.link_gbit
        calls = options.calls or calls_per_block(nbytes, comm.size)
        rows += measure(chosen, comm, nbytes, options.rounds, calls, bound_us)
        if comm.rank == 0:
            print(f"  {size(nbytes)} done", flush=True)
    if comm.rank == 0:
        print_tables(rows)
        if options.link_gbit:
            print_bounds(rows, options.link_gbit)
        write_json(options.json, {"benchmark": "allreduce", **facts, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
