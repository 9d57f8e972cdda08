"""Three minutes of tests/chaos.py."""

from __future__ import annotations

import random

import pytest

from chaos import run


@pytest.mark.thorough
def test_no_sample_is_lost_or_counted_twice_while_ranks_die() -> None:
    seed = random.randrange(1000)  # which it prints
    assert run(3.0, 4, seed) == []
