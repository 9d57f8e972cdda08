"""The tests of test_optimizer.py and test_optimizers_that_differ.py, with every tensor on a GPU."""

from __future__ import annotations

import pytest

from test_optimizer import *  # noqa: F403
from test_optimizers_that_differ import *  # noqa: F403

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.not_with_three_ranks,
    pytest.mark.usefixtures("running", "everything_on_gpus"),
]
