"""torch's own tests of backends, over one backend: python backend_cases.py [--seconds S] BACKEND RANKS [CASE...]

Prints a line of JSON for every case that `torch.testing._internal.distributed.distributed_test` has, or for those that
are named: {"case", "outcome": "passed" | "failed" | "skipped", "reason", "seconds"}.

Cases are gated by the name of the backend: `BACKEND != "gloo"`, `BACKEND not in {"nccl", "mpi"}`. Where a case asks for
Gloo, or for MPI, it is wanted for hvdlite too, so torch's module is loaded twice, and a case that is skipped over what
is like Gloo is tried over what is like MPI. What is gated by GPUs or by the number of ranks stays gated.

The ranks of a case are forked from this process, which has imported torch already and computes nothing. torch starts
a fresh interpreter for each, which takes longer than most cases.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO
from unittest import mock

CASES = "torch.testing._internal.distributed.distributed_test"
# Cases with a group of ranks 1 and 2 ask for 8 ranks, of whatever but MPI.
RANKS_OF_GROUPS = 3


class BackendName(str):
    """The name of a backend that says, when it is compared, that it is another one as well.

    What is made of it (`upper()`, `lower()`, `dist.Backend(...)`) is its own.
    """

    like: str

    def __new__(cls, name: str, like: str) -> BackendName:
        self = super().__new__(cls, name)
        self.like = like
        return self

    def __eq__(self, other: object) -> bool:
        return other in (str(self), self.like)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.like)  # found in sets and dicts


def load(backend: str, like: str) -> ModuleType:
    """torch's module, gated as for the backend ``like``."""
    spec = importlib.util.find_spec(CASES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(os, "environ", {**os.environ, "BACKEND": BackendName(backend, like)}):
        spec.loader.exec_module(module)
    for supported in (module.PROFILING_SUPPORTED_BACKENDS, module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        supported.append(backend)  # cases look at what profilers show of those that are listed
    return module


def forked(module: ModuleType) -> type[unittest.TestCase]:
    import torch

    class Forked(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            sys.modules[CASES] = module  # where ranks look for the classes of what they unpickle
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


def run(case: str, kinds: list[type[unittest.TestCase]]) -> Outcome:
    """Of the first of ``kinds`` over which ``case`` is not skipped; else of the first."""
    outcomes = []
    for tests in kinds:
        outcomes.append(Outcome())
        tests(case).run(outcomes[-1])
        if outcomes[-1].outcome != "skipped":
            return outcomes[-1]
    return outcomes[0]


def outcomes_of(backend: str, cases: list[str]) -> Iterator[dict[str, object]]:
    from torch.testing._internal import common_distributed

    common_distributed.DistTestCases.backend_feature["plugin"].add(backend)  # which may be asked for by name
    kinds = [forked(load(backend, like)) for like in (["gloo"] if backend == "gloo" else ["gloo", "mpi"])]
    for case in cases or unittest.defaultTestLoader.getTestCaseNames(kinds[0]):
        start = time.monotonic()
        found = run(case, kinds)
        seconds = round(time.monotonic() - start, 1)
        yield {"case": case, "outcome": found.outcome, "reason": found.reason, "seconds": seconds}


def results_only() -> IO[str]:
    """The stdout of this process, to which no rank writes from now on: what they say goes to stderr."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("ranks", type=int)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--seconds", type=int, default=60, help="after which a case has failed (default: %(default)s)")
    arguments = parser.parse_args()
    results = results_only()
    with tempfile.TemporaryDirectory(prefix="hvdlite-cases-") as directory:
        os.environ |= {
            "WORLD_SIZE": str(arguments.ranks),
            "BACKEND": "mpi" if arguments.ranks >= RANKS_OF_GROUPS else arguments.backend,
            "INIT_METHOD": f"file://{Path(directory, 'meeting')}",  # without it test_barrier_timeout_global is skipped
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(arguments.seconds),
        }
        if arguments.backend == "hvdlite":
            import hvdlite.distributed  # noqa: F401 (registers the backend)
        for outcome in outcomes_of(arguments.backend, arguments.cases):
            print(json.dumps(outcome), file=results)


if __name__ == "__main__":
    sys.exit(main())
