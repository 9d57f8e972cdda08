"""The tests of test_join.py, with every tensor on a GPU."""

from __future__ import annotations

import pytest

from test_join import *  # noqa: F403

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.usefixtures("running", "everything_on_gpus"),
]
