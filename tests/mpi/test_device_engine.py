"""What ranks say of GPUs that they share, and of one that does not go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from mpi4py import MPI

import nccl_lab
from backend_lab import RANK, SIZE, reduced, values_of
from cuda_lab import simulated
from gpu_lab import Gpu, opened
from hvdlite import _native, device_engine
from hvdlite.collectives.direct import DirectBackend
from hvdlite.collectives.nccl import NcclBackend
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import HorovodInternalError, StartupError
from hvdlite.memory.device import DeviceMemory
from hvdlite.memory.views import OnDevice, TensorView
from hvdlite.operations.allreduce import allreduce_async
from one_gpu import not_at_first
from runtime_lab import TINY, agree, running

pytestmark = pytest.mark.any_mpi

LAST = SIZE - 1


@pytest.fixture(scope="module")
def world() -> Iterator[MPI.Intracomm]:
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    yield from opened()


def test_one_gpu_for_several_ranks_is_said_once(
    world: MPI.Intracomm, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = simulated()
    with cuda.current(), running(world) as runtime, caplog.at_level(logging.WARNING, "hvdlite"):
        stream = cuda.stream()
        handle = stream.value
        assert handle is not None
        where = OnDevice(0, _native.Moment(0, handle), lambda: handle)
        for _ in range(2):
            view = TensorView(cuda.allocate(12), (3,), DType.FLOAT32, gpu, where)
            allreduce_async(runtime.group, [view], [view]).wait()
        cuda.synchronize(stream)
    found = [text for text in caplog.messages if "take turns" in text]
    assert len(found) == (RANK == 0 and SIZE > 1)
    assert all(str(list(range(SIZE))) in text for text in found)


@pytest.mark.skipif(SIZE == 1, reason="memory is not shared")
def test_memory_is_shared_by_handles_where_a_rank_cannot_pass_files(
    world: MPI.Intracomm, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its driver says. NCCL takes no such memory as its own, and works all the same."""

    def share(_: object) -> None:
        raise RuntimeError("not permitted in this container")

    if RANK == LAST:
        monkeypatch.setattr(_native.FileSegment, "share", share)
    windows = nccl_lab.simulated().nccl_sim_windows
    with running(world) as runtime, caplog.at_level(logging.INFO, "hvdlite"):
        tensor = gpu.tensor(3, DType.FLOAT32, values_of(RANK, 3))
        allreduce_async(runtime.group, [tensor.view], [tensor.view]).wait()
        problem = tensor.problem(reduced(ReduceOp.SUM, 3, DType.FLOAT32))
        assert isinstance(runtime.group.device_memory, DeviceMemory)
        assert runtime.group.device_memory._segments is _native.HandleSegment
        assert windows() == 0
    agree(world, problem)
    said = [text for text in caplog.messages if "by CUDA IPC" in text]
    assert len(said) == (RANK == 0)
    assert all(f"rank {LAST}: not permitted in this container" in text for text in said)


def refuse(*_: object) -> None:
    raise RuntimeError("the driver says no")


def go_by_the_host(world: MPI.Intracomm, gpu: Gpu) -> None:
    """Tensors on GPUs are reduced, in memory of the host."""
    with running(world) as runtime:
        tensor = gpu.tensor(3, DType.FLOAT32, values_of(RANK, 3))
        allreduce_async(runtime.group, [tensor.view], [tensor.view]).wait()
        problem = tensor.problem(reduced(ReduceOp.SUM, 3, DType.FLOAT32))
        assert runtime.group.device_memory is None
    agree(world, problem)


@pytest.mark.skipif(SIZE == 1, reason="nobody else is there")
def test_where_a_rank_gets_no_stream_all_go_by_the_host(
    world: MPI.Intracomm, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At once: the others looked for another way to share memory, and waited there for it."""
    nccl_lab.simulated()
    monkeypatch.setattr("hvdlite.nccl_library.load", refuse)
    if RANK == LAST:
        monkeypatch.setattr(_native, "DeviceStream", refuse)
    go_by_the_host(world, gpu)
    said = [text for text in caplog.messages if "pass through memory of the host" in text]
    assert len(said) == (RANK == 0)
    assert all(f"rank {LAST}: the driver says no" in text for text in said)


@pytest.mark.skipif(SIZE == 1, reason="a rank shares memory with itself")
def test_gpus_without_shared_memory_that_nccl_does_not_connect_go_by_the_host(
    world: MPI.Intracomm, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def meet(_: NcclBackend) -> None:
        raise StartupError("no way to connect")

    nccl_lab.simulated()
    monkeypatch.setattr(device_engine, "_shared_memory", not_at_first(device_engine._shared_memory))
    monkeypatch.setattr(NcclBackend, "_meet", meet)
    go_by_the_host(world, gpu)
    said = [text for text in caplog.messages if "GPUs go without NCCL: no way" in text or "pass through memory" in text]
    assert len(said) == 2 * (RANK == 0)


@pytest.mark.parametrize("refused", ["_native.StreamBarrier.__init__", "_native.StreamBarrier.staged_allreduce"])
def test_a_driver_that_refuses_a_part_is_named_with_the_tensor(
    world: MPI.Intracomm, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """And the streams of all ranks come to an end."""
    monkeypatch.setattr("hvdlite.nccl_library.load", refuse)
    said = f"rank {LAST}: 'w': its GPU has failed: the driver says no.*CUDA_LAUNCH_BLOCKING=1"
    with pytest.raises(HorovodInternalError, match=said) as raised, running(world) as runtime:
        if RANK == LAST:
            monkeypatch.setattr(f"hvdlite.{refused}", refuse)
        tensor = gpu.tensor(3, DType.FLOAT32, values_of(RANK, 3))
        allreduce_async(runtime.group, [tensor.view], [tensor.view], name="w").wait()
        while True:
            time.sleep(0.01)
            runtime.check()
    gpu.cuda.synchronize(gpu.stream)
    agree(world, None if "Traceback" not in str(raised.value) else f"a traceback: {raised.value}")


def test_a_gpu_that_fails_as_all_ends_is_left_behind(
    world: MPI.Intracomm, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In order, with the rest closed: all operations are done."""
    closed: list[object] = []
    monkeypatch.setattr("hvdlite.nccl_library.load", refuse)
    monkeypatch.setattr(DirectBackend, "close", lambda backend: closed.append(backend))
    with running(world) as runtime:
        tensor = gpu.tensor(3, DType.FLOAT32, values_of(RANK, 3))
        allreduce_async(runtime.group, [tensor.view], [tensor.view]).wait()
        problem = tensor.problem(reduced(ReduceOp.SUM, 3, DType.FLOAT32))
        if RANK == LAST:
            monkeypatch.setattr(DeviceMemory, "settle", refuse)
        agree(world, problem)  # before the first of them ends
    assert runtime.group.world.failure is None
    assert len(closed) == 1
    said = [text for text in caplog.messages if "leaves behind" in text]
    assert said == [
        f"rank {LAST}: its GPU has failed, and hvdlite leaves behind what it has there: the driver says no"
    ] * (RANK == LAST)


def test_a_gpu_that_does_not_go_on_ends_the_job(world: MPI.Intracomm, gpu: Gpu) -> None:
    """The host has gone on meanwhile; only who looks after GPUs can notice."""
    go_on = threading.Event()
    config = replace(TINY, collective_timeout_s=1.0)
    try:
        with (
            pytest.raises(HorovodInternalError, match="'w': GPU . has not done it in"),
            running(world, config) as runtime,
        ):
            nccl_lab.simulated()
            if RANK == LAST:
                gpu.cuda.launch(gpu.stream, lambda: go_on.wait(60))
            tensor = gpu.tensor(3, DType.FLOAT32, values_of(RANK, 3))
            allreduce_async(runtime.group, [tensor.view], [tensor.view], name="w").wait()
            while True:
                time.sleep(0.1)
                runtime.check()
    finally:
        go_on.set()
        gpu.cuda.synchronize(gpu.stream)
