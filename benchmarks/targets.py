"""What hvdlite should reach, beside what was measured: ratios within one run, from the reports of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
IN_SLOT, ELSEWHERE = "hvd, in its slot", "hvd, elsewhere"
COMPUTE_BOUND = ("convolutional", "transformer")

Report = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """``measured`` shall be at most, or at least, ``limit``."""

    what: str
    measured: float
    limit: float
    at_most: bool

    @property
    def is_met(self) -> bool:
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    def row(self) -> list[str]:
        sign = "<=" if self.at_most else ">="
        return [self.what, f"{self.measured:.3g}", f"{sign} {self.limit:g}", "yes" if self.is_met else "NO"]


def targets(reports: dict[str, Report]) -> list[Target]:
    """All that the reports, by the name of the benchmark, can tell."""
    found: list[Target] = []
    for name, make in (
        ("allreduce", _of_allreduce),
        ("latency", _of_latency),
        ("train_step", _of_steps),
        ("one_rank", _of_one_rank),
        ("overlap", _of_overlap),
    ):
        if name in reports:
            found += make(reports[name])
    return found


def _of_allreduce(report: Report) -> Iterator[Target]:
    times = {(row["way"], row["bytes"]): row["median_us"] for row in report["rows"]}
    sizes = sorted({nbytes for _, nbytes in times})
    ways = {way for way, _ in times}

    def lowest(way: str, peers: set[str], low: int, high: int = 256 * MIB) -> float:
        """How many times faster than the fastest of ``peers``, at the size where that is least."""
        return min(
            min(times[peer, nbytes] for peer in peers) / times[way, nbytes] for nbytes in sizes if low <= nbytes <= high
        )

    mpi, gloo = {way for way in ways if way.startswith("MPI")}, {"Gloo"}
    if 64 * MIB in sizes:
        for way, limit in ((IN_SLOT, 1.1), (ELSEWHERE, 3.0)):
            ratio = times[way, 64 * MIB] / times["memcpy", 64 * MIB]
            yield Target(f"64 MiB, {way}: time / memcpy's", ratio, limit, at_most=True)
    rows = [
        ("hvdlite backend", mpi, 16 * KIB, 3.0),
        (IN_SLOT, mpi, 16 * MIB, 3.0),
        (ELSEWHERE, mpi, 16 * MIB, 1.3),
        (IN_SLOT, mpi, 4 * MIB, 1.0),
        (ELSEWHERE, mpi, 4 * MIB, 1.0),
        (IN_SLOT, gloo, 256 * KIB, 5.0),
        (ELSEWHERE, gloo, 256 * KIB, 2.5),
    ]
    for way, peers, low, limit in rows:
        if way in ways and sizes[-1] >= low:
            against = "Gloo" if peers is gloo else "the fastest MPI"
            from_size = f"{low // MIB} MiB" if low >= MIB else f"{low // KIB} KiB"
            yield Target(f"{way}, from {from_size}: times as fast as {against}", lowest(way, peers, low), limit, False)


def _of_latency(report: Report) -> Iterator[Target]:
    blocking = report["blocking, 4 B"]["hvd.allreduce"]
    yield Target("blocking allreduce of 4 B, us", blocking["median_us"], 80, at_most=True)
    yield Target("the same, 99th percentile, us", blocking["p99_us"], 1000, at_most=True)
    title = next(title for title in report if title.endswith("at once, 4 KiB"))
    ratio = report[title]["Gloo"]["median_us"] / report[title]["hvd.allreduce_async_"]["median_us"]
    yield Target(f"{title}: times as fast as Gloo", ratio, 5.0, at_most=False)


def _of_steps(report: Report) -> Iterator[Target]:
    for found in report["models"]:
        model, ways = found["model"], found["ways"]
        yield Target(f"{model}: exposed / DDP's", found["against_best"]["DDP"]["exposed"]["value"], 0.5, at_most=True)
        mpi = found["against_best"]["simple MPI"]
        if ways[mpi["way"]]["relative"]["value"] > 1.02:
            yield Target(f"{model}: step / the best simple MPI's", mpi["step"]["value"], 1.0, at_most=True)
        if model in COMPUTE_BOUND:
            relative = ways["hvdlite"]["relative"]["value"]
            yield Target(f"{model}: step / without communication", relative, 1.015, at_most=True)


def _of_one_rank(report: Report) -> Iterator[Target]:
    for found in report["models"]:
        limit = 1.10 if found["model"] == "400 tiny parameters" else 1.01
        relative = found["ways"]["hvdlite"]["relative"]["value"]
        yield Target(f"{found['model']}, 1 rank: step / plain torch's", relative, limit, at_most=True)


def _of_overlap(report: Report) -> Iterator[Target]:
    yield Target("2 hosts, 1 Gbit/s: hidden share of communication", report["hidden_share"], 0.85, at_most=False)
