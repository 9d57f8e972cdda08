"""Split layers on GPUs, by every method: each wait of a stream for another one, on this rank or on another, is there.

Kernels come late here, memory that nobody has written is NaN, and so is what was freed (cuda_torch.py).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
import test_tensor_parallel as on_host
from cuda_lab import simulated
from cuda_torch import TorchOnGpu
from hvdlite.errors import MismatchError, UsageError
from hvdlite.memory.device import DeviceMemory
from hvdlite.tensor_parallel.carrier import Rows
from hvdlite.tensor_parallel.device import DeviceCarrier
from hvdlite.tensor_parallel.device_windows import DeviceWindows
from tensor_parallel_lab import integers
from test_tensor_parallel_misuse import everywhere_the_same

pytestmark = [pytest.mark.any_mpi, pytest.mark.usefixtures("running")]

METHODS = ["ring_exchange", "pipeline", "bulk", "unfused"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[TorchOnGpu]:
    if hvd.size() > 3:
        pytest.skip("three ranks have all that more have: several peers, both streams")
    with TorchOnGpu(simulated(), everywhere=True).in_hvdlite() as found:
        yield found


@pytest.fixture(scope="module", params=METHODS)
def team(request: pytest.FixtureRequest, running: None) -> tp.Team:
    return tp.init(hvd.size(), method=request.param).tp


@pytest.mark.parametrize("dtype", on_host.DTYPES, ids=str)
def test_products_and_their_gradients(team: tp.Team, dtype: torch.dtype) -> None:
    on_host.test_all_gather_matmul(team, dtype, (3,))
    on_host.test_matmul_reduce_scatter(team, dtype, ())


def test_everything_else(team: tp.Team) -> None:
    if team.size > 2:
        on_host.test_sums_of_16_bits_are_rounded_once(team)
    on_host.test_regions(team)
    on_host.test_no_rows(team)
    on_host.test_a_frozen_input_or_weight(team)
    on_host.test_an_embedding(team, True)
    on_host.test_cross_entropy(team, torch.float32, "mean")


def test_windows_grow_and_are_used_in_turns(team: tp.Team) -> None:
    """Results, all of them read at the end, stay what they were."""
    on_host.test_windows_grow_and_are_used_in_turns(team)


def test_what_is_read_is_not_overwritten(team: tp.Team, gpu: TorchOnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank after the other, first with one of its streams, then with the other, is late once all have met."""
    is_late, is_second = False, False
    meet = DeviceWindows.meet

    def meet_and_be_late(windows: DeviceWindows) -> None:
        meet(windows)
        if is_late:
            stream = windows.second if is_second else windows.first
            gpu.cuda.launch(ctypes.c_void_p(stream.handle), lambda: time.sleep(0.03 if is_second else 0.005))

    monkeypatch.setattr(DeviceWindows, "meet", meet_and_be_late)
    n = team.size
    x, weight = integers(2 * n, 4), integers(4, 4, salt=1)
    results = []
    for step in range(2 * n):
        is_late, is_second = step % n == team.rank, step >= n
        shard = (on_host.rows_of(x, team) + step).requires_grad_()
        own = weight.clone().requires_grad_()
        y = tp.matmul_reduce_scatter(tp.all_gather_matmul(shard, own, team), weight, team)
        y.sum().backward()
        results += [y, shard.grad, own.grad]
    for step in range(2 * n):
        y, for_shard, for_weight = results[3 * step : 3 * step + 3]
        whole, upstream = x + step, torch.ones(2 * n, 4) @ weight.t()
        assert torch.equal(y, n * on_host.rows_of(whole @ weight @ weight, team))
        assert torch.equal(for_shard, n * on_host.rows_of(upstream @ weight.t(), team))
        assert torch.equal(for_weight, whole.t() @ upstream)


def test_new_windows_are_written_after_their_owner_has_cleared_them(gpu: TorchOnGpu) -> None:
    """Of a ring, whose products go to others before ranks have met."""
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    team = tp.Team(method="ring_exchange")
    x = torch.ones(400 * team.size, 400)
    tp.matmul_reduce_scatter(x[: team.size], x[:400], team)
    memory = team.process_set.group().device_memory
    assert isinstance(memory, DeviceMemory)
    if team.rank == team.size - 1:
        gpu.cuda.launch(ctypes.c_void_p(memory.stream.handle), lambda: time.sleep(0.2))
    assert (tp.matmul_reduce_scatter(x, x[:400], team) == 400 * team.size).all().item()


@pytest.mark.parametrize("method", METHODS[:3])
def test_a_model(method: str) -> None:
    """Loss, gradients and their norm are those of one process."""
    on_host.test_clipping(tp.init(hvd.size(), method=method).tp, 0.01)


def test_threads_do_not_wait_for_a_gpu(team: tp.Team, gpu: TorchOnGpu) -> None:
    """A whole layer and its gradients are enqueued before the first kernel runs."""
    if team.method == "unfused":
        pytest.skip("operations are waited for until they are enqueued, which others do")
    x, weight = integers(team.size, 4).requires_grad_(), integers(4, 4, salt=1).requires_grad_()
    tp.matmul_reduce_scatter(tp.all_gather_matmul(x, weight, team), weight, team)  # makes what is made once
    gpu.synchronize()
    go_on = threading.Event()
    gpu.cuda.launch(gpu.stream, lambda: go_on.wait(60))
    try:
        y = tp.matmul_reduce_scatter(tp.all_gather_matmul(x, weight, team), weight, team)
        found = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    finally:
        go_on.set()
    n, one = team.size, torch.ones(team.size, 4)
    assert torch.equal(y, n * (x @ weight @ weight).detach())
    assert torch.equal(found[0], n * (one @ weight.t() @ weight.t()).detach())


def test_several_streams(team: tp.Team, gpu: TorchOnGpu) -> None:
    """What one of them has yet to read is not overwritten by the next."""
    x = [integers(2 * team.size, 4) + step for step in range(6)]
    streams = [gpu.cuda.stream() for _ in range(3)]
    gpu.synchronize()
    results = []
    for step, whole in enumerate(x):
        with gpu.on(streams[step % 3]):
            shard = on_host.rows_of(whole, team)
            gathered = team.carrier_for(shard).gather(Rows.of("test", "", shard), shard)
            gpu.launch(lambda: time.sleep(0.01))
            results.append(gathered * 1)
    for stream in streams:
        gpu.wait_stream(stream)
    for found, whole in zip(results, x, strict=True):
        assert torch.equal(found, whole)


def test_ranks_that_differ(team: tp.Team) -> None:
    if team.size == 1:
        pytest.skip("one rank agrees with itself")
    last = team.rank == team.size - 1
    weight = torch.ones(4, 4)
    everywhere_the_same(
        team,
        MismatchError,
        lambda: tp.all_gather_matmul(torch.ones(2 + last, 4), weight, team),
        f"rank {team.size - 1}, exchange ",
        "(3, 4) float32 on cuda",
    )
    everywhere_the_same(
        team,
        MismatchError,
        lambda: tp.matmul_all_reduce(*((t.cpu() if last else t) for t in (torch.ones(2, 4), weight)), team),
        "of (2, 4) float32 on cuda",
    )
    on_host_or_not = weight.cpu() if last else weight
    everywhere_the_same(
        team, UsageError, lambda: tp.matmul_all_reduce(torch.ones(2, 4), on_host_or_not, team), "are mixed"
    )


def test_a_method_that_differs() -> None:
    """Before any stream waits in vain."""
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    x, weight = torch.ones(2 * hvd.size(), 4), torch.ones(4, 4)
    team = tp.Team(method="pipeline" if hvd.rank() else "bulk")
    with pytest.raises(MismatchError, match="by bulk.*by pipeline"):
        tp.matmul_reduce_scatter(x, weight, team)
    team = tp.Team(method="unfused" if hvd.rank() else "window")
    with pytest.raises(MismatchError, match="shared memory; .*float32, unfused"):
        tp.matmul_reduce_scatter(x.cpu(), weight.cpu(), team)


def test_the_fastest_method_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first use, in the middle of a backward that has begun another exchange."""
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    team = tp.Team()
    tried = []
    gather = DeviceCarrier.gather
    monkeypatch.setattr(
        DeviceCarrier, "gather", lambda self, *args: (tried.append(self.method.value), gather(self, *args))[1]
    )
    for _ in range(2):
        on_host.test_all_gather_matmul(team, torch.float32, ())
    assert set(tried) == set(METHODS[:3])
    assert len(tried) < 2 * 2 * 3 * 4


def test_gpus_that_do_not_share_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    monkeypatch.setattr("hvdlite.tensor_parallel.device_windows.allocate_on_device", lambda *_: None)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        on_host.test_all_gather_matmul(tp.Team(), torch.float32, ())
    said = [text for text in caplog.messages if "do not reach one another's memory" in text]
    assert len(said) == (hvd.rank() == 0)
