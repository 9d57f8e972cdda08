"""The table of torch's own cases that do not pass: python tests/torch_distributed/table.py [--only BACKEND]

Runs all of them over Gloo and over hvdlite with 2, 3 and 4 ranks, for some ten minutes, and writes outcomes.json, which
tests compare with, and docs/torch-distributed-cases.md, which people read. With --only the other backend's stay.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUTCOMES = HERE / "outcomes.json"
PAGE = ROOT / "docs" / "torch-distributed-cases.md"
RANKS = (2, 3, 4)
BACKENDS = ("gloo", "hvdlite")
# Why a case does not pass over hvdlite that passes over Gloo. There must be a line for each such case.
EXPLAINED: dict[str, str] = {}


@dataclass(frozen=True)
class Outcome:
    outcome: str
    reason: str

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}"

    @classmethod
    def parse(cls, text: str) -> Outcome:
        outcome, _, reason = text.partition(": ")
        return cls(outcome, reason)


def run(backend: str, ranks: int, cases: Sequence[str] = (), limit_s: float = 900) -> dict[str, Outcome]:
    """What became of ``cases``, by default of all."""
    command = [sys.executable, str(HERE / "backend_cases.py"), backend, str(ranks), *cases]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen(command, env=environ, text=True, start_new_session=True, **pipes)
    try:
        said, errors = child.communicate(timeout=limit_s)
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)  # and the ranks of the case that takes so long
            child.communicate()
    assert child.returncode == 0, errors
    found = [json.loads(line) for line in said.splitlines()]
    return {each["case"]: Outcome(each["outcome"], each["reason"]) for each in found}


def torch_release() -> str:
    """Cases come and go with it."""
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


@dataclass
class Table:
    """What became of the cases, by number of ranks and backend; those that are not named in ``not_passed`` pass."""

    torch: str
    cases: dict[str, int]
    not_passed: dict[str, dict[str, dict[str, Outcome]]]

    @classmethod
    def read(cls) -> Table:
        table = json.loads(OUTCOMES.read_text())
        not_passed = {
            ranks: {
                backend: {case: Outcome.parse(text) for case, text in found.items()}
                for backend, found in backends.items()
            }
            for ranks, backends in table["not passed"].items()
        }
        return cls(table["torch"], table["cases"], not_passed)

    def write(self) -> None:
        not_passed = {
            ranks: {backend: {case: str(each) for case, each in found.items()} for backend, found in backends.items()}
            for ranks, backends in self.not_passed.items()
        }
        table = {"torch": self.torch, "cases": self.cases, "not passed": not_passed}
        OUTCOMES.write_text(json.dumps(table, indent=1) + "\n")

    def lost(self) -> set[str]:
        """Cases that pass over Gloo with some number of ranks, and not over hvdlite."""
        return {case for found in self.not_passed.values() for case in found["hvdlite"].keys() - found["gloo"].keys()}

    def gained(self) -> int:
        """How many cases pass over hvdlite and not over Gloo, with any number of ranks."""
        return len(
            {case for found in self.not_passed.values() for case in found["gloo"].keys() - found["hvdlite"].keys()}
        )


def page(table: Table) -> str:
    lost = table.lost()
    counts = [
        f"| {ranks} | {table.cases[ranks] - len(found['gloo'])} | {table.cases[ranks] - len(found['hvdlite'])} "
        f"| {table.cases[ranks]} |"
        for ranks, found in table.not_passed.items()
    ]
    differ = [f"| `{case}` | {EXPLAINED[case]} |" for case in sorted(lost)]
    with_ranks: dict[tuple[str, Outcome], list[str]] = defaultdict(list)
    for ranks, backends in table.not_passed.items():
        for case, found in backends["hvdlite"].items():
            if case not in lost:
                with_ranks[case, found].append(ranks)
    alike: dict[tuple[Outcome, str], list[str]] = defaultdict(list)
    for (case, found), numbers in with_ranks.items():
        alike[found, ", ".join(numbers)].append(case)
    rows = [
        f"| {found} | {ranks} | {', '.join(f'`{case}`' for case in cases)} |"
        for (found, ranks), cases in sorted(alike.items(), key=lambda each: (each[0][0].outcome, -len(each[1])))
    ]
    return "\n".join(
        [
            "# torch's own tests of backends",
            "",
            f"torch {table.torch} has tests of backends, `torch.testing._internal.distributed.distributed_test`.",
            "What follows is what became of them; `python tests/torch_distributed/table.py` writes this page. Many are",
            "gated by the name of the backend: a case that asks for Gloo or for MPI runs over hvdlite too, and a case",
            "with a group of ranks 1 and 2 runs with 3 and 4 ranks, where torch asks for 8. GPUs stay GPUs.",
            f"{table.gained()} cases that are skipped or fail over Gloo pass over hvdlite.",
            "",
            "| ranks | pass over Gloo | pass over hvdlite | cases |",
            "|---|---|---|---|",
            *counts,
            "",
            "## Pass over Gloo, not over hvdlite",
            "",
            *(["| case | why |", "|---|---|", *differ] if differ else ["None."]),
            "",
            "## Pass over neither",
            "",
            "| why | ranks | cases |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def measure(backends: Sequence[str], before: Table | None) -> Table:
    """``before``: where what is not measured comes from."""
    table = Table(torch_release(), {}, {})
    for ranks in map(str, RANKS):
        table.not_passed[ranks] = {} if before is None else dict(before.not_passed[ranks])
        for backend in backends:
            found = run(backend, int(ranks))
            table.cases[ranks] = len(found)
            table.not_passed[ranks][backend] = {case: each for case, each in found.items() if each.outcome != "passed"}
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BACKENDS, help="leave the other backend's outcomes as they are")
    only = parser.parse_args().only
    table = measure([only], Table.read()) if only else measure(BACKENDS, None)
    table.write()
    if unexplained := table.lost() - EXPLAINED.keys():
        print(f"EXPLAINED lacks {', '.join(sorted(unexplained))}; see {OUTCOMES}", file=sys.stderr)
        return 1
    PAGE.write_text(page(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
