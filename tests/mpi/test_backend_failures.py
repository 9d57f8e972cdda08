"""Backends whose peers are late, dead or wrong: they sleep while they wait, say for whom, and end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from backend_lab import HALVING, KINDS, RANK, RING, SIZE, Lab, allocate, assert_none, fill, values_of
from hvdlite.collectives.base import Backend
from hvdlite.collectives.thresholds import Limits
from hvdlite.dtypes import DType
from hvdlite.errors import CollectiveError, RankFailedError
from hvdlite.links import connections
from hvdlite.links.connections import Connection
from hvdlite.memory.layout import Range, shard_bounds
from hvdlite.memory.views import Buffer

LAST = SIZE - 1
NUMEL = 5000
alone = pytest.mark.skipif(SIZE == 1, reason="needs a rank to wait for")


def failure_of(action: Callable[[], None]) -> tuple[CollectiveError | None, float]:
    """What ``action`` raises, and after how many seconds."""
    start = time.monotonic()
    try:
        action()
    except CollectiveError as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def shards(buf: Buffer) -> list[list[Range]]:
    return [[shard_bounds(buf.numel, SIZE, rank, 4)] for rank in range(SIZE)]


LABEL = "layer3.weight"
OPERATIONS: dict[str, Callable[[Backend, Buffer], None]] = {
    "small allreduce": lambda backend, buf: backend.allreduce(buf.narrow(0, 20), label=LABEL).wait(),
    "large allreduce": lambda backend, buf: backend.allreduce(buf, label=LABEL).wait(),
    "reduce_scatter": lambda backend, buf: backend.reduce_scatter(buf, shards(buf), label=LABEL).wait(),
    "allgather": lambda backend, buf: backend.allgather(buf, shards(buf), label=LABEL).wait(),
    "broadcast": lambda backend, buf: backend.broadcast(buf, LAST, label=LABEL).wait(),
    "barrier": lambda backend, buf: backend.barrier(),
}


def named(operation: str) -> list[str]:
    return [] if operation == "barrier" else [f"'{LABEL}'"]


@alone
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_the_job_ends_the_wait(comm: MPI.Intracomm, kind: str) -> None:
    """The last rank never comes; 0.3 s later everybody learns that it died, as the runtime would tell them."""
    died = threading.Event()

    def check() -> None:
        if died.is_set() or any(node.aborted for node in lab.nodes_made):
            raise RankFailedError(LAST, f"rank {LAST} died")

    lab = Lab(check=check)
    backend = lab.build(kind)
    buf = allocate(backend, NUMEL, DType.FLOAT32)

    def end() -> None:
        died.set()
        for node in lab.nodes_made:
            node.abort()
        backend.wake()

    comm.Barrier()
    messenger = threading.Timer(0.3, end)
    messenger.start()
    problem = None
    if RANK != LAST:
        error, seconds = failure_of(lambda: backend.allreduce(buf).wait())
        if str(error) != f"rank {LAST} died" or not 0.2 < seconds < 5:
            problem = f"{error!r} after {seconds:.2f} s"
    messenger.join()
    assert_none(problem)


@alone
@pytest.mark.usefixtures("nobody_else_says_why")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_node_names_the_late_rank(comm: MPI.Intracomm, operation: str) -> None:
    lab = Lab(timeout_s=0.3)
    backend = lab.shm((tuple(range(SIZE)),), range(100, 100 + SIZE))
    buf = allocate(backend, NUMEL, DType.FLOAT32)
    comm.Barrier()
    problem = None
    if RANK != LAST:
        error, seconds = failure_of(lambda: OPERATIONS[operation](backend, buf))
        wanted = [operation.split()[-1], *named(operation), f"[{100 + LAST}] did not come"]
        wanted += ["0.3 s", "HVDLITE_COLLECTIVE_TIMEOUT_SECONDS"]
        if not all(part in str(error) for part in wanted) or not 0.25 < seconds < 5:
            problem = f"{error!r} after {seconds:.2f} s"
    assert_none(problem)


@alone
@pytest.mark.usefixtures("nobody_else_says_why")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_ring_names_the_late_rank(comm: MPI.Intracomm, operation: str) -> None:
    """Some rank waits for the last one, and says so; the others wait for ranks that wait."""
    backend = Lab(timeout_s=0.3).ring(MPI.COMM_WORLD.Dup(), range(100, 100 + SIZE))
    buf = allocate(backend, NUMEL, DType.FLOAT32)
    comm.Barrier()
    error, seconds = None, 0.3
    problem = None
    if RANK != LAST:
        error, seconds = failure_of(lambda: OPERATIONS[operation](backend, buf))
        wanted = [operation.split()[-1], *named(operation), "did not", "0.3 s", "HVDLITE_COLLECTIVE_TIMEOUT_SECONDS"]
        wanted += [f"to rank {100 + RANK}, or receive from it"]
        if not all(part in str(error) for part in wanted) or not 0.25 < seconds < 5:
            problem = f"{error!r} after {seconds:.2f} s"
    assert_none(problem)
    assert any(f"rank {100 + LAST} did not" in text for text in comm.allgather(str(error)))


@alone
def test_ring_names_a_link_that_is_stuck(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another host that does not come to this rank, not the neighbour that this rank waits for."""
    stuck = Connection("198.51.100.7", 4242, state=1, unacknowledged=9, retries=3)
    monkeypatch.setattr(connections, "of_processes", lambda pids: [stuck])
    backend = Lab(timeout_s=0.3).ring(MPI.COMM_WORLD.Dup(), range(100, 100 + SIZE))
    buf = allocate(backend, NUMEL, DType.FLOAT32)
    comm.Barrier()
    error = failure_of(lambda: OPERATIONS["large allreduce"](backend, buf))[0] if RANK != LAST else None
    wanted = f"'{LABEL}' was not through within 0.3 s; rank {100 + RANK} on {socket.gethostname()} finds: 198.51.100.7"
    assert_none(None if RANK == LAST or wanted in str(error) else repr(error))


@alone
@pytest.mark.parametrize("kind", ["shm", "ring"])
def test_who_waits_in_vain_lets_others_say_why(comm: MPI.Intracomm, kind: str) -> None:
    """As the ranks of a node that wait for one which waits for another node."""
    said_s = time.monotonic() + 0.8

    def check() -> None:
        if time.monotonic() > said_s:
            raise CollectiveError("a link is stuck")

    lab = Lab(timeout_s=0.3, check=check)
    backend = lab.build(kind)
    buf = allocate(backend, NUMEL, DType.FLOAT32)
    comm.Barrier()
    error = failure_of(lambda: backend.allreduce(buf).wait())[0] if RANK != LAST else None
    assert_none(None if RANK == LAST or str(error) == "a link is stuck" else repr(error))


@alone
@pytest.mark.usefixtures("nobody_else_says_why")
@pytest.mark.parametrize("limits", [RING, HALVING], ids=["doubling", "halving"])
def test_a_call_that_came_before_names_the_late_rank_too(comm: MPI.Intracomm, limits: Limits) -> None:
    backend = Lab(timeout_s=0.3).ring(MPI.COMM_WORLD.Dup(), limits=limits)
    buf = allocate(backend, 20, DType.FLOAT32)
    fill(buf, np.zeros(20))
    for _ in range(3):
        backend.allreduce(buf).wait()
    comm.Barrier()
    error = failure_of(lambda: backend.allreduce(buf).wait())[0] if RANK != LAST else None
    problem = None if RANK == LAST or "allreduce: rank" in str(error) else repr(error)
    assert_none(problem)
    assert any(f"rank {LAST} did not" in text for text in comm.allgather(str(error)))


@alone
@pytest.mark.usefixtures("nobody_else_says_why")
def test_failures_of_mpi_become_ours() -> None:
    """The last rank breaks the contract and sends more than rank 0 has room for."""
    backend = Lab(timeout_s=10).ring(MPI.COMM_WORLD.Dup())
    buf = allocate(backend, NUMEL, DType.FLOAT32)
    problem = None
    if RANK == 0:
        error, _ = failure_of(lambda: backend.broadcast(buf.narrow(0, 10), LAST).wait())
        if "broadcast: MPI failed" not in str(error) or not isinstance(error and error.__cause__, MPI.Exception):
            problem = repr(error)
    else:
        backend.broadcast(buf.narrow(0, 20), LAST).wait()
    assert_none(problem)


@alone
@pytest.mark.parametrize("kind", KINDS)
def test_waiting_takes_no_cpu(comm: MPI.Intracomm, kind: str) -> None:
    backend = Lab().build(kind)
    buf = allocate(backend, NUMEL, DType.FLOAT32)
    fill(buf, values_of(RANK, NUMEL))
    for _ in range(2):  # what comes again is prepared by then
        backend.allreduce(buf).wait()
    comm.Barrier()
    if RANK == LAST:
        time.sleep(0.3)
    start = time.thread_time()
    backend.allreduce(buf).wait()
    seconds = time.thread_time() - start
    assert_none(f"{seconds:.3f} s of CPU during a wait of 0.3 s" if seconds > 0.1 else None)
    backend.close()
