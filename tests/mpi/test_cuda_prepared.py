"""Blocking allreduces of a tensor on a GPU, again and again: enqueued by one call, and in order with a stream."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from cuda_lab import SimulatedGpus, simulated
from hvdlite.coordinator.prepared import Outcome
from hvdlite.operations.prepared_on_device import PreparedOnDevice
from test_cuda import late, ramp, same, total

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]

TURNS = 12
"""More than it takes until an order is frozen."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpus]:
    found = SimulatedGpus(simulated())
    monkeypatch.setattr("hvdlite.torch.device.gpus", found)
    yield found
    found.cuda.synchronize(found.stream)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """Of calls that enqueue."""
    found: list[Outcome] = []
    run = PreparedOnDevice.run

    def seen(*args: object) -> Outcome:
        found.append(run(*args))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(PreparedOnDevice, "run", seen)
    return found


def until_enqueued(step: Callable[[], object], outcomes: list[Outcome]) -> None:
    """Repeat ``step`` until all ranks have it done so, whom a busy machine may disturb.

    Each time so much more often that an order is found also where several were disturbed before.
    """
    for attempt in range(10):
        outcomes.clear()
        for _ in range(TURNS + 70 * attempt):
            step()
        if min(hvd.allgather_object(len(outcomes))) > TURNS // 2:
            return
    raise AssertionError("it is not prepared")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("numel", [1, 1001, 70_001])
def test_sums(gpus: SimulatedGpus, outcomes: list[Outcome], numel: int, dtype: torch.dtype, in_place: bool) -> None:
    name = f"prepared {numel} {dtype} {in_place}"

    def step() -> None:
        tensor = late(gpus, ramp(numel, hvd.rank() + 1, dtype), 1e-3)
        result = (hvd.allreduce_ if in_place else hvd.allreduce)(tensor, op=hvd.Sum, name=name)
        assert (result is tensor) == in_place
        assert same(gpus, result, total(numel, dtype))

    until_enqueued(step, outcomes)


def test_what_travels_in_16_bits_is_scaled(gpus: SimulatedGpus, outcomes: list[Outcome]) -> None:
    def step() -> None:
        tensor = late(gpus, ramp(500, hvd.rank() + 1), 1e-3)
        options = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0}
        assert same(gpus, hvd.allreduce(tensor, compression=hvd.Compression.fp16, **options), 2 * total(500))

    until_enqueued(step, outcomes)


def test_results_are_in_order_with_the_callers_stream(gpus: SimulatedGpus, outcomes: list[Outcome]) -> None:
    """Which is another one each time: what it does before is what is added, and what it does then has the sum."""
    streams = [gpus.stream, gpus.cuda.stream()]
    numbers = iter(range(10**6))

    def step() -> None:
        number = next(numbers)
        gpus.stream = streams[number % 2]
        tensor = late(gpus, torch.full((300,), float(number + hvd.rank())), 2e-3)
        hvd.allreduce_(tensor, op=hvd.Sum, name="ordered")
        copy = gpus.cuda.tensor((300,))
        gpus.later(lambda: copy.copy_(tensor), 0)
        gpus.later(lambda: tensor.fill_(-1), 0)  # the memory is used again at once
        assert same(gpus, copy, torch.full((300,), sum(number + rank for rank in range(hvd.size())) * 1.0))

    until_enqueued(step, outcomes)
    gpus.stream = streams[0]


def test_ranks_that_come_late_are_waited_for(gpus: SimulatedGpus, outcomes: list[Outcome]) -> None:
    tensor = gpus.cuda.tensor((64,))

    def step() -> None:
        gpus.later(lambda: tensor.fill_(hvd.rank() + 1.0), 1e-3)
        hvd.allreduce_(tensor, op=hvd.Sum, name="late")
        assert same(gpus, tensor, torch.full((64,), float(sum(range(1, hvd.size() + 1)))))

    coordinator = hvdlite.runtime().group.world.coordinator
    for late_rank in range(hvd.size()):
        until_enqueued(step, outcomes)
        for _ in range(4 * TURNS):
            step()
        outcomes.clear()
        if hvd.rank() == late_rank:
            time.sleep(0.3)
        else:
            threading.Timer(0.1, coordinator.wake).start()  # a ring, which the coordinator has to follow
        step()
        assert (hvd.rank() != late_rank) == (Outcome.NOT_YET in outcomes)
    until_enqueued(step, outcomes)


def test_other_operations_in_between(gpus: SimulatedGpus, outcomes: list[Outcome]) -> None:
    """On the GPU and on the host, collected and not."""
    tensor, on_host = gpus.cuda.tensor((64,)), torch.zeros(10)

    def step(also: int = -1) -> None:
        gpus.later(lambda: tensor.fill_(hvd.rank() + 1.0), 0)
        hvd.allreduce_(tensor, op=hvd.Sum, name="one of several")
        assert torch.equal(hvd.allreduce(on_host + hvd.rank(), op=hvd.Max, name="host"), on_host + hvd.size() - 1)
        if also == 0:
            hvd.barrier()
        elif also == 1:
            hvd.synchronize(hvd.allreduce_async_(gpus.cuda.tensor((5,)).fill_(1), name="queued"))
        elif also == 2:
            assert hvd.allgather(late(gpus, ramp(3))).numel() == 3 * hvd.size()
        assert same(gpus, tensor, torch.full((64,), float(sum(range(1, hvd.size() + 1)))))

    for also in range(3):
        until_enqueued(step, outcomes)
        step(also)
    until_enqueued(step, outcomes)


def test_a_stream_that_is_captured_is_refused_and_nobody_waits(gpus: SimulatedGpus, outcomes: list[Outcome]) -> None:
    tensor = gpus.cuda.tensor((64,))
    until_enqueued(lambda: hvd.allreduce_(tensor, name="captured"), outcomes)
    for _ in range(4 * TURNS):
        hvd.allreduce_(tensor, name="captured")
    gpus.cuda.synchronize(gpus.stream)
    gpus.cuda.library.cuStreamBeginCapture_v2(gpus.stream, 2)  # in the mode that leaves other calls alone
    try:
        with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"):
            hvd.allreduce_(tensor, name="captured")
    finally:
        gpus.cuda.library.cuStreamEndCapture(gpus.stream, ctypes.byref(ctypes.c_void_p()))
    plan = hvdlite.runtime().group.world.coordinator._plan.plan
    assert plan is None or plan.ready == plan.done  # nobody was told
    gpus.later(lambda: tensor.fill_(1), 0)
    hvd.allreduce_(tensor, op=hvd.Sum, name="after that")
    assert same(gpus, tensor, torch.full((64,), float(hvd.size())))


def test_it_is_counted_and_shown(gpus: SimulatedGpus, outcomes: list[Outcome]) -> None:
    tensor = gpus.cuda.tensor((64,))
    step = lambda: hvd.allreduce_(tensor, name="counted")  # noqa: E731
    until_enqueued(step, outcomes)
    before = hvdlite.statistics()
    for _ in range(5):
        step()
    after = hvdlite.statistics()
    assert after["submissions"] - before["submissions"] == 5
    assert after["reduced_bytes"] - before["reduced_bytes"] == 5 * tensor.nbytes
