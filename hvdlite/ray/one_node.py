"""Why workers are on one node, in words."""

from __future__ import annotations

from hvdlite.errors import StartupError


def several_nodes(what: str, size: int, hosts: str) -> StartupError:
    """Between nodes there is only MPI."""
    return StartupError(
        f"RayExecutor: {what}, and between nodes hvdlite needs MPI, which Ray does not start. Take one node that has "
        f"room for all workers (num_workers), or start the ranks with `hvdliterun -np {size} -H {hosts} train.py`"
    )
