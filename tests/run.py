"""Every test, from a fresh clone: python3 tests/run.py

Makes .venv and .venv-mpich (tools/environment.py), installs hvdlite into them, and runs

  unit     no MPI
  sanitizers  the native code under GCC's sanitizers: its unit tests under AddressSanitizer and UndefinedBehavior-
           Sanitizer, ranks as threads under ThreadSanitizer; skipped where GCC has none; only if asked for by name
  mpi      under mpirun with 1, 2 and 4 ranks on Open MPI and 2, 3 and 4 on MPICH, unless --ranks chooses them; what
           lies above MPI with 1, 2 and 4 ranks on Open MPI and with 3 on MPICH, unless --mpi chooses one; with --mpi
           for it, on Intel MPI too, with 2 and 3, where others run what calls MPI only; and what depends on who starts
           the ranks without MPI
  faults   tests that start mpirun and hvdliterun themselves and kill ranks, on both MPIs and without
  hosts    the same on several emulated hosts; skipped where the machine refuses network namespaces
  examples the programs of examples/, and the benchmarks on little data
  torch_distributed  torch's own tests of backends, over hvdlite: some; with --thorough all, for some ten minutes
  browser  pages that hvdlite writes, in Debian's Chromium, which it installs where it may; skipped where there is none
  docs     programs and commands on the pages, and the site that is built of them; only if asked for by name
  slurm    jobs under a real Slurm of one node, Debian's, likewise
  lint     ruff, mypy, and pyright on a program of a user; only if asked for by name
  integrations  Lightning, Accelerate, transformers and Ray, which it installs; only if asked for by name

Tests that are marked `thorough` take long, and find what others seldom miss; --thorough runs them as well, and every
test with every number of ranks.

The last line is "N passed, N failed, N skipped". Options that are not listed in --help go to pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT / "tools"))

import environment  # noqa: E402 (the line above makes it importable)

# Tests of a suite that run at the same time, on a machine of two cores; those of faults and hosts mostly wait.
AT_ONCE = {"unit": 2, "sanitizers": 2, "faults": 4, "hosts": 3, "examples": 2, "docs": 2}
SUITES = (
    "lint",
    "unit",
    "sanitizers",
    "mpi",
    "faults",
    "hosts",
    "examples",
    "torch_distributed",
    "docs",
    "browser",
    "slurm",
    "integrations",
)
BY_NAME = ("lint", "sanitizers", "docs", "browser", "slurm", "integrations")
# Programs that tests need, and Debian's packages that have them.
DEBIAN = {
    "browser": ("Chromium", ["chromium", "chromedriver"], ["chromium", "chromium-driver", "fonts-dejavu-core"]),
    "slurm": ("Slurm", ["slurmctld", "slurmd", "munged"], ["slurm-wlm", "munge", "libpmix-dev"]),
}
MPI_NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}
RANKS = {"openmpi": (1, 2, 4), "mpich": (2, 3, 4), "intelmpi": (2, 3)}
ALL_RANKS = (1, 2, 3, 4)
USUAL_MPIS = ("openmpi", "mpich")
# Tests of the mpi suite that are run without MPI as well: who takes part, and every operation once.
WITHOUT_MPI = (
    "test_alltoall.py",
    "test_functions.py",
    "test_join.py",
    "test_members.py",
    "test_reducescatter.py",
)
# Those of the mpi suite that Intel MPI runs beside others: how ranks meet, and what calls MPI, on every path.
FOR_INTEL_MPI = (
    "test_allreduce_tensors.py",
    "test_backend_failures.py",
    "test_process.py",
    "test_runtime.py",
    "test_runtime_lifecycle.py",
)
TIME_LIMIT_S = dict.fromkeys(SUITES, 900) | {"lint": 300, "unit": 600, "sanitizers": 600}


@dataclass
class Stage:
    """One command, and what its tests came to."""

    title: str
    command: list[str]
    time_limit_s: float
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    ended_badly: list[str] = field(default_factory=list)
    """Those of the failures that are tests which came to their end."""
    skips: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0
    first_try: list[str] = field(default_factory=list)
    """Failures that did not come again in a second try."""


def main() -> int:
    arguments, for_pytest = parse()
    try:
        pythons = find_pythons(arguments)
    except environment.SetupError as error:
        print(f"\ntests: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the stage that runs is ended with this process
    stages = plan(arguments, for_pytest, pythons)
    status = 0
    done = []
    for number, stage in enumerate(stages, start=1):
        print(f"\n==> [{number}/{len(stages)}] {stage.title}", flush=True)
        done.append(stage)
        try:
            run(stage, arguments.this_python)
            if stage.failures and arguments.second_try and not stage.title.startswith(("lint", "unit", "sanitizers")):
                print(f"\n==> [{number}/{len(stages)}] {stage.title}: a second try", flush=True)
                try_again(stage, arguments.this_python)
        except KeyboardInterrupt:
            stage.failures.append("interrupted")
            status = 130
            break
    return report(done) or status


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    suites = f"of {', '.join(SUITES)}; by default all but {', '.join(BY_NAME)}"
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=suites)
    parser.add_argument(
        "--mpi",
        action="append",
        choices=list(MPI_NAMES),
        help="only on this MPI; may be repeated; Intel MPI by name only",
    )
    parser.add_argument("--ranks", type=numbers, metavar="N,N", help="of the mpi suite")
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests whose names match")
    parser.add_argument(
        "--second-try",
        action="store_true",
        help="run what fails in a stage that starts processes once more, for busy machines; the summary tells",
    )
    parser.add_argument("--thorough", action="store_true", help="also what takes long")
    parser.add_argument(
        "--this-python",
        action="store_true",
        help="make no environment: test with this Python what it imports as hvdlite",
    )
    arguments, for_pytest = parser.parse_known_args()
    unknown = [suite for suite in arguments.suites if suite not in SUITES]
    if unknown:
        parser.error(
            f"no suite {unknown[0]!r}; there are {', '.join(SUITES)} (write pytest's options as --option=value)"
        )
    arguments.suites = arguments.suites or [suite for suite in SUITES if suite not in BY_NAME]
    arguments.mpi = arguments.mpi or list(USUAL_MPIS)
    return arguments, for_pytest + (["-k", arguments.k] if arguments.k else [])


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def find_pythons(arguments: argparse.Namespace) -> dict[str, Path]:
    """The Python of each MPI's environment."""
    if arguments.this_python:
        base = sys.prefix.removesuffix("-mpich").removesuffix("-intelmpi")
        beside = {mpi: Path(f"{base}-{mpi}", "bin", "python") for mpi in MPI_NAMES if mpi != "openmpi"}
        pythons = {"openmpi": Path(base, "bin", "python"), **beside}
        arguments.mpi = [mpi for mpi in arguments.mpi if pythons[mpi].exists()]
        return pythons
    tools = ["dev"] if {"lint", "sanitizers"} & set(arguments.suites) else []
    if "docs" in arguments.suites:
        tools.append("docs")
    if "browser" in arguments.suites:
        tools.append("report")
    for suite in arguments.suites:
        if suite in DEBIAN:
            environment.install_debian(*DEBIAN[suite])
    if "integrations" in arguments.suites:
        tools += ["lightning", "transformers", "ray"]
    pythons = {"openmpi": environment.make(["openmpi", "examples", "benchmarks", "test", *tools])}
    for mpi in arguments.mpi:
        if mpi != "openmpi" and set(arguments.suites) & {"mpi", "faults", "hosts", "slurm"}:
            pythons[mpi] = environment.make_beside(mpi)
    return pythons


def plan(arguments: argparse.Namespace, for_pytest: list[str], pythons: dict[str, Path]) -> list[Stage]:
    python = pythons["openmpi"]

    def pytest(suite: str, python: Path, *left_out: str, files: Sequence[str] = ()) -> list[str]:
        at_once = [f"--numprocesses={AT_ONCE[suite]}"] if suite in AT_ONCE else []
        at_once += ["--dist=loadfile"] if suite == "docs" else []  # the site is built once
        # The script, not python -m pytest: that would put the current directory before the installed hvdlite.
        script = str(pythons["openmpi"].parent / "pytest")
        unwanted = [f"not {mark}" for mark in (*left_out, *([] if arguments.thorough else ["thorough"]))]
        marks = ["-m", " and ".join(unwanted)] if unwanted else []
        options = ["-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
        # Ranks share a directory for temporary ones: none removes what another one removes too. `run` removes it.
        options += ["-o", "tmp_path_retention_count=1000"]
        paths = [str(TESTS / suite / file) for file in files] or [str(TESTS / suite)]
        return [str(python), script, *options, *at_once, *for_pytest, *paths, *marks]

    stages = []
    for suite in (suite for suite in SUITES if suite in arguments.suites):
        limit = TIME_LIMIT_S[suite]
        if suite == "lint":
            stages.append(
                Stage("lint: ruff", [str(python), "-m", "ruff", "check", "--extend-exclude", ".venv*"], limit)
            )
            stages.append(Stage("lint: mypy", [str(python), "-m", "mypy"], limit))
            pyright = [str(python), "-m", "basedpyright", "--pythonpath", str(python), "--level", "error"]
            stages.append(Stage("lint: pyright", [*pyright, str(TESTS / "types")], limit))
        elif suite == "mpi":
            for mpi in arguments.mpi:
                for ranks in arguments.ranks or (ALL_RANKS if arguments.thorough else RANKS[mpi]):
                    launch = [str(pythons[mpi]), "-m", "hvdlite", "run", "--mpi", "-np", str(ranks)]
                    title = f"mpi: {MPI_NAMES[mpi]}, {ranks} rank{'s' if ranks != 1 else ''}"
                    # What lies above MPI runs with every number of ranks, on one MPI each.
                    only = len(arguments.mpi) == 1
                    above = only or (mpi != "intelmpi" and (ranks == 3) == (mpi == "mpich"))
                    files = FOR_INTEL_MPI if mpi == "intelmpi" and not only else ()
                    unmarked = [] if above else ["any_mpi"]
                    unmarked += ["up_to_three_ranks"] if ranks > 3 and not arguments.thorough else []
                    stages.append(Stage(title, [*launch, *pytest(suite, pythons[mpi], *unmarked, files=files)], limit))
            if 2 in (arguments.ranks or ALL_RANKS):
                command = [str(python), "-m", "hvdlite", "run", "-np", "2", *pytest(suite, python, files=WITHOUT_MPI)]
                stages.append(Stage("mpi: without MPI, 2 ranks", command, limit))
        else:
            stages.append(Stage(suite, pytest(suite, python), limit))
    return stages


def run(stage: Stage, keep_python_path: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if keep_python_path or name != "PYTHONPATH"}
    environ["HVDLITE_IDLE_SECONDS"] = "inf"  # a coordinator's look around heals a wake-up that is lost, unseen
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvdlite-tests-") as directory:
        environ["PYTEST_DEBUG_TEMPROOT"] = directory
        outcomes = Path(directory, "outcomes")
        lint = stage.title.startswith("lint")
        command = stage.command + ([] if lint else ["--outcomes", str(outcomes)])
        # In tests/ rather than the root, where python -m hvdlite would run the source tree.
        child = subprocess.Popen(command, cwd=ROOT if lint else TESTS, env=environ, start_new_session=True)
        try:
            status = child.wait(stage.time_limit_s)
        except subprocess.TimeoutExpired:
            stage.failures.append(f"not at its end after {stage.time_limit_s:g} s")
            status = end(child)
        except BaseException:
            end(child)
            raise
        finally:
            stage.elapsed_s = time.monotonic() - start
            read(stage, outcomes)
    if lint:
        stage.counts["failed" if status else "passed"] += 1
        stage.failures += [f"exit status {status}"] * bool(status)
    elif status not in (0, 5) and not stage.counts["failed"]:  # 5: no test was selected
        stage.counts["failed"] = 1
        stage.failures = stage.failures or [f"ended with exit status {status}"]


def try_again(stage: Stage, keep_python_path: bool) -> None:
    """The failed tests of ``stage``, one at a time; all of it where it broke off."""
    second = Stage(stage.title, stage.command, stage.time_limit_s)
    if len(stage.ended_badly) == len(stage.failures):
        kept = [word for word in stage.command if not word.startswith(("--numprocesses", "--dist", str(TESTS)))]
        second.command = kept + [str(ROOT / test) for test in stage.ended_badly]
        stage.counts["failed"] = 0
    else:
        stage.counts.clear()
        stage.skips.clear()
    run(second, keep_python_path)
    stage.first_try, stage.failures = stage.failures, second.failures
    stage.counts += second.counts
    stage.skips += second.skips
    stage.elapsed_s += second.elapsed_s


def end(child: subprocess.Popen[bytes]) -> int:
    """TERM, which `python -m hvdlite run` passes on to all ranks; KILL to what is left of the session."""
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(15)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def read(stage: Stage, outcomes: Path) -> None:
    """Count; a test that started and did not end took the process with it."""
    last: dict[str, tuple[str, str]] = {}
    for line in outcomes.read_text().splitlines() if outcomes.exists() else []:
        entry = json.loads(line)
        last[entry["test"]] = (entry["outcome"], entry["reason"])
    for test, (outcome, reason) in last.items():
        if outcome == "started":
            outcome, reason = "failed", "did not end"
        stage.counts[outcome] += 1
        if outcome == "failed":
            stage.failures.append(f"{test}{f' ({reason})' if reason else ''}")
            stage.ended_badly += [test] * (not reason)
        elif outcome == "skipped":
            stage.skips[reason] += 1


def report(stages: list[Stage]) -> int:
    print("\n==> summary")
    total: Counter[str] = Counter()
    for stage in stages:
        total += stage.counts
        counts = ", ".join(
            f"{stage.counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if stage.counts[outcome]
        )
        print(f"  {stage.title:<28} {counts or 'no tests':<40} {stage.elapsed_s:6.1f} s")
    for stage in stages:
        for reason, count in stage.skips.items():
            print(f"skipped {count} in {stage.title}: {reason}")
    for stage in stages:
        for failure in stage.first_try:
            print(f"failed in the first try of {stage.title}, not counted: {failure}")
    for stage in stages:
        for failure in stage.failures:
            print(f"FAILED in {stage.title}: {failure}")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or any(stage.failures for stage in stages) else 0


if __name__ == "__main__":
    sys.exit(main())
