"""All benchmarks, one after the other, and what hvdlite should reach beside what it did.

    python -m benchmarks                       # in the root of the repository; writes benchmarks/results/
    python -m benchmarks allreduce latency     # only these

Takes a quarter of an hour on two cores that have nothing else to do. `overlap` needs root, for emulated hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
HAS_EXTENSION = any((ROOT / "hvdlite" / f"_native{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
if not HAS_EXTENSION:  # hvdlite is installed elsewhere; the sources here, which `-m` puts first, cannot be imported
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
sys.path.insert(0, str(HERE))

from measure import table  # noqa: E402 (the line above makes it importable)
from targets import targets  # noqa: E402

TWO_RANKS = ("-m", "hvdlite", "run", "-np", "2")
TWO_HOSTS = ("across_hosts.py", "--hosts", "2", "--ranks", "1", "--rate", "1gbit")
PROGRAMS: dict[str, tuple[str, ...]] = {
    "allreduce": (*TWO_RANKS, "allreduce.py"),
    "latency": (*TWO_RANKS, "latency.py"),
    "train_step": (*TWO_RANKS, "train_step.py"),
    "one_rank": ("train_step.py", "--threads=1"),
    "overlap": (*TWO_HOSTS, "overlap.py"),
    "scale_model": ("scale_model.py",),
}
SKIPPED = 77  # the exit status of what cannot run here


def run(name: str, directory: Path, options: list[str]) -> bool:
    """Whether it ran; one that cannot run on this machine has said why.

    Raises:
        CalledProcessError: it failed.
    """
    print(f"\n==> {name}", flush=True)
    start = time.monotonic()
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as many threads as cores, in all
    if HAS_EXTENSION:
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, *PROGRAMS[name], f"--json={(directory / name).with_suffix('.json')}", *options]
    status = subprocess.run(command, cwd=HERE, env=environment).returncode
    if status not in (0, SKIPPED):
        raise subprocess.CalledProcessError(status, command)
    print(f"==> {name}: {'skipped' if status else 'done'} in {time.monotonic() - start:.0f} s", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="directory of the reports")
    parser.add_argument("--rounds", type=int, help="of what takes turns; default: each program's own")
    options = parser.parse_args()
    chosen = options.programs or [*PROGRAMS]
    unknown = set(chosen) - PROGRAMS.keys()
    if unknown:
        parser.error(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    options.results.mkdir(parents=True, exist_ok=True)
    reports = {}
    for name in chosen:
        rounds = [f"--rounds={options.rounds}"] if options.rounds and name != "scale_model" else []
        if run(name, options.results.resolve(), rounds):
            reports[name] = json.loads((options.results / f"{name}.json").read_text())
    rows = [target.row() for target in targets(reports)]
    if rows:
        print("\n" + table(["target", "measured", "wanted", "met"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
