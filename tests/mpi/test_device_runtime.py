"""What a Runtime computes on GPUs, by the simulated driver: on every grouping of ranks into nodes, by every backend."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import nccl_lab
from backend_lab import RANK, SIZE, encode, reduced, values_of
from gpu_lab import DeviceTensor, Gpu, opened
from hvdlite import _native, cuda_aware_mpi, device_engine, nccl_library
from hvdlite.collectives import select_device
from hvdlite.collectives.by_size import BySizeBackend
from hvdlite.collectives.direct import DirectBackend
from hvdlite.collectives.hierarchical import HierarchicalBackend
from hvdlite.collectives.nccl import NcclBackend
from hvdlite.collectives.pinned import PinnedBackend
from hvdlite.collectives.ring import RingBackend
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.errors import MismatchError
from hvdlite.job_runtime import Runtime
from hvdlite.memory.views import TensorView
from hvdlite.operations.allgather import allgather_async
from hvdlite.operations.allocate import allocate_on_device
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.broadcast import broadcast_async
from one_gpu import not_at_first
from runtime_lab import LAYOUTS, REDUCING, TINY, agree, running

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]

LAST = SIZE - 1
NUMELS = [0, 1, 65, 513, 5003]
WAYS = ["direct", "nccl", "faster", "host"]
"""Which backends there can be: NCCL is not there; GPUs share no memory; all are there; none is."""
CASES = [*itertools.product(WAYS, LAYOUTS), ("handles", LAYOUTS[0])]
"""And one that is as direct, but that a GPU's memory is not shared by file descriptors."""
# NCCL is not there either, and what crosses nodes is where MPI takes it.
CASES += [("cuda_aware", nodes) for nodes in LAYOUTS if len(set(nodes)) > 1]


@pytest.fixture(scope="module")
def world() -> Iterator[MPI.Intracomm]:
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    yield from opened()


def no_nccl() -> None:
    raise RuntimeError("no NCCL here")


def refuse_files(ordinal: int, nbytes: int) -> None:
    raise RuntimeError("no file descriptors here")


@pytest.fixture(scope="module", params=CASES, ids=str)
def runtime(gpu: Gpu, world: MPI.Intracomm, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """Whose GPU the first operation has found."""
    way, machine_of = request.param
    config = replace(TINY, gpu_mpi="direct") if way == "cuda_aware" else TINY
    with pytest.MonkeyPatch.context() as patch, running(world, config, machine_of) as made:
        nccl_lab.simulated()
        if way in ("direct", "cuda_aware", "host", "handles"):
            patch.setattr(nccl_library, "load", no_nccl)
        if way in ("nccl", "host"):
            patch.setattr(device_engine, "_shared_memory", not_at_first(device_engine._shared_memory))
        if way == "handles":
            patch.setattr(_native, "FileSegment", refuse_files)
        if way == "faster":  # the answer must not depend on this machine
            patch.setattr(select_device._Contest, "_times", lambda *_: [[1.0, 2.0], [2.0, 1.0]])
            patch.setattr(select_device, "_LIMIT_BYTES", 1024)
            patch.setattr(cuda_aware_mpi, "is_reported", lambda: True)
        tensor = gpu.tensor(3, DType.FLOAT32, values_of(RANK, 3))
        allreduce_async(made.group, [tensor.view], [tensor.view]).wait()
        agree(world, tensor.problem(reduced(ReduceOp.SUM, 3, DType.FLOAT32)))
        made.way = way  # type: ignore[attr-defined]
        yield made


def backend_of(runtime: Runtime) -> Any:
    device = runtime.group.world.executor.device
    return None if device is None else device.engine.backend


def parts(backend: Any) -> tuple[type, type]:
    """In the node, and across."""
    assert type(backend) is HierarchicalBackend
    return type(backend._node), type(backend._cross)


def test_the_table_of_backends(runtime: Runtime, world: MPI.Intracomm) -> None:
    backend = backend_of(runtime)
    way, across = runtime.way, len(runtime.topology.nodes) > 1  # type: ignore[attr-defined]
    if way == "host":
        assert backend is None
        return
    in_node = {"nccl": NcclBackend, "faster": BySizeBackend}.get(way, DirectBackend)
    has_no_files = way == "handles" or os.environ.get("GPUSIM_NO_VMM") == "1"
    assert (backend.memory._segments is _native.HandleSegment) == has_no_files
    if not across:
        assert type(backend) is in_node
    else:
        has_rail = runtime.topology.local_rank < runtime.topology.rails
        pinned, direct = ((in_node, kind if has_rail else type(None)) for kind in (PinnedBackend, RingBackend))
        if way == "faster":
            assert (type(backend), type(backend._large)) == (BySizeBackend, NcclBackend)
            composed = backend._small
            assert (type(composed), parts(composed._small), parts(composed._large)) == (BySizeBackend, pinned, direct)
        elif way in ("direct", "cuda_aware", "handles"):
            assert parts(backend) == (direct if way == "cuda_aware" else pinned)


@pytest.mark.parametrize("dtype", REDUCING, ids=lambda dtype: dtype.label)
def test_sums_of_every_size_at_once(runtime: Runtime, gpu: Gpu, world: MPI.Intracomm, dtype: DType) -> None:
    """In place and not, fused in whatever way the sizes allow."""
    work = []
    for salt, numel in enumerate(NUMELS):
        tensor = gpu.tensor(numel, dtype, values_of(RANK, numel, salt))
        target = tensor if salt % 2 else gpu.tensor(numel, dtype)
        handle = allreduce_async(runtime.group, [tensor.view], [target.view], name=f"{dtype.label}.{numel}")
        work.append((handle, target, salt, numel))
    problems = []
    for handle, target, salt, numel in work:
        handle.wait()
        problems.append(target.problem(reduced(ReduceOp.SUM, numel, dtype, salt=salt), "sum"))
    agree(world, *problems)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.label)
def test_operations_and_scales(runtime: Runtime, gpu: Gpu, world: MPI.Intracomm, op: ReduceOp) -> None:
    problems = []
    for dtype in (DType.INT32, DType.FLOAT32, DType.FLOAT64):
        tensor = gpu.tensor(1000, dtype, values_of(RANK, 1000))
        allreduce_async(runtime.group, [tensor.view], [tensor.view], Reduction(op, 2.0, 0.5)).wait()
        problems.append(tensor.problem(reduced(op, 1000, dtype, 2.0, 0.5), op.label))
    agree(world, *problems)


def test_a_group_of_several_types_that_travels_in_16_bits(runtime: Runtime, gpu: Gpu, world: MPI.Intracomm) -> None:
    kinds = [(700, DType.FLOAT32), (3, DType.FLOAT64), (64, DType.FLOAT32)]
    tensors = [gpu.tensor(numel, dtype, values_of(RANK, numel)) for numel, dtype in kinds]
    views = [tensor.view for tensor in tensors]
    allreduce_async(runtime.group, views, views, wire_dtype=DType.BFLOAT16).wait()
    agree(
        world,
        *(
            tensor.problem(reduced(ReduceOp.SUM, numel, dtype))
            for tensor, (numel, dtype) in zip(tensors, kinds, strict=True)
        ),
    )


def test_rows_are_gathered(runtime: Runtime, gpu: Gpu, world: MPI.Intracomm) -> None:
    results: list[DeviceTensor] = []

    def allocate(_: int, shape: tuple[int, ...]) -> TensorView:
        with gpu.cuda.current():  # on the coordinator's thread
            results.append(gpu.tensor(shape[0], DType.INT16))
        return results[0].view

    counts = [37 * rank % 5 * 100 for rank in range(SIZE)]
    mine = gpu.tensor(counts[RANK], DType.INT16, values_of(RANK, counts[RANK]))
    allgather_async(runtime.group, [mine.view], allocate).wait()
    everything = np.concatenate([values_of(rank, count) for rank, count in enumerate(counts)])
    agree(world, results[0].problem(everything) if len(everything) else None)


def test_every_root_broadcasts(runtime: Runtime, gpu: Gpu, world: MPI.Intracomm) -> None:
    problems = []
    for root in range(SIZE):
        tensor = gpu.tensor(5003, DType.UINT8, values_of(RANK, 5003))
        broadcast_async(runtime.group, [tensor.view], root_rank=root).wait()
        problems.append(tensor.problem(values_of(root, 5003), f"root {root}"))
    agree(world, *problems)


def test_tensors_that_live_in_a_fusion_buffer(runtime: Runtime, gpu: Gpu, world: MPI.Intracomm) -> None:
    """Are reduced where they are; there is none where GPUs share no memory with others nor NCCL is there."""
    windows = nccl_lab.simulated().nccl_sim_windows
    before = windows()
    buffer = allocate_on_device(runtime.group, 8192, gpu.where())
    assert (windows() > before) == (runtime.way in ("nccl", "faster"))  # type: ignore[attr-defined]
    if runtime.way == "host":  # type: ignore[attr-defined]
        assert buffer is None
        return
    assert buffer is not None and buffer.ordinal == RANK
    values = encode(values_of(RANK, 1000), DType.FLOAT32).tobytes()
    address = buffer.address + 4096
    gpu.cuda.launch(gpu.stream, lambda: ctypes.memmove(address, values, 4000), delay_s=1e-3)
    tensor = DeviceTensor(gpu, TensorView(address, (1000,), DType.FLOAT32, buffer.owner, gpu.where()))
    handle = allreduce_async(runtime.group, [tensor.view], [tensor.view])
    assert handle.home is not None and handle.home.place == (buffer.buffer_id, 4096)
    handle.wait()
    agree(world, tensor.problem(reduced(ReduceOp.SUM, 1000, DType.FLOAT32)))


def test_random_work_on_host_and_gpu(runtime: Runtime, gpu: Gpu, world: MPI.Intracomm) -> None:
    """Alike on all ranks, and ready on each in an order of its own."""
    shared, own = random.Random(7), random.Random(RANK)
    work = []
    for number in range(40):
        numel, dtype = shared.choice(NUMELS), shared.choice(REDUCING)
        on_host, salt = shared.random() < 0.3, number
        work.append((f"w{number}", numel, dtype, on_host, salt))
    own.shuffle(work)
    begun = []
    for name, numel, dtype, on_host, salt in work:
        tensor: Any
        if on_host:
            memory = encode(values_of(RANK, numel, salt), dtype)
            tensor = HostTensor(TensorView(memory.ctypes.data, (numel,), dtype, memory), memory)
        else:
            tensor = gpu.tensor(numel, dtype, values_of(RANK, numel, salt))
        begun.append((allreduce_async(runtime.group, [tensor.view], [tensor.view], name=name), tensor, salt))
    problems = []
    for handle, tensor, salt in begun:
        handle.wait()
        expected = reduced(ReduceOp.SUM, tensor.view.numel, tensor.view.dtype, salt=salt)
        problems.append(tensor.problem(expected, handle.label))
    agree(world, *problems)


class HostTensor:
    def __init__(self, view: TensorView, memory: np.ndarray) -> None:
        self.view = view
        self._memory = memory

    def problem(self, expected: np.ndarray, what: str = "") -> str | None:
        return None if np.array_equal(self._memory, encode(expected, self.view.dtype)) else f"{what} is wrong"


@pytest.mark.skipif(SIZE == 1, reason="nobody differs")
def test_a_tensor_on_the_wrong_device_is_named(runtime: Runtime, gpu: Gpu, world: MPI.Intracomm) -> None:
    memory = np.zeros(3, np.float32)
    view = TensorView.of_numpy(memory) if RANK == LAST else gpu.tensor(3, DType.FLOAT32, np.zeros(3)).view
    with pytest.raises(MismatchError, match=r"'w'.*device.*(the CPU|a GPU)"):
        allreduce_async(runtime.group, [view], [view], name="w").wait()
