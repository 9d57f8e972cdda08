"""The ring between GPUs, in time: what MPI finds when it is called, and what a GPU finds when the ring is through."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
from mpi4py import MPI

from backend_lab import RANK, SIZE, Lab, assert_none, difference, encode, reduced, values_of
from cuda_lab import Cuda, simulated
from device_backend_lab import pinned_ring, ring_of_gpus
from hvdlite.collectives.adder import DeviceAdder
from hvdlite.collectives.base import Backend
from hvdlite.collectives.requests import Endpoint
from hvdlite.collectives.ring import RingBackend
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import CollectiveError
from hvdlite.memory.layout import shard_bounds
from hvdlite.memory.views import Buffer
from nccl_lab import OwnMemory

pytestmark = [pytest.mark.any_mpi, pytest.mark.skipif(SIZE == 1, reason="one rank sends nothing")]

NUMEL = 1000
LATE_S = 0.02


@pytest.fixture(scope="module")
def cuda() -> Cuda:
    return simulated()


@pytest.fixture(scope="module")
def memory() -> OwnMemory:
    return OwnMemory()


@pytest.fixture
def ring(comm: MPI.Intracomm, memory: OwnMemory) -> Iterator[RingBackend]:
    backend = ring_of_gpus(Lab(), comm.Dup(), memory)
    yield backend
    backend.close()


def filled_late(memory: OwnMemory, numel: int) -> Buffer:
    """This rank's values, once the stream of ``memory`` has come so far."""
    buf = memory.allocate(numel * 8).buffer(0, numel, DType.INT64)
    values = encode(values_of(RANK, numel), DType.INT64).tobytes()
    memory.later(lambda: ctypes.memmove(buf.address, values, len(values)), LATE_S)
    return buf


@pytest.mark.parametrize("numel", [100, NUMEL], ids=["doubling", "ring"])
def test_a_gpu_that_is_late_before_and_after(
    ring: RingBackend, cuda: Cuda, memory: OwnMemory, monkeypatch: pytest.MonkeyPatch, numel: int
) -> None:
    """Values come late, and sums later; what follows on the memory's stream copies the sums all the same."""
    enqueue = DeviceAdder._enqueue

    def enqueue_late(adder: DeviceAdder, calls: object) -> object:
        cuda.launch(ctypes.c_void_p(adder._stream.handle), lambda: None, delay_s=LATE_S / 4)
        return enqueue(adder, calls)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceAdder, "_enqueue", enqueue_late)
    buf, copy = filled_late(memory, numel), memory.allocate(numel * 8).buffer(0, numel, DType.INT64)
    ring.allreduce(buf).wait()
    memory.copy(copy.address, buf.address, buf.nbytes)
    memory.synchronize()
    expected = reduced(ReduceOp.SUM, numel, DType.INT64)
    problem = difference(copy, expected, "allreduce")
    own = shard_bounds(numel, SIZE, RANK, 8)
    blocks = [[shard_bounds(numel, SIZE, rank, 8)] for rank in range(SIZE)]
    buf = filled_late(memory, numel)
    ring.reduce_scatter(buf, blocks).wait()
    memory.copy(copy.address, buf.address, buf.nbytes)
    memory.synchronize()
    assert_none(problem, difference(copy.narrow(*own), expected[slice(*own)], "reduce_scatter"))


def test_mpi_finds_the_context_of_the_gpu(
    ring: RingBackend, cuda: Cuda, memory: OwnMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a thread that has none, as that of the coordinator."""
    buf = memory.allocate(NUMEL * 8).buffer(0, NUMEL, DType.INT64)
    found: list[bool] = []
    send = Endpoint.send
    monkeypatch.setattr(Endpoint, "send", lambda *arguments: (found.append(cuda.has_context()), send(*arguments))[1])

    def work() -> None:
        ring.allreduce(buf).wait()
        found.append(not cuda.has_context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert len(found) > 1 and all(found)


@pytest.mark.parametrize("across", [ring_of_gpus, pinned_ring])
def test_a_gpu_that_does_not_come_so_far_is_named(
    comm: MPI.Intracomm, cuda: Cuda, memory: OwnMemory, across: Callable[[Lab, MPI.Intracomm, OwnMemory], Backend]
) -> None:
    """Of which MPI knows nothing: the host waits before it gives memory to MPI."""
    ring = across(Lab(timeout_s=0.2), comm.Dup(), memory)
    buf = memory.allocate(NUMEL * 8).buffer(0, NUMEL, DType.INT64)
    go_on = threading.Event()
    memory.later(lambda: go_on.wait(60))
    try:
        with pytest.raises(CollectiveError, match=r"allreduce 'w': this rank's GPU did not come so far within 0.2 s"):
            ring.allreduce(buf, label="w").wait()
    finally:
        go_on.set()
    cuda.synchronize_all()  # streams of the backend go on too, and read the buffer
