"""tests/mpi/conftest.py itself: a test that hangs, or fails on one rank, ends the run and says why."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from launching import Result

HANG = """
import ctypes, threading, time
import pytest

def other_thread(): time.sleep(100)

@pytest.mark.time_limit(5)
def test_hang(comm):
    threading.Thread(target=other_thread, daemon=True).start()
    if comm.rank == 0:
        comm.recv()
    if comm.rank == 1:
        holds_the_gil()

def holds_the_gil(): ctypes.PyDLL(None).sleep(100)
"""

FAILURES = """
import pytest

@pytest.fixture
def breaks_on_rank_0(comm):
    yield
    assert comm.rank != 0, "broken teardown"

def test_passes(comm, sub_comm, shared_path):
    part = sub_comm(2)
    assert (part is None) == (comm.rank >= 2)
    (shared_path / str(comm.rank)).touch()
    comm.Barrier()
    assert len(list(shared_path.iterdir())) == comm.size

def test_fails_on_rank_1(comm): assert comm.rank != 1, "one is wrong"
def test_teardown(breaks_on_rank_0): pass
def test_skips_on_rank_2(comm):
    if comm.rank == 2: pytest.skip("not me")
def test_skips_everywhere(comm): pytest.skip("nobody")
def test_goes_on(comm): comm.Barrier()
"""

LEFT_ALONE = """
def test_left_alone(comm):
    assert comm.rank != 1, "the reason"
    waits(comm)

def waits(comm): comm.recv(source=1)
"""


@pytest.fixture
def run_tests(launch: Callable[..., Result], tmp_path: Path, mpi: str) -> Callable[..., Result]:
    """``run_tests(n, text)``: pytest under mpirun with ``n`` ranks on a test module of its own."""
    harness = [Path(__file__).parents[1] / "mpi" / name for name in ("conftest.py", "harness_ranks.py")]
    pytest_script = Path(sysconfig.get_path("scripts"), "pytest")

    def run(n: int, text: str, *, grace_s: float = 20) -> Result:
        for path in harness:
            shutil.copy(path, tmp_path)
        with (tmp_path / "conftest.py").open("a") as file:
            file.write(f"\nGRACE_S = {grace_s}\n")
        (tmp_path / "test_it.py").write_text(text)
        options = ["--color=no", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        return launch(n, pytest_script, *options, str(tmp_path), mpi=mpi)

    return run


def test_a_hang_ends_as_stacks_of_all_threads_on_all_ranks(run_tests: Callable[..., Result]) -> None:
    result = run_tests(3, HANG)
    assert result.returncode != 0
    assert result.leftovers == ()
    for rank in range(3):
        assert result.ranks[rank].stderr.count("in other_thread") == 1
        assert f"[rank {rank}] Timeout" in result.ranks[rank].stderr
    assert "in test_hang" in result.ranks[0].stderr
    assert "in holds_the_gil" in result.ranks[1].stderr
    assert "in exchange" in result.ranks[2].stderr


def test_one_ranks_failure_is_everybodys(run_tests: Callable[..., Result]) -> None:
    result = run_tests(3, FAILURES)
    assert result.returncode == 1
    # pytest may count a warning of its own: ranks clear away old directories side by side.
    assert re.search(r"2 failed, 3 passed, 1 skipped,( \d+ warnings?,)? 1 error", result.ranks[0].stdout)
    assert "[rank 1] E   AssertionError: one is wrong" in result.ranks[1].stderr
    assert "[rank 0] E       AssertionError: broken teardown" in result.ranks[0].stderr
    assert "skipped on rank 2 only" in result.ranks[0].stdout
    assert [rank.stdout for rank in result.ranks[1:]] == ["", ""]


def test_a_rank_does_not_wait_for_ever_after_its_failure(run_tests: Callable[..., Result]) -> None:
    result = run_tests(3, LEFT_ALONE, grace_s=2)
    assert result.returncode != 0
    assert result.leftovers == ()
    assert "the reason" in result.ranks[1].stderr
    assert "have not ended this test" in result.ranks[1].stderr
    for rank in (0, 2):
        assert "in waits" in result.ranks[rank].stderr
