"""What the benchmarks share: a start that is fair to all, medians over the slowest rank, tables, and provenance."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import hvdlite
from hvdlite import _native
from hvdlite.config import TOLD

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_RESAMPLES = 2000
_PACKAGES = ("hvdlite", "numpy", "mpi4py", "torch")
_SETTINGS = (
    *("HVDLITE_", "HOROVOD_", "OMP_", "MKL_", "GLOO_", "TORCH_", "MPICH_", "UCX_"),
    *(f"OMPI_MCA_{framework}_" for framework in ("btl", "coll", "mpi", "pml", "smsc")),
)


def meet(comm: MPI.Comm | None, nap_s: float = 20e-6) -> None:
    """A barrier in which waiting ranks sleep, so that no spinning rank takes a core from one that is still working.

    Here and below a communicator may be None: one rank, without MPI.
    """
    if comm is None:
        return
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(nap_s)


def in_turns(ways: Sequence[T], rounds: int) -> Iterator[T]:
    """Each of ``ways`` once per round, in an order of its own in every round, which is the same on all ranks.

    What disturbs the machine for a while disturbs all, and nobody always comes after the same one.
    """
    for turn in range(rounds):
        yield from random.Random(turn).sample(ways, len(ways))


def keep_collector_out() -> None:
    """Python's garbage collector shall leave alone what was imported: torch's modules cost it 150 ms each time."""
    gc.collect()
    gc.freeze()


def slowest(comm: MPI.Comm | None, seconds: Sequence[float] | Sequence[Sequence[float]]) -> np.ndarray:
    """The time of the slowest rank, for each of many measurements: a collective is done when the last rank is."""
    worst = np.array(seconds, dtype=np.float64)
    if comm is None:
        return worst
    from mpi4py import MPI

    comm.Allreduce(MPI.IN_PLACE, worst, MPI.MAX)
    return worst


def summary(seconds: np.ndarray) -> tuple[float, float]:
    """(median, 95th percentile)."""
    return float(np.median(seconds)), float(np.quantile(seconds, 0.95))


def estimate(statistic: Callable[..., np.ndarray], *columns: np.ndarray) -> dict[str, float]:
    """``statistic`` of what was measured in pairs, with the 95 % interval that resampling the rounds gives (bootstrap).

    Args:
        statistic: takes arrays (..., rounds), one for each column, and returns (...).
        columns: (rounds,) each.
    """
    rounds = len(columns[0])
    picks = np.random.default_rng(0).integers(rounds, size=(_RESAMPLES, rounds))
    low, high = np.quantile(statistic(*(column[picks] for column in columns)), [0.025, 0.975])
    return {"value": float(statistic(*columns)), "low": float(low), "high": float(high)}


def median_ratio(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """A statistic for `estimate`: of ratios within a round, which what disturbs a machine for longer leaves alone."""
    return np.median(some / others, axis=-1)


def median_difference(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """A statistic for `estimate`."""
    return np.median(some - others, axis=-1)


def show(found: dict[str, float], digits: int) -> str:
    """An `estimate`, with its interval."""
    return f"{found['value']:.{digits}f} ({found['low']:.{digits}f}, {found['high']:.{digits}f})"


def provenance(comm: MPI.Comm | None, nodes: int) -> dict[str, Any]:
    """Everything that somebody needs to judge and repeat a run; neither hostnames nor paths."""
    versions = {"python": platform.python_version()}
    if comm is not None:
        from mpi4py import MPI

        versions["mpi"] = _mpi_version(MPI.Get_library_version())
    ranks = 1 if comm is None else comm.size
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": f"mpirun -np {ranks} python {_script()}",
        "ranks": ranks,
        "nodes": nodes,
        "machine": {
            "processor": _processor(),
            "instruction_set": _native.instruction_set(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
            "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": versions,
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_SETTINGS) and name not in TOLD and "/" not in value
        },
    }


def _mpi_version(text: str) -> str:
    return " ".join(text.replace("\0", "").replace("Version:", "").split("\n")[0].split(",")[0].split())


def _script() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())


def size(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def describe(facts: dict[str, Any]) -> str:
    """The provenance in two lines, to print above a table."""
    machine, versions = facts["machine"], facts["versions"]
    return (
        f"{facts['command']}\n{facts['ranks']} ranks on {facts['nodes']} node(s) of {machine['cores']} cores, "
        f"{machine['processor']} ({machine['instruction_set']}), load before {machine['load_before']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )


def parser_for(description: str | None, rounds: int | None = None, of: str = "each way") -> argparse.ArgumentParser:
    """Of a benchmark: with ``--json``, and with ``--rounds`` of blocks where ``rounds`` is their default number."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"blocks of {of} (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all figures, with machine, versions and command, to FILE")
    return parser


def begin() -> tuple[MPI.Comm, dict[str, Any]]:
    """Start hvdlite on all ranks: a communicator of them, and the provenance."""
    import hvdlite.torch as hvd

    hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    keep_collector_out()
    return comm, provenance(comm, len(hvdlite.runtime().topology.nodes))


def write_json(path: str | None, report: dict[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
