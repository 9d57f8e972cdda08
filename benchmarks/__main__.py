"""All benchmarks, one after the other, and what hvdlite should reach beside what it did.

    python -m benchmarks                       # in the root of the repository; writes benchmarks/results/
    python -m benchmarks allreduce latency     # only these
    python -m benchmarks --readme              # none: plots, and tables of READMEs and docs, of what is there

Takes half an hour on two cores that have nothing else to do. What goes across emulated hosts needs root; what
is measured with MPICH or Intel MPI, an environment that has it beside hvdlite (tests/run.py makes them); plots,
matplotlib; what begins with gpu, a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from figures import lines  # noqa: E402 (the line above makes it importable)
from measure import table  # noqa: E402
from pages import (  # noqa: E402
    allreduce_table,
    collectives_table,
    operations_table,
    refresh,
    split_table,
    steps_table,
    targets_table,
)
from targets import targets  # noqa: E402

SKIPPED = 77  # the exit status of what cannot run here


@dataclass(frozen=True)
class Program:
    """Arguments of Python.

    Attributes:
        takes_turns: whether it has --rounds.
        mpi: whose environment it needs, of `MPIS`; "" is this one.
    """

    arguments: tuple[str, ...]
    takes_turns: bool = True
    mpi: str = ""


def on_ranks(ranks: int, *program: str) -> tuple[str, ...]:
    return ("-m", "hvdlite", "run", "--mpi", "-np", str(ranks), *program)


def across(hosts: int, ranks: int, *program: str) -> tuple[str, ...]:
    return ("across_hosts.py", f"--hosts={hosts}", f"--ranks={ranks}", "--rate=1gbit", *program)


LARGE = ("allreduce.py", "--bytes", "67108864", "--rounds=4", "--calls=1", "--link-gbit=1", "--ways")
SMALL = ("allreduce.py", "--bytes", "4", "16", "64", "256", "1024", "4096", "--rounds=10", "--ways")
OWN = ("hvdlite backend", "hvd, in its slot", "hvd, elsewhere")
FROM_16_KIB = [str(1 << shift) for shift in (14, 15, *range(16, 29, 2))]
FROM_4_B = [str(1 << shift) for shift in range(2, 29, 2)]
CROWDED = ("allreduce.py", "--bytes", "4", "4096", "65536", "1048576", "--rounds=10", "--ways")
MPIS = {"mpich": "MPICH", "intelmpi": "Intel MPI"}
PROGRAMS = {
    "allreduce": Program(on_ranks(2, "allreduce.py")),
    "allreduce_mpich": Program(
        on_ranks(2, "allreduce.py", "--bytes", *FROM_16_KIB, "--ways", "memcpy", *OWN, "MPI", "MPI, pieces"),
        mpi="mpich",
    ),
    "allreduce_intelmpi": Program(
        on_ranks(2, "allreduce.py", "--bytes", *FROM_4_B, "--ways", "memcpy", *OWN, "MPI", "MPI, pieces"),
        mpi="intelmpi",
    ),
    "allreduce_8": Program(on_ranks(8, *CROWDED, *OWN, "MPI")),
    "slot": Program(on_ranks(4, "slot.py")),
    "latency": Program(on_ranks(2, "latency.py")),
    "operations": Program(on_ranks(2, "operations.py")),
    "operations_hosts": Program(across(2, 1, "operations.py", "--bytes", "4", "4096", "65536", str(1 << 20))),
    "train_step": Program(on_ranks(2, "train_step.py")),
    "one_rank": Program(("train_step.py", "--threads=1", "--seconds=10")),
    "timeline_cost": Program(on_ranks(2, "timeline_cost.py")),
    "checks_cost": Program(on_ranks(2, "checks_cost.py")),
    "recovery": Program(("recovery.py",)),
    "recovery_mpich": Program(("recovery.py",), mpi="mpich"),
    "links_examined": Program(("links_examined.py",)),
    "costs": Program(on_ranks(2, "costs.py"), takes_turns=False),
    "costs_hosts": Program(across(2, 1, "costs.py", "--what", "idle", "waiting"), takes_turns=False),
    "hosts_2x2": Program(across(2, 2, *LARGE, "TCP", *OWN, "MPI", "MPI, pieces", "Gloo")),
    "hosts_4x1": Program(across(4, 1, *LARGE, "TCP", *OWN, "MPI", "MPI, pieces", "Gloo")),
    "hosts_small": Program(across(4, 1, *SMALL, *OWN, "MPI", "Gloo")),
    "overlap": Program(across(2, 1, "overlap.py")),
    "tensor_parallel": Program(on_ranks(2, "tensor_parallel.py")),
    "tensor_parallel_layer": Program(on_ranks(2, "tensor_parallel_layer.py")),
    "torch_distributed": Program(on_ranks(2, "torch_distributed.py")),
    "torch_distributed_4": Program(on_ranks(4, "torch_distributed.py")),
    "scale_model": Program(("scale_model.py",), takes_turns=False),
    "gpu": Program(("gpu.py", "pack", "step")),
    "gpu_node_2": Program(on_ranks(2, "gpu.py", "node")),
    "gpu_node_4": Program(on_ranks(4, "gpu.py", "node")),
    "gpu_hidden": Program(on_ranks(2, "gpu.py", "hidden")),
    "gpu_nccl": Program(on_ranks(2, "gpu.py", "nccl")),
}


def run(name: str, directory: Path, rounds: int | None, pythons: dict[str, Path]) -> int:
    """The exit status; `SKIPPED` of one that cannot run on this machine, which has said why."""
    program = PROGRAMS[name]
    print(f"\n==> {name}", flush=True)
    python = pythons[program.mpi]
    if not python.exists():
        print(f"==> {name}: skipped: there is no {python}; --{program.mpi}-python names another", flush=True)
        return SKIPPED
    start = time.monotonic()
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as many threads as cores, in all
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    report = os.path.relpath(directory / f"{name}.json", HERE)  # it ends up in the report, as part of the command
    command = [str(python), *program.arguments, f"--json={report}"]
    if program.takes_turns and rounds is not None:
        command.append(f"--rounds={rounds}")
    status = subprocess.run(command, cwd=HERE, env=environment).returncode
    ended = {0: "done", SKIPPED: "skipped"}.get(status, f"failed with exit status {status}")
    print(f"==> {name}: {ended} in {time.monotonic() - start:.0f} s", flush=True)
    return status


def draw(results: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed (pip install hvdlite[benchmarks])")
        return
    from plots import draw_all

    for path in draw_all(results):
        print(f"drawn: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="directory of the reports")
    parser.add_argument("--rounds", type=int, help="of what takes turns; default: each program's own")
    for mpi, said in MPIS.items():
        python = ROOT / f".venv-{mpi}" / "bin" / "python"
        parser.add_argument(
            f"--{mpi}-python", type=Path, default=python, help=f"of an environment with {said} and hvdlite"
        )
    parser.add_argument("--readme", action="store_true", help="run nothing; refresh plots and tables of pages")
    options = parser.parse_args()
    unknown = {*options.programs} - PROGRAMS.keys()
    if unknown:
        parser.error(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    options.results.mkdir(parents=True, exist_ok=True)
    results, start = options.results.resolve(), time.monotonic()
    chosen = options.programs or [*PROGRAMS]
    if options.readme:
        status = {name: 0 for name in chosen if (results / f"{name}.json").exists()}
    else:
        pythons = {mpi: getattr(options, f"{mpi}_python").absolute() for mpi in MPIS} | {"": Path(sys.executable)}
        status = {name: run(name, results, options.rounds, pythons) for name in chosen}
    done = [name for name in status if status[name] == 0]
    failed = [name for name in status if status[name] not in (0, SKIPPED)]
    reports = {name: json.loads((results / f"{name}.json").read_text()) for name in done}
    found = targets(reports)
    shown = [target for target in found if target.figures or not options.programs]
    print("\n" + table(["target", "measured", "wanted", "met"], lines(shown)))
    draw(results)
    if options.readme:
        refresh(HERE / "README.md", "targets", targets_table(found))
        performance = {
            "allreduce": allreduce_table,
            "operations": operations_table,
            "operations_hosts": operations_table,
            "train_step": steps_table,
        }
        for name, fill in performance.items():
            if name in reports:
                refresh(ROOT / "docs" / "performance.md", name, fill(reports[name]))
        for name in ("tensor_parallel", "tensor_parallel_layer"):
            if name in reports:
                refresh(ROOT / "docs" / "tensor_parallel.md", name, split_table(reports[name]))
        for name in ("torch_distributed", "torch_distributed_4"):
            if name in reports:
                refresh(ROOT / "docs" / "torch-distributed.md", name, collectives_table(reports[name]))
    print(f"{len(done)} programs in {time.monotonic() - start:.0f} s" + "".join(f"; {name} failed" for name in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
