"""The table of torch's own cases that do not pass: python tests/torch_distributed/table.py

Runs all of them over Gloo and over hvdlite with 2, 3 and 4 ranks, for some ten minutes, and writes outcomes.json, which
tests compare with, and docs/torch-distributed-cases.md, which people read.
"""

from __future__ import annotations

import json
import os
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
# Why a case does not pass over hvdlite that passes over Gloo. There must be a line for each such case.
EXPLAINED: dict[str, str] = {}


@dataclass(frozen=True)
class Outcome:
    outcome: str
    reason: str


def run(backend: str, ranks: int, cases: Sequence[str] = (), limit_s: float = 900) -> dict[str, Outcome]:
    """What became of ``cases``, by default of all."""
    command = [sys.executable, str(HERE / "backend_cases.py"), backend, str(ranks), *cases]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["case"]: Outcome(each["outcome"], each["reason"]) for each in found}


def torch_release() -> str:
    """Cases come and go with it."""
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


def read() -> dict[str, dict[str, Outcome]]:
    """By number of ranks, the cases that do not pass over hvdlite.

    Raises:
        ValueError: the table is of another torch.
    """
    table = json.loads(OUTCOMES.read_text())
    if table["torch"] != torch_release():
        raise ValueError(f"the table of cases is of torch {table['torch']}")
    return {
        ranks: {case: Outcome(*found["hvdlite"]) for case, found in cases.items()}
        for ranks, cases in table["not passed"].items()
    }


def lost(table: dict[str, object]) -> set[str]:
    """Cases that pass over Gloo, and not over hvdlite."""
    every = table["not passed"]
    assert isinstance(every, dict)
    return {case for cases in every.values() for case, found in cases.items() if found["gloo"][0] == "passed"}


def page(table: dict[str, object]) -> str:
    every, passed = table["not passed"], table["passed"]
    assert isinstance(every, dict) and isinstance(passed, dict)
    counts = [f"| {ranks} | {n['gloo']} | {n['hvdlite']} | {n['cases']} |" for ranks, n in passed.items()]
    differ = [f"| `{case}` | {EXPLAINED[case]} |" for case in sorted(lost(table))]
    grouped: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    by_case: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for ranks, cases in every.items():
        for case, found in cases.items():
            if case not in lost(table):
                by_case[(case, *found["hvdlite"])].append(ranks)
    for (case, outcome, reason), ranks in by_case.items():
        grouped[outcome, reason, ", ".join(ranks)].append(case)
    rows = [
        f"| {outcome}: {reason.replace('|', '/')} | {ranks} | {', '.join(f'`{case}`' for case in cases)} |"
        for (outcome, reason, ranks), cases in sorted(grouped.items())
    ]
    return "\n".join(
        [
            "# torch's own tests of backends",
            "",
            f"torch {table['torch']} has tests of backends, `torch.testing._internal.distributed.distributed_test`.",
            "What follows is what became of them; `python tests/torch_distributed/table.py` writes this page. Many are",
            "gated by the name of the backend: a case that asks for Gloo or for MPI runs over hvdlite too, and a case",
            "with a group of ranks 1 and 2 runs with 3 and 4 ranks, where torch asks for 8. GPUs stay GPUs.",
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


def measure() -> dict[str, object]:
    passed, not_passed = {}, {}
    for ranks in RANKS:
        gloo, own = run("gloo", ranks), run("hvdlite", ranks)
        count = {"gloo": gloo, "hvdlite": own}
        passed[str(ranks)] = {
            **{name: sum(each.outcome == "passed" for each in found.values()) for name, found in count.items()},
            "cases": len(own),
        }
        not_passed[str(ranks)] = {
            case: {"hvdlite": [found.outcome, found.reason], "gloo": [gloo[case].outcome, gloo[case].reason]}
            for case, found in own.items()
            if found.outcome != "passed"
        }
    return {"torch": torch_release(), "passed": passed, "not passed": not_passed}


def main() -> int:
    table = measure()
    OUTCOMES.write_text(json.dumps(table, indent=1) + "\n")
    unexplained = lost(table) - EXPLAINED.keys()
    if unexplained:
        print(f"EXPLAINED lacks {', '.join(sorted(unexplained))}; see {OUTCOMES}", file=sys.stderr)
        return 1
    PAGE.write_text(page(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
