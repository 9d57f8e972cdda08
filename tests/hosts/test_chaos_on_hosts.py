"""Two minutes of tests/chaos.py, with each MPI."""

from __future__ import annotations

import random

import pytest

from chaos_on_hosts import run_on_hosts
from lab import refusal
from launching import on_one_mpi


@on_one_mpi("openmpi")
def test_no_sample_is_lost_or_counted_twice_while_hosts_are_lost(mpi: str) -> None:
    reason = refusal()
    if reason is not None:
        pytest.skip(reason)
    seed = random.randrange(1000)  # which it prints
    assert run_on_hosts(2.0, 2, seed, mpi) == []
