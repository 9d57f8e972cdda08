"""Memory in which NCCL works in place: registered once, and deregistered before it goes; run with 1 to 4 ranks.

The simulated NCCL ends the process of who breaks a rule, see tests/gpusim/nccl/registered_memory.h.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from mpi4py import MPI

import nccl_lab
from backend_lab import RANK, SIZE, assert_none, difference, fill, reduced, values_of
from hvdlite import _native
from hvdlite.collectives import nccl
from hvdlite.collectives.nccl import NcclBackend
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.memory.views import Buffer
from nccl_lab import OwnMemory, build

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]

LAST = SIZE - 1
NUMEL = 40_000
PATIENCE_S = 20.0
REMOTE = 6  # ncclRemoteError
alone = pytest.mark.skipif(SIZE == 1, reason="nobody differs")

WAYS = {
    "windows": {},
    "buffers": {"NCCL_WIN_ENABLE": "0"},
    "none": {"NCCL_WIN_ENABLE": "0", "NCCL_LOCAL_REGISTER": "0"},
}
"""What NCCL's own settings leave of registration."""


class Known(NamedTuple):
    """What the simulated NCCL knows of this process."""

    windows: int
    buffers: int

    @classmethod
    def now(cls) -> Known:
        simulated = nccl_lab.simulated()
        return cls(simulated.nccl_sim_windows(), simulated.nccl_sim_buffers())


NONE = Known(0, 0)


@pytest.fixture
def streaming() -> OwnMemory:
    return OwnMemory()


@pytest.fixture
def backend(comm: MPI.Intracomm, streaming: OwnMemory) -> Iterator[NcclBackend]:
    backend = build(comm, memory=streaming)
    yield backend
    backend.close()


def allocate(memory: OwnMemory) -> Buffer:
    """All of a new segment."""
    return memory.allocate(NUMEL * 4).buffer(0, NUMEL, DType.FLOAT32)


def sum_problem(backend: NcclBackend, memory: OwnMemory, buf: Buffer, what: str) -> str | None:
    """None if an allreduce of part of ``buf`` gives the sum."""
    part = buf.narrow(64, NUMEL)
    fill(part, values_of(RANK, part.numel))
    backend.allreduce(part).wait()
    memory.synchronize()
    return difference(part, reduced(ReduceOp.SUM, part.numel, DType.FLOAT32), what)


def comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(1e-3)
    return condition()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_prepared_is_registered_until_the_end(
    comm: MPI.Intracomm, streaming: OwnMemory, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GPUSIM_JITTER_US", "1000")  # until NCCL has filled the handle
    backend = build(comm, memory=streaming)
    bufs = [allocate(streaming) for _ in range(2)]
    backend.prepare(bufs[0])
    known = Known.now()
    problems = [sum_problem(backend, streaming, buf, f"buffer {i}") for i, buf in enumerate(bufs)]
    blocks = [[(rank * 100, rank * 100 + 100)] for rank in range(SIZE)]
    fill(bufs[0], values_of(RANK, NUMEL))
    backend.reduce_scatter(bufs[0], blocks).wait()
    backend.allgather(bufs[0], blocks).wait()
    backend.broadcast(bufs[0].narrow(7, 9), LAST).wait()
    backend.allreduce(bufs[0].narrow(SIZE * 100, NUMEL)).wait()  # of which close waits for the end
    backend.close()
    wanted = reduced(ReduceOp.SUM, NUMEL, DType.FLOAT32)
    assert_none(*problems, difference(bufs[0], wanted, "in blocks"))
    assert known == Known(way == "windows", way == "buffers")
    assert Known.now() == NONE


def test_dropped_memory_is_deregistered_when_its_last_work_is_done(
    comm: MPI.Intracomm, streaming: OwnMemory, backend: NcclBackend
) -> None:
    dropped, kept = allocate(streaming), allocate(streaming)
    for buf in (dropped, kept):
        backend.prepare(buf)
    del buf
    go_on = threading.Event()
    streaming.later(lambda: go_on.wait(60))
    backend.allreduce(dropped).wait()
    del dropped
    gc.collect()
    early = Known.now()
    go_on.set()
    problem = sum_problem(backend, streaming, kept, "what is kept")
    assert comes_true(lambda: Known.now() == Known(1, 0)), Known.now()
    assert early == Known(2, 0)
    assert_none(problem)


@pytest.mark.parametrize("ends", [NcclBackend.close, NcclBackend.wake])
def test_memory_that_is_dropped_after_the_end(
    comm: MPI.Intracomm, streaming: OwnMemory, monkeypatch: pytest.MonkeyPatch, ends: Callable[[NcclBackend], None]
) -> None:
    """Goes when NCCL has let go of the communicator."""
    backend = build(comm, memory=streaming)
    buf = allocate(streaming)
    backend.prepare(buf)
    problem = sum_problem(backend, streaming, buf, "before")
    comm.Barrier()
    monkeypatch.setenv("GPUSIM_JITTER_US", "100000")  # until it has let go
    address = buf.address
    ends(backend)
    del buf
    cuda = nccl_lab.cuda_lab.simulated()
    assert comes_true(lambda: not cuda.has(address))
    backend.close()
    assert_none(problem)


@alone
def test_what_will_never_be_done_is_aborted_with_its_memory(comm: MPI.Intracomm, streaming: OwnMemory) -> None:
    """And not deregistered, as it is in use."""
    backend = build(comm, memory=streaming)
    buf = allocate(streaming)
    backend.prepare(buf)
    comm.Barrier()
    if RANK != LAST:
        backend.allreduce(buf).wait()
    assert backend._communicator.close(0.3)
    streaming.synchronize()
    comm.Barrier()
    assert Known.now() == NONE


def test_memory_of_a_communicator_that_has_failed(comm: MPI.Intracomm, streaming: OwnMemory) -> None:
    """Stays until NCCL has let go of that one."""
    simulated, cuda = nccl_lab.simulated(), nccl_lab.cuda_lab.simulated()
    backend = build(comm, memory=streaming)
    buf = allocate(streaming)
    backend.prepare(buf)
    address = buf.address
    simulated.nccl_sim_fail(REMOTE)
    try:
        del buf
        time.sleep(0.05)
        stays = cuda.has(address)
        backend.wake()
        assert comes_true(lambda: not cuda.has(address))
    finally:
        simulated.nccl_sim_fail(0)
    backend.close()
    assert stays


def test_memory_that_is_dropped_while_others_are_at_work(
    comm: MPI.Intracomm, streaming: OwnMemory, backend: NcclBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL may not be called from elsewhere while a call of it is not complete."""
    monkeypatch.setenv("GPUSIM_JITTER_US", "500")
    kept = allocate(streaming)
    backend.prepare(kept)
    problems = []
    for turn in range(10):
        dropped = allocate(streaming)
        backend.prepare(dropped)
        del dropped
        gc.collect()
        problems.append(sum_problem(backend, streaming, kept, f"turn {turn}"))
    assert comes_true(lambda: Known.now() == Known(1, 0)), Known.now()
    assert_none(*problems)


@pytest.mark.parametrize("way", ["windows", "buffers"])
def test_where_a_rank_cannot_all_go_without(
    comm: MPI.Intracomm,
    streaming: OwnMemory,
    backend: NcclBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    """Of the memory that is registered already as well; a window that is refused has broken the communicator."""
    for name, value in WAYS[way].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nccl, "_REGISTER_S", 0.5)
    bufs = [allocate(streaming) for _ in range(3)]
    backend.prepare(bufs[0])
    streaming.later(lambda: None, delay_s=0.05)
    fill(bufs[0], values_of(RANK, NUMEL))
    backend.allreduce(bufs[0]).wait()  # is under way when the communicator is made anew
    nccl_lab.simulated().nccl_sim_refuse(RANK == LAST)
    with caplog.at_level("INFO", "hvdlite"):
        for buf in bufs[1:]:
            backend.prepare(buf)
    problem = difference(bufs[0], reduced(ReduceOp.SUM, NUMEL, DType.FLOAT32), "under way")
    known = Known.now()
    problems = [sum_problem(backend, streaming, buf, f"buffer {i}") for i, buf in enumerate(bufs)]
    said = [text for text in caplog.messages if "does not work in place" in text]
    assert_none(problem, *problems)
    assert known == NONE
    assert len(said) == (RANK == 0)
    assert all("unhandled cuda error" in text for text in said)


def test_memory_that_nccl_does_not_take(comm: MPI.Intracomm, caplog: pytest.LogCaptureFixture) -> None:
    """Is that which ranks share by handles."""
    streaming = OwnMemory(_native.HandleSegment)
    backend = build(comm, memory=streaming)
    buf = allocate(streaming)
    with caplog.at_level("INFO", "hvdlite"):
        backend.prepare(buf)
    known = Known.now()
    problem = sum_problem(backend, streaming, buf, "a copy")
    backend.close()
    assert_none(problem)
    assert known == NONE
    assert not caplog.messages


@alone
def test_ranks_whose_settings_differ(
    comm: MPI.Intracomm, streaming: OwnMemory, backend: NcclBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WAYS["none" if RANK == LAST else "buffers"].items():
        monkeypatch.setenv(name, value)
    buf = allocate(streaming)
    backend.prepare(buf)
    known = Known.now()
    assert_none(sum_problem(backend, streaming, buf, "a copy"))
    assert known == NONE
