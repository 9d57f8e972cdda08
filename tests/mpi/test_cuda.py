"""Tensors on GPUs, by a simulated driver: every operation waits for the stream that makes its tensors, and is right.

Kernels come late here (`SimulatedGpus.later`), and device memory that nobody has written is NaN, so a wait that is
missing shows.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import hvdlite
import hvdlite.errors
import hvdlite.torch as hvd
from cuda_lab import SimulatedGpus, simulated, simulated_for
from hvdlite.operations.operation import Operation

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]

SIZES = [0, 1, 7, 1000, 300_001]


@pytest.fixture(params=["on the GPU", "through the host"])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpus]:
    """Operations run on the GPU where they can, or as those that cannot."""
    if request.param == "through the host":
        monkeypatch.setattr(Operation, "runs_on_device", False)
    found = SimulatedGpus(simulated())
    monkeypatch.setattr("hvdlite.torch.device.gpus", found)
    yield found
    found.cuda.synchronize(found.stream)


def late(gpus: SimulatedGpus, values: torch.Tensor, delay_s: float = 0.02) -> torch.Tensor:
    """A tensor on the device, which has ``values`` once the stream has come so far."""
    tensor = gpus.cuda.tensor(tuple(values.shape), values.dtype)
    gpus.later(lambda: tensor.copy_(values), delay_s)
    return tensor


def same(gpus: SimulatedGpus, tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the stream makes ``tensor`` what is expected."""
    gpus.cuda.synchronize(gpus.stream)
    return torch.equal(tensor, expected)


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(1e-3)
    return condition()


def ramp(numel: int, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (factor * (torch.arange(numel) % 7 + 1)).to(dtype)


def total(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The sum of ``ramp(numel, rank + 1)`` over ranks."""
    return ramp(numel, sum(range(1, hvd.size() + 1)), dtype)


@pytest.mark.parametrize("numel", SIZES)
def test_allreduce(gpus: SimulatedGpus, numel: int) -> None:
    tensor = late(gpus, ramp(numel, hvd.rank() + 1))
    result = hvd.allreduce(tensor, op=hvd.Sum)
    assert gpus.ordinal_of(result) == 0 or not numel
    assert same(gpus, result, total(numel))
    assert same(gpus, tensor, ramp(numel, hvd.rank() + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_allreduce_in_place(gpus: SimulatedGpus, dtype: torch.dtype) -> None:
    tensor = late(gpus, ramp(501, hvd.rank() + 1, dtype))
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert same(gpus, tensor, total(501, dtype))


def test_who_waits_does_it_and_the_thread_watches_the_gpu(gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what repeats: the thread, which would sleep for ever, is told that a GPU has something to do."""
    if not Operation.runs_on_device:
        pytest.skip("what passes through the host is done when the call returns")
    world = hvdlite.runtime().group.world
    tensor = late(gpus, ramp(1000))
    for _ in range(12):
        hvd.allreduce_(tensor, name="watched")
    gpus.cuda.synchronize(gpus.stream)
    monkeypatch.setattr(world.coordinator._worker, "_idle_s", math.inf)
    assert soon(lambda: not world.is_under_way and world.coordinator._worker.next_look.at_s == math.inf)
    watched, queued = threading.Event(), []
    monkeypatch.setattr(world, "watch", watched.set)
    monkeypatch.setattr(world.coordinator, "submit", lambda *_, **__: queued.append(True))
    gpus.later(lambda: watched.wait(20), 0)
    hvd.allreduce_(tensor, name="watched")
    assert watched.wait(20)
    assert not queued
    assert same(gpus, tensor, ramp(1000))


def test_a_result_waits_for_the_last_use_of_its_memory(gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's allocator gives out memory that kernels of the same stream still write."""
    new_empty = gpus.new_empty

    def used_before(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        made = new_empty(tensor, shape)
        gpus.later(lambda: made.fill_(-1), 0.1)
        return made

    monkeypatch.setattr(gpus, "new_empty", used_before)
    assert same(gpus, hvd.allreduce(late(gpus, ramp(20, hvd.rank() + 1)), op=hvd.Sum), total(20))
    rows = late(gpus, ramp(3, hvd.rank() + 1))
    gathered = hvd.allgather(rows)
    gpus.cuda.synchronize(gpus.stream)
    assert torch.equal(gathered, torch.cat([ramp(3, rank + 1) for rank in range(hvd.size())]))


def test_a_group_of_all_kinds(gpus: SimulatedGpus) -> None:
    """Of several types, one on the host, one twice as large as all before."""
    kinds = [
        (5, torch.float32),
        (0, torch.float32),
        (70_001, torch.float16),
        (3, torch.int32),
        (500_000, torch.float32),
    ]
    mine = [ramp(numel, hvd.rank() + 1, dtype) for numel, dtype in kinds]
    tensors = [tensor if i == 3 else late(gpus, tensor) for i, tensor in enumerate(mine)]
    for result, (numel, dtype) in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), kinds, strict=True):
        assert same(gpus, result, total(numel, dtype))


def test_many_at_once(gpus: SimulatedGpus) -> None:
    """They are fused, those on the GPU and those on the host, and across streams."""
    handles, streams = [], [gpus.stream, gpus.cuda.stream()]
    for i in range(30):
        gpus.stream = streams[i % 2]
        mine = ramp(100 + i, hvd.rank() + 1)
        on_host = i % 3 == 0
        tensor = mine if on_host else late(gpus, mine, 0.03 * (1 - i % 2))  # so that streams come at different times
        handles.append(hvd.allreduce_async(tensor, op=hvd.Sum, name=f"many {i}"))
    for i, handle in enumerate(handles):
        assert same(gpus, hvd.synchronize(handle), total(100 + i))


def test_allgather_of_ragged_rows(gpus: SimulatedGpus) -> None:
    rows = [ramp(4 * (rank % 3 + 1), rank + 1).view(-1, 4) for rank in range(hvd.size())]
    result = hvd.allgather(late(gpus, rows[hvd.rank()]))
    assert gpus.ordinal_of(result) == 0
    assert same(gpus, result, torch.cat(rows))


def test_broadcast(gpus: SimulatedGpus) -> None:
    for root in range(hvd.size()):
        tensor = late(gpus, ramp(1001, hvd.rank() + 1))
        assert same(gpus, hvd.broadcast_(tensor, root), ramp(1001, root + 1))


def test_alltoall(gpus: SimulatedGpus) -> None:
    size = hvd.size()
    mine = torch.arange(2 * size) + 100 * hvd.rank()
    result = hvd.alltoall(late(gpus, mine))
    assert gpus.ordinal_of(result) == 0
    gpus.cuda.synchronize(gpus.stream)
    assert result.tolist() == [100 * rank + 2 * hvd.rank() + i for rank in range(size) for i in range(2)]


def test_reducescatter(gpus: SimulatedGpus) -> None:
    size = hvd.size()
    result = hvd.reducescatter(late(gpus, ramp(3 * size, hvd.rank() + 1)), op=hvd.Sum)
    assert gpus.ordinal_of(result) == 0
    assert same(gpus, result, total(3 * size)[3 * hvd.rank() : 3 * hvd.rank() + 3])


def test_the_device_as_a_whole_is_never_waited_for(gpus: SimulatedGpus) -> None:
    """A kernel on another stream, and one enqueued after the operation, run on meanwhile."""
    go_on = threading.Event()
    other = gpus.cuda.stream()
    gpus.cuda.launch(other, lambda: go_on.wait(20))
    handle = hvd.allreduce_async(late(gpus, ramp(10, hvd.rank() + 1)), op=hvd.Sum)
    gpus.later(lambda: go_on.wait(20), 0.0)
    result = hvd.synchronize(handle)
    assert soon(lambda: torch.equal(result, total(10)))
    go_on.set()
    gpus.cuda.synchronize(other)


@contextmanager
def anew() -> Iterator[None]:
    """With worlds that have not seen a GPU yet."""
    hvd.shutdown()
    hvd.init()
    yield
    hvd.shutdown()
    hvd.init()


def test_another_gpu_after_another_start(gpus: SimulatedGpus) -> None:
    """As where a rank of an elastic job takes another place."""
    before, other = (gpus.cuda, gpus.stream), simulated_for((gpus.cuda.device + 1) % 4)
    assert same(gpus, hvd.allreduce(late(gpus, ramp(20)), op=hvd.Average), ramp(20))
    with anew(), other.current():
        gpus.cuda, gpus.stream = other, other.stream()
        assert same(gpus, hvd.allreduce(late(gpus, ramp(20, hvd.rank() + 1)), op=hvd.Sum), total(20))
    gpus.cuda, gpus.stream = before


@pytest.mark.parametrize("is_known", [True, False])
def test_who_joins_before_its_first_tensor(
    gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """It takes part on torch's GPU, which is not that of its place on the node; or there, if torch has none yet."""
    if not Operation.runs_on_device:
        pytest.skip("what passes through the host needs no GPU there")
    if not is_known:
        monkeypatch.setattr(gpus, "current", lambda: None)
    with anew():
        if hvd.rank() == 0:
            assert same(gpus, hvd.allreduce(late(gpus, ramp(20)), op=hvd.Sum), ramp(20))
        hvd.join()
        engine = hvdlite.runtime().group.world.executor.device
        assert engine is not None
        assert engine.memory.ordinal == (0 if is_known else hvd.local_rank())
        if is_known:
            assert same(gpus, hvd.allreduce(late(gpus, ramp(20)), op=hvd.Average), ramp(20))
        elif hvd.rank():
            with pytest.raises(ValueError, match=rf"on cuda:0, but this rank has begun on cuda:{hvd.rank()},"):
                hvd.allreduce(late(gpus, ramp(20)))


def test_a_rank_with_its_tensor_on_the_host(gpus: SimulatedGpus) -> None:
    if hvd.size() == 1:
        pytest.skip("nobody differs")
    mine = ramp(5) if hvd.rank() == 0 else late(gpus, ramp(5))
    with pytest.raises(hvdlite.errors.MismatchError, match=r"the CPU.*a GPU|a GPU.*the CPU"):
        hvd.allreduce(mine, name="weight")
