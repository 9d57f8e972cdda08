"""For all tests: where hvdlite comes from, `launch`, and the outcomes that tests/run.py counts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--outcomes",
        metavar="FILE",
        help="append a line of JSON when a test starts and when it ends: a test that ends the process is seen by what lacks",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path and _rank() == 0:
        config.pluginmanager.register(_Outcomes(Path(path).open("a", buffering=1)), "hvdlite-outcomes")


def pytest_report_header(config: pytest.Config) -> str:
    import hvdlite

    return f"hvdlite: {Path(hvdlite.__file__).parent}"


@pytest.fixture
def launch() -> Callable[..., object]:
    """`launching.launch`: run a script under mpirun; for tests that do not run under mpirun themselves."""
    from launching import launch

    return launch


def _rank() -> int:
    """This process's rank where mpirun started it, before MPI is initialised."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


class _Outcomes:
    """Writes what happened, at once, so that it survives the end of the process."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._outcome = ("passed", "")

    def _write(self, test: str, outcome: str, reason: str = "") -> None:
        self._file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome = ("passed", "")
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome = ("failed", "")
        elif report.skipped and self._outcome[0] == "passed" and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._outcome = ("skipped", reason.removeprefix("Skipped: "))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid, *self._outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", "collection failed")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._write(report.nodeid, "skipped", reason.removeprefix("Skipped: "))

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        yield
        self._file.flush()
