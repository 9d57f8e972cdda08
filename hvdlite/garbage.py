"""Imports without collections of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No collections in this block, whose objects all stay; afterwards, as before.

    Modules of hvdlite allocate as much as makes Python look through all of torch's objects, for which it needs more
    time than for the imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
