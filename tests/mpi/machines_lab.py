"""Ranks of this machine as if they were on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import hvdlite.node
from harness_ranks import OverMpi, harness_ranks
from hvdlite.node import Door

Machines = tuple[int, ...]
"""The machine of each rank."""

WORLD = harness_ranks()
ONE_MACHINE: Machines = (0,) * WORLD.size
_ACROSS: dict[int, list[Machines]] = {2: [(0, 1)], 3: [(0, 0, 1)], 4: [(0, 0, 1, 1)]}
ONE_AND_SEVERAL = [ONE_MACHINE, *_ACROSS.get(WORLD.size, [])]


def nodes_of(machine_of: Machines) -> tuple[tuple[int, ...], ...]:
    machines = sorted(set(machine_of), key=machine_of.index)
    return tuple(tuple(rank for rank, own in enumerate(machine_of) if own == machine) for machine in machines)


@contextmanager
def machines(machine_of: Machines) -> Iterator[None]:
    """Runtimes that start in this block find only the ranks of their own machine of ``machine_of``."""
    connect = hvdlite.node._connect_to_leader

    def reach(doors: dict[int, Door], rank: int, deadline_s: float) -> Any:
        own = {r: door for r, door in doors.items() if machine_of[r] == machine_of[rank]}
        return connect(own, rank, deadline_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvdlite.node, "_connect_to_leader", reach)
        yield


@contextmanager
def running_on(machine_of: Machines) -> Iterator[None]:
    """hvdlite runs; skips the test where it cannot."""
    import hvdlite.torch as hvd

    if machine_of != ONE_MACHINE and not isinstance(WORLD, OverMpi):
        pytest.skip("several machines need MPI")
    with machines(machine_of):
        hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(scope="module", params=ONE_AND_SEVERAL, ids=str, autouse=True)
def machine_of(request: pytest.FixtureRequest) -> Iterator[Machines]:
    """For a module that has it as its own: hvdlite runs, with all ranks on one machine, then on several."""
    with running_on(request.param):
        yield request.param
