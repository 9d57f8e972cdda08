"""`hosts(n, **options)`: emulated hosts that are gone after the test, whatever happens in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from lab import Lab, refusal


@pytest.fixture
def hosts() -> Iterator[Callable[..., Lab]]:
    """Makes a `lab.Lab`: ``hosts(2, rate="1gbit").launch(script, ranks_per_host=[2, 2])``; or skips with the reason."""
    reason = refusal()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda n, **options: stack.enter_context(Lab(n, **options))
