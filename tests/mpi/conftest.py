"""pytest on several ranks: all run the same tests in the same order, and one rank's failure fails the test on all.

After the parts of each test the ranks exchange how it went. Rank 0 reports; the others print failures only. A test that
passes its time limit ends the run: every rank dumps the stacks of all its threads, from C, so that a thread that never
lets go of the GIL does not prevent it; then SIGALRM, which needs no Python either, ends the rank, and the launcher the
rest.

Under mpirun MPI runs from the start. Under hvdliterun without MPI only tests that do not use mpi4py can run.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness_ranks import harness_ranks
from hvdlite import _native

if TYPE_CHECKING:
    from mpi4py import MPI

WORLD = harness_ranks()
TIME_LIMIT_S = 120.0
GRACE_S = 20.0  # how long ranks may take to come to the end of a test that another rank failed already
DUMP_S = 3.0  # from the dump of stacks to the end, so that all ranks get to dump
EXIT_LIMIT_S = 30.0

PASSED, SKIPPED, FAILED = 0, 1, 2

# A torch for GPUs brings NCCL along, which the simulated driver is none for; nccl_lab.py has one that it is.
_native.use_nccl_library("/nowhere/libnccl.so.2")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-limit", type=float, default=TIME_LIMIT_S, metavar="S", help="of tests without a mark of their own"
    )


@pytest.hookimpl(trylast=True)  # after the terminal's
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"time_limit(seconds): longest that the test may take, {TIME_LIMIT_S:g} s by default"
    )
    config.addinivalue_line("markers", "any_mpi: of what lies above MPI, so that one MPI is as good as another")
    config.addinivalue_line("markers", "not_with_one_rank: one finds nothing there that two do not; left out with one")
    config.addinivalue_line(
        "markers", "up_to_three_ranks: four find nothing there that three do not; left out with four"
    )
    config.addinivalue_line(
        "markers", "not_with_three_ranks: three find nothing there that two, or four, do not; left out with three"
    )
    # pytest removes temporary directories of earlier runs. If several ranks remove the same ones, it warns, which is an
    # error here, of an "unclosed scandir iterator" too.
    common = os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()
    own = Path(common, f"hvdlite-{os.getuid()}-rank{WORLD.rank}")
    own.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(own)
    config.stash[_RANKS] = _Ranks()
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if WORLD.rank != 0 and reporter is not None:
        config.pluginmanager.unregister(reporter)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what measures how little a process does: simulated GPUs leave threads behind that look for work."""
    items.sort(key=lambda item: item.path.name != "test_idle.py")


class _Ranks:
    """What one rank needs to agree with the others, and to speak when it must."""

    def __init__(self) -> None:
        # What dumps stacks writes from C and knows of no rank, so a process of its own marks the lines, and leaves out
        # pytest's own frames, which come last. Capturing is suspended now: this is the real stderr.
        edit = ["-e", r'/^  File ".*\/\(_pytest\/\|pluggy\/\|bin\/pytest"\)/d', "-e", f"s/^/[rank {WORLD.rank}] /"]
        marker = subprocess.Popen(["sed", "-u", *edit], stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        assert marker.stdin is not None
        self._marker, self._stderr = marker, marker.stdin
        faulthandler.register(signal.SIGUSR1, file=self._stderr, all_threads=True)
        self._pids: list[int] = WORLD.allgather(os.getpid())

    def say(self, text: str) -> None:
        self._stderr.write((text.rstrip("\n") + "\n").encode())
        self._stderr.flush()

    def arm(self, limit_s: float) -> None:
        """Dump stacks after ``limit_s``, one rank after the other, and end shortly after."""
        faulthandler.dump_traceback_later(limit_s + 0.2 * WORLD.rank, file=self._stderr)
        signal.setitimer(signal.ITIMER_REAL, limit_s + 0.2 * WORLD.size + DUMP_S)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def exchange(self, value: int, failed: bool = False) -> list[int]:
        """Everybody's ``value``. A rank that has ``failed`` ends the run if the others do not come within `GRACE_S`."""
        try:
            return WORLD.exchange(value, GRACE_S if failed else math.inf)
        except TimeoutError:
            self._give_up()
            raise

    def _give_up(self) -> None:
        self.say(f"the other ranks have not ended this test {GRACE_S:g} s after the failure here; their stacks follow")
        for rank, pid in enumerate(self._pids):
            if rank != WORLD.rank:
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.2)
        time.sleep(1)
        WORLD.abort()


_RANKS = pytest.StashKey[_Ranks]()


def pytest_collection_finish(session: pytest.Session) -> None:
    names = "\n".join(item.nodeid for item in session.items) + f"\n{session.testsfailed}"
    if len(set(session.config.stash[_RANKS].exchange(zlib.crc32(names.encode())))) > 1:
        session.config.stash[_RANKS].say(f"collected {len(session.items)} tests, {session.testsfailed} errors")
        pytest.exit("the ranks did not collect the same tests", returncode=3)


@pytest.hookimpl(tryfirst=True)  # before the fixtures; after pytest's own timer, of which there is one for both
def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("time_limit")
    item.config.stash[_RANKS].arm(marker.args[0] if marker else item.config.getoption("--time-limit"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    try:
        return (yield)
    finally:
        item.config.stash[_RANKS].disarm()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # A test ends with its call, or with a setup that did not pass; and its teardown once more.
    if report.when != "setup" or not report.passed:
        _agree(item, report)
    return report


def _agree(item: pytest.Item, report: pytest.TestReport) -> None:
    ranks = item.config.stash[_RANKS]
    if report.failed and WORLD.size > 1:
        sections = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections)
        ranks.say(f"{item.nodeid}, {report.when}: failed\n{report.longreprtext}{sections}")
    outcome = FAILED if report.failed else SKIPPED if report.skipped else PASSED
    outcomes = ranks.exchange(outcome, failed=report.failed)
    if report.failed or len(set(outcomes)) == 1:
        return
    failed = [rank for rank, other in enumerate(outcomes) if other == FAILED]
    skipped = [rank for rank, other in enumerate(outcomes) if other == SKIPPED]
    report.outcome = "failed"
    report.longrepr = (
        f"failed on rank {', '.join(map(str, failed))}; see its output above"
        if failed
        else f"skipped on rank {', '.join(map(str, skipped))} only; a skip must not depend on the rank"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    ranks = session.config.stash[_RANKS]
    ranks.arm(EXIT_LIMIT_S)  # a thread or a collective that does not let the process end is a failure too
    if session.exitstatus and WORLD.rank != 0:  # rank 0 reports, and may have seen nothing of it
        ranks.say(f"pytest comes to exit status {int(session.exitstatus)} here: {session.testsfailed} failures")
    status = max(ranks.exchange(int(session.exitstatus)))
    session.exitstatus = status if WORLD.rank == 0 else 0


@pytest.fixture
def nobody_else_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has failed on this rank is raised at once."""
    from hvdlite.collectives import node_waits, requests

    for module in (node_waits, requests):
        monkeypatch.setattr(module, "VERDICT_S", 0.05)


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """hvdlite.torch, initialized; modules ask for it with a mark."""
    import hvdlite.torch as hvd

    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(scope="module", params=["window", "unfused", "ring_exchange"])
def team(request: pytest.FixtureRequest, running: None) -> object:
    """A `hvdlite.tensor_parallel.Team` of all ranks, on one node."""
    if request.param == "ring_exchange" and WORLD.size != 2:
        pytest.skip("a ring of two ranks; on the CPU others are windows")
    import hvdlite.tensor_parallel as tp
    import hvdlite.torch as hvd

    return tp.init(hvd.size(), method=request.param).tp


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """A communicator of all ranks that nothing else uses."""
    from mpi4py import MPI

    private = MPI.COMM_WORLD.Dup()
    yield private
    private.Free()


@pytest.fixture
def sub_comm() -> Iterator[Callable[[int], MPI.Intracomm | None]]:
    """``sub_comm(n)``: a communicator of the first ``n`` ranks, None on the others; to be called by all ranks alike."""
    from mpi4py import MPI

    made: list[MPI.Intracomm] = []

    def make(n: int) -> MPI.Intracomm | None:
        part = MPI.COMM_WORLD.Split(0 if WORLD.rank < n else MPI.UNDEFINED, WORLD.rank)
        if part == MPI.COMM_NULL:
            return None
        assert isinstance(part, MPI.Intracomm)
        made.append(part)
        return part

    yield make
    for part in made:
        part.Free()


@pytest.fixture
def shared_path(comm: MPI.Intracomm, tmp_path: Path) -> Path:
    """An empty directory, the same on every rank."""
    return Path(comm.bcast(str(tmp_path)))


@pytest.fixture
def everything_on_gpus() -> Iterator[None]:
    """Every tensor is on a simulated GPU, as if torch's default device were one; on this machine's, see one_gpu.py.

    With two ranks only: with their number backends differ, which test_device_runtime.py has with every number.
    """
    if WORLD.size != 2:
        pytest.skip("with two ranks")
    from one_gpu import IS_SIMULATED, one_gpu

    if not IS_SIMULATED:
        with one_gpu(WORLD.rank, everywhere=True):
            yield
        return
    from cuda_lab import simulated
    from cuda_torch import TorchOnGpu

    with TorchOnGpu(simulated(), everywhere=True).in_hvdlite():
        yield
