"""What only a backend on streams promises: the host does not wait, the stream does; and what becomes of failures."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import nccl_lab
from backend_lab import RANK, SIZE, Lab, allocate, assert_none, difference, fill, memory, reduced, values_of
from hvdlite import _native
from hvdlite.collectives.nccl import NcclBackend
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.errors import CollectiveError, RankFailedError, StartupError
from nccl_lab import OwnMemory, build

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]

LAST = SIZE - 1
NUMEL = 40_000
NAMES = range(100, 100 + SIZE)
PATIENCE_S = 10.0
REMOTE = 6  # ncclRemoteError
alone = pytest.mark.skipif(SIZE == 1, reason="needs a rank to wait for")


@pytest.fixture
def streaming() -> OwnMemory:
    return OwnMemory()


@pytest.fixture
def backend(comm: MPI.Intracomm, streaming: OwnMemory) -> Iterator[NcclBackend]:
    backend = build(comm, memory=streaming)
    yield backend
    backend.close()


def has_come(streaming: OwnMemory) -> bool:
    """Whether the stream has done all that is in it now, soon."""
    moment = streaming.moment()
    deadline = time.monotonic() + 0.05
    while not moment.is_reached and time.monotonic() < deadline:
        time.sleep(1e-3)
    return moment.is_reached


@alone
def test_the_host_waits_for_nobody(comm: MPI.Intracomm, streaming: OwnMemory, backend: NcclBackend) -> None:
    """The last rank comes after all others have gone on; their streams wait for it."""
    buf = allocate(backend, NUMEL, DType.FLOAT32)
    fill(buf, values_of(RANK, NUMEL))
    if RANK == LAST:
        comm.Barrier()
    backend.allreduce(buf).wait()
    problem = "the stream has not waited" if RANK != LAST and has_come(streaming) else None
    if RANK != LAST:
        comm.Barrier()
    streaming.synchronize()
    assert_none(problem, difference(buf, reduced(ReduceOp.SUM, NUMEL, DType.FLOAT32)))


def test_what_is_enqueued_before_and_after(
    streaming: OwnMemory, backend: NcclBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation takes what late kernels write, and comes before kernels that are enqueued after its wait."""
    monkeypatch.setenv("GPUSIM_JITTER_US", "3000")  # until the operation is in the stream
    problems = []
    buf = allocate(backend, NUMEL, DType.FLOAT32)
    for salt in range(4):
        seen = []
        streaming.later(lambda salt=salt: fill(buf, values_of(RANK, NUMEL, salt)), delay_s=5e-3)
        backend.allreduce(buf, Reduction(ReduceOp.SUM, 2.0, 0.5)).wait()
        streaming.later(lambda seen=seen: seen.append(memory(buf).copy()))
        streaming.later(lambda: fill(buf, np.full(NUMEL, -1.0)))
        streaming.synchronize()
        memory(buf)[:] = seen[0]
        problems.append(difference(buf, reduced(ReduceOp.SUM, NUMEL, DType.FLOAT32, salt=salt), f"time {salt}"))
    assert_none(*problems)


@pytest.mark.parametrize(("op", "postscale"), [(ReduceOp.SUM, 0.25), (ReduceOp.MAX, 0.25), (ReduceOp.SUM, 2.0)])
def test_sums_of_16_bit_floats_are_scaled_down_first(
    streaming: OwnMemory, backend: NcclBackend, op: ReduceOp, postscale: float
) -> None:
    """NCCL keeps partial sums in 16 bits, where four of 57344 are too many."""
    calls: list[object] = []

    class Watched:
        handle = streaming.stream.handle

        def reduce(self, *arguments: Any) -> None:
            calls.append(arguments[5:])

    class WatchedNccl:
        def all_reduce(self, *_: Any) -> int:
            calls.append("all_reduce")
            return _native.Barrier.OK

    buf = allocate(backend, 1, DType.FLOAT16)
    stream, communicator = streaming.stream, backend._communicator
    streaming.stream, backend._communicator = Watched(), WatchedNccl()  # type: ignore[assignment]
    backend.allreduce(buf, Reduction(op, 1.0, postscale))
    streaming.stream, backend._communicator = stream, communicator
    is_early = op is ReduceOp.SUM and postscale < 1.0
    assert calls == ([(postscale, 1.0), "all_reduce"] if is_early else ["all_reduce", (1.0, postscale)])


def test_integers_are_scaled_after_the_sum(streaming: OwnMemory, backend: NcclBackend) -> None:
    buf = allocate(backend, 5, DType.INT32)
    fill(buf, values_of(RANK, 5))
    backend.allreduce(buf, Reduction(postscale=0.5)).wait()
    streaming.synchronize()
    assert_none(difference(buf, reduced(ReduceOp.SUM, 5, DType.INT32, postscale=0.5)))


# Calls by which blocks travel: equal ones, one behind the other, have a call of NCCL's own.


def test_equal_blocks_are_one_call(backend: NcclBackend, streaming: OwnMemory) -> None:
    calls: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(communicator, name)

    numel = 6 * SIZE + 5
    buf = allocate(backend, numel, DType.INT32)
    communicator = backend._communicator
    backend._communicator = Watched()  # type: ignore[assignment]
    equal = [[(3 + 6 * rank, 9 + 6 * rank)] for rank in range(SIZE)]
    apart = [[(3 + 6 * rank, 8 + 6 * rank)] for rank in range(SIZE)]
    total, problems = reduced(ReduceOp.SUM, numel, DType.INT32), []
    for blocks in (equal, apart):
        fill(buf, values_of(RANK, numel))
        backend.reduce_scatter(buf, blocks)
        streaming.synchronize()
        ((start, stop),) = blocks[RANK]
        problems.append(difference(buf.narrow(start, stop), total[start:stop], "reduced"))
        backend.allgather(buf, blocks)
        streaming.synchronize()
        for ((start, stop),) in blocks:
            problems.append(difference(buf.narrow(start, stop), total[start:stop], "gathered"))
    backend._communicator = communicator
    assert_none(*problems)
    in_groups = ["reduce", "broadcast"] if SIZE > 1 else ["reduce_scatter", "all_gather"]
    assert calls == ["reduce_scatter", "all_gather", *in_groups]


# Ranks that do not come, die, or differ.


@alone
@pytest.mark.parametrize("knows", [True, False], ids=["on one node", "on several"])
def test_a_late_rank_is_named(comm: MPI.Intracomm, knows: bool) -> None:
    progress = Lab().node((tuple(range(SIZE)),)).share(NcclBackend.progress_bytes(SIZE)) if knows else None
    backend = build(comm, ranks=NAMES, progress=progress, timeout_s=0.3)
    problem = None
    comm.Barrier()
    if RANK != LAST:
        try:
            backend.barrier()
        except CollectiveError as error:
            late = f"[{100 + LAST}]" if knows else "some"
            wanted = [f"of ranks {list(NAMES)}, {late} did not come", "0.3 s", "HVDLITE_COLLECTIVE_TIMEOUT_SECONDS"]
            problem = None if all(part in str(error) for part in wanted) else str(error)
        else:
            problem = "the barrier did not wait"
    backend.close()
    assert_none(problem)


@alone
def test_the_end_of_the_job_ends_every_wait(comm: MPI.Intracomm, streaming: OwnMemory) -> None:
    """The last rank never comes, and others hear that it died: the host's wait ends, and so does the stream's."""
    died = threading.Event()

    def check() -> None:
        if died.is_set():
            raise RankFailedError(LAST, f"rank {LAST} died")

    backend = build(comm, memory=streaming, check=check)
    buf = allocate(backend, NUMEL, DType.FLOAT32)

    def end() -> None:
        died.set()
        backend.wake()

    messenger = threading.Timer(0.2, end)
    problem = None
    comm.Barrier()
    if RANK != LAST:
        backend.allreduce(buf).wait()
        messenger.start()
        try:
            backend.barrier()
        except RankFailedError as error:
            problem = None if str(error) == f"rank {LAST} died" else str(error)
        else:
            problem = "the barrier did not wait"
        streaming.synchronize()
        try:
            backend.allreduce(buf)
        except RankFailedError:
            pass
        else:
            problem = "an operation began after the end"
        messenger.join()
    backend.close()
    assert_none(problem)


def test_a_failure_that_nccl_notices(comm: MPI.Intracomm) -> None:
    """Where nobody waits for it, and at the next call."""
    backend, later = build(comm, ranks=NAMES), build(comm, ranks=NAMES)
    buf = allocate(later, 10, DType.FLOAT32)
    backend.check_health()
    simulated = nccl_lab.simulated()
    simulated.nccl_sim_fail(REMOTE)
    try:
        text = rf"between ranks {list(NAMES)}: NCCL: remote process exited".replace("[", r"\[").replace("]", r"\]")
        with pytest.raises(CollectiveError, match=text):
            backend.check_health()
        with pytest.raises(CollectiveError, match="allreduce 'layer3'"):
            later.allreduce(buf, label="layer3")
    finally:
        simulated.nccl_sim_fail(0)
    for each in (backend, later):
        each.close()


def test_one_that_cannot_connect_is_given_back(comm: MPI.Intracomm) -> None:
    """NCCL may say so at once, and leaves what it has made to who has asked for it."""
    simulated = nccl_lab.simulated()
    before = simulated.nccl_sim_living()
    simulated.nccl_sim_fail(REMOTE)
    try:
        with pytest.raises(StartupError, match="ncclCommInitRankConfig: remote process exited"):
            build(comm)
    finally:
        simulated.nccl_sim_fail(0)
    until_s = time.monotonic() + 10
    while simulated.nccl_sim_living() > before and time.monotonic() < until_s:
        time.sleep(1e-3)
    assert_none(None if simulated.nccl_sim_living() <= before else "a communicator is left")


@dataclass
class Changed:
    """Ranks of which the last has another NCCL."""

    comm: MPI.Intracomm
    version: int
    rank: int = RANK
    size: int = SIZE

    def allgather(self, outcome: Any) -> list[Any]:
        card, complaint = outcome
        is_another = card is not None and self.rank == LAST
        return self.comm.allgather((card._replace(version=self.version) if is_another else card, complaint))


@alone
def test_versions_must_go_together(comm: MPI.Intracomm) -> None:
    others = [100 + rank for rank in range(LAST)]
    with pytest.raises(StartupError) as caught:
        build(Changed(comm, 22703), ranks=NAMES)
    assert f"2.28.9 on ranks {others}, 2.27.3 on ranks [{100 + LAST}]" in str(caught.value)


@alone
def test_the_last_number_of_a_version_may_differ(comm: MPI.Intracomm) -> None:
    build(Changed(comm, 22803)).close()


@alone
def test_a_rank_without_nccl_is_named(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise RuntimeError("no NCCL: libnccl.so.2 is not there")

    if RANK == LAST:
        monkeypatch.setattr("hvdlite.nccl_library.load", load)
    with pytest.raises(StartupError, match="NCCL cannot be used here: no NCCL: libnccl.so.2 is not there") as caught:
        build(comm)
    assert str(caught.value).startswith(f"rank {LAST}: ") == (RANK != LAST)


@alone
def test_a_rank_that_cannot_connect_is_named(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it in vain; what they say is what the rank says."""

    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    refuse.unique_id = _native.NcclCommunicator.unique_id  # type: ignore[attr-defined]
    nccl_lab.simulated()
    if RANK == LAST:
        monkeypatch.setattr("hvdlite._native.NcclCommunicator", refuse)
    with pytest.raises(StartupError, match="connecting by NCCL: out of memory") as caught:
        build(comm, timeout_s=0.5)
    assert str(caught.value).startswith(f"rank {LAST}: ") == (RANK != LAST)


@alone
def test_the_world_is_looked_at_while_ranks_connect(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        looks.append(1)
        if len(looks) > 2:
            raise RankFailedError(LAST, f"rank {LAST} died")

    def refuse(*_: object) -> None:
        raise RankFailedError(LAST, f"rank {LAST} died")

    looks: list[int] = []
    refuse.unique_id = _native.NcclCommunicator.unique_id  # type: ignore[attr-defined]
    nccl_lab.simulated()
    if RANK == LAST:
        monkeypatch.setattr("hvdlite._native.NcclCommunicator", refuse)
    with pytest.raises(RankFailedError, match=f"rank {LAST} died"):
        build(comm, timeout_s=60, check=check)


# The end.


@alone
def test_close_ends_what_will_never_be_done(comm: MPI.Intracomm, streaming: OwnMemory) -> None:
    backend = build(comm, memory=streaming, timeout_s=0.3)
    buf = allocate(backend, NUMEL, DType.FLOAT32)
    comm.Barrier()
    if RANK != LAST:
        backend.allreduce(buf).wait()
    assert backend._communicator.close(0.3)
    streaming.synchronize()
    comm.Barrier()


def test_close_waits_for_what_is_on_its_way(streaming: OwnMemory, comm: MPI.Intracomm) -> None:
    backend = build(comm, memory=streaming)
    buf = allocate(backend, NUMEL, DType.FLOAT32)
    streaming.later(lambda: fill(buf, values_of(RANK, NUMEL)), delay_s=0.05)
    backend.allreduce(buf).wait()
    backend.close()
    streaming.synchronize()
    assert_none(difference(buf, reduced(ReduceOp.SUM, NUMEL, DType.FLOAT32)))


def test_what_nobody_closes_goes_all_the_same(comm: MPI.Intracomm) -> None:
    for _ in range(3):
        backend = build(comm)
        buf = allocate(backend, 10, DType.FLOAT32)
        backend.allreduce(buf).wait()
        del backend
        gc.collect()


def test_an_abort_at_any_time(comm: MPI.Intracomm) -> None:
    """The simulated NCCL ends the process if a communicator is called after it was given back."""
    for pause_us in range(0, 2000, 100):
        backend = build(comm)
        buf = allocate(backend, 10, DType.FLOAT32)
        timer = threading.Timer(pause_us * 1e-6, backend.wake)
        timer.start()
        with pytest.raises(CollectiveError):
            while True:
                backend.allreduce(buf).wait()
        timer.join()
        backend.close()


# Network interfaces.


def test_interfaces_are_those_of_hvdlite(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that the end of the test undoes what is set here
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    with caplog.at_level("INFO", "hvdlite"):
        build(comm, interfaces="=eth1").close()
        build(comm, interfaces="lo").close()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert [record.getMessage() for record in caplog.records if "interfaces" in record.getMessage()] == [
        "NCCL uses the network interfaces =eth1 (NCCL_SOCKET_IFNAME was not set)"
    ]


def test_interfaces_that_nobody_chose_are_left_to_nccl(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    build(comm).close()
    assert "NCCL_SOCKET_IFNAME" not in os.environ
