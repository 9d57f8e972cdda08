"""For all tests: where hvdlite comes from, `launch`, and the outcomes that tests/run.py counts."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.pop("PYTHONUNBUFFERED", None)  # print writes words and ends of lines apart then, and ranks' lines mingle


gc.disable()  # until all tests are collected, each of which would be looked at again and again


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--outcomes",
        metavar="FILE",
        help="append a line of JSON when a test starts and one when it ends, so that one that ends the process is seen",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path and _rank() == 0 and not hasattr(config, "workerinput"):  # pytest-xdist's workers tell the first process
        config.pluginmanager.register(_Outcomes(Path(path)), "hvdlite-outcomes")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported: tests that collect what they leave would look through torch each time
    gc.enable()


def pytest_report_header(config: pytest.Config) -> str:
    import hvdlite

    return f"hvdlite: {Path(hvdlite.__file__).parent}"


@pytest.fixture
def launch() -> Callable[..., object]:
    """`launching.launch`: run a script under mpirun; for tests that do not run under mpirun themselves."""
    from launching import launch

    return launch


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> str:
    """Each MPI in turn, for `launch` and `Lab.launch`; skips where there is no environment with it."""
    from launching import python_of

    name: str = request.param
    python_of(name)
    return name


def _rank() -> int:
    """This process's rank where mpirun or hvdliterun started it, before MPI is initialised."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HVDLITE_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


class _Outcomes:
    """Writes what happened, at once, so that it survives the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, tuple[str, str]] = {}  # of tests that run now

    def _write(self, test: str, outcome: str, reason: str = "") -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcomes[nodeid] = ("passed", "")
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = ("failed", "")
        elif report.skipped and self._outcomes[report.nodeid][0] == "passed" and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._outcomes[report.nodeid] = ("skipped", reason.removeprefix("Skipped: "))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid, *self._outcomes.pop(nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", "collection failed")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._write(report.nodeid, "skipped", reason.removeprefix("Skipped: "))
