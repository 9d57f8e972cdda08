"""Random programs (tests/mpi/test_programs.py) whose ranks are on several hosts, with a network between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lab import Lab
from launching import on_one_mpi

TESTS = Path(__file__).parents[1] / "mpi" / "test_programs.py"
PROGRAMS = os.environ.get("HVDLITE_TEST_PROGRAMS", "60")
WORK = f"""
import sys
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", {str(TESTS)!r}]))
"""


@on_one_mpi("openmpi")
@pytest.mark.parametrize(
    "ranks_per_host",
    [[2, 1], pytest.param([1, 1], marks=pytest.mark.thorough)],
    ids=lambda ranks: "+".join(map(str, ranks)),
)
def test_programs(hosts: Callable[..., Lab], mpi: str, ranks_per_host: Sequence[int]) -> None:
    result = hosts(2).launch(
        WORK,
        ranks_per_host=ranks_per_host,
        mpi=mpi,
        env={"HVDLITE_TEST_PROGRAMS": PROGRAMS},
        timeout=120 + int(PROGRAMS.rstrip(":")),
    )
    result.check()
    assert "passed" in result.stdout and "skipped" not in result.stdout, result
