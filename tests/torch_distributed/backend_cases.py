"""torch's own tests of backends, over one backend: python backend_cases.py [--seconds S] BACKEND RANKS [CASE...]

Prints a line of JSON for every case that `torch.testing._internal.distributed.distributed_test` has, or for those that
are named: {"case", "outcome": "passed" | "failed" | "skipped", "reason", "seconds"}.

The ranks of a case are forked from this process, which has imported torch already and computes nothing. torch starts
a fresh interpreter for each, which takes longer than most cases.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import unittest
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from types import ModuleType
from unittest import mock

# Names that stand for a backend of CPUs wherever torch's module asks which one it tests.
LIKE_GLOO = ("gloo", "hvdlite")


class BackendName(str):
    """The name of a backend, which says that it is Gloo where torch's module compares it.

    Cases are gated by name: `BACKEND != "gloo"`, `BACKEND not in {"nccl", "gloo"}`. Such cases are wanted for every
    backend of CPUs. What is made of the name (`upper()`, `lower()`, `dist.Backend(...)`) is the real one's.
    """

    def __eq__(self, other: object) -> bool:
        return other in LIKE_GLOO

    def __ne__(self, other: object) -> bool:
        return other not in LIKE_GLOO

    def __hash__(self) -> int:
        return hash("gloo")  # found in sets and dicts that name Gloo


def load(backend: str, ranks: int) -> ModuleType:
    """torch's module, gated as for Gloo."""
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(ranks)}
    from torch.testing._internal import common_distributed

    common_distributed.DistTestCases.backend_feature["plugin"].add(backend)
    names = os.environ if backend == "gloo" else {**os.environ, "BACKEND": BackendName(backend)}
    with mock.patch.object(os, "environ", names):
        from torch.testing._internal.distributed import distributed_test
    return distributed_test


def test_class(module: ModuleType) -> type[unittest.TestCase]:
    import torch

    class Forked(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            ranks = self.processes
            super().tearDown()
            for rank in ranks:
                rank.join(5)
                rank.kill()
                rank.join()

    return Forked


class Outcome(unittest.TestResult):
    """Of one case."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome, self.reason = "passed", ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.outcome, self.reason = "skipped", reason

    def addFailure(self, test: unittest.TestCase, error) -> None:  # type: ignore[no-untyped-def]
        self.outcome, self.reason = "failed", said_by(str(error[1]))

    addError = addFailure


def said_by(error: str) -> str:
    """The exception that the first rank to fail raised, of what torch tells about all of them."""
    first = re.split(r"\nProcess \d+ exited with", error)[0]
    raised = [line for line in first.splitlines() if re.match(r"[A-Za-z_.]+(Error|Exception|Timeout)\b.*", line)]
    return (raised[-1] if raised else first.strip().splitlines()[0])[:300]


def run(cases: list[str], tests: type[unittest.TestCase]) -> Iterator[dict[str, object]]:
    for case in cases:
        start, result = time.monotonic(), Outcome()
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            tests(case).run(result)
        seconds = round(time.monotonic() - start, 1)
        yield {"case": case, "outcome": result.outcome, "reason": result.reason, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("ranks", type=int)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--seconds", type=int, default=60, help="after which a case has failed")
    arguments = parser.parse_args()
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(arguments.seconds)
    if arguments.backend == "hvdlite":
        import hvdlite.distributed  # noqa: F401 (registers the backend)
    tests = test_class(load(arguments.backend, arguments.ranks))
    cases = arguments.cases or unittest.defaultTestLoader.getTestCaseNames(tests)
    for outcome in run(cases, tests):
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    sys.exit(main())
