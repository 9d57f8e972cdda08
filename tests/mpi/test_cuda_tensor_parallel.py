"""Split layers on GPUs, by every method: each wait of a stream for another one, on this rank or on another, is there.

Kernels come late here, memory that nobody has written is NaN, and so is what was freed (cuda_torch.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch

import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
import test_tensor_parallel as on_host
from cuda_lab import simulated
from cuda_torch import TorchOnGpu
from hvdlite.errors import MismatchError, UsageError
from hvdlite.tensor_parallel.carrier import Rows
from hvdlite.tensor_parallel.device import DeviceCarrier
from hvdlite.tensor_parallel.unfused import UnfusedCarrier
from tensor_parallel_lab import integers
from test_tensor_parallel_misuse import everywhere_the_same

pytestmark = [pytest.mark.any_mpi, pytest.mark.usefixtures("running")]

METHODS = ["ring_exchange", "pipeline", "bulk", "unfused"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[TorchOnGpu]:
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


def test_what_is_read_is_not_overwritten(team: tp.Team, gpu: TorchOnGpu) -> None:
    """A stream that is late has yet to read a window when the other ranks would write to it again."""
    matrix = torch.full((2 * team.size, 3), 1.0 + team.rank)
    results = []
    for step in range(6):
        if step % team.size == team.rank:
            gpu.launch(lambda: threading.Event().wait(0.02))
        results.append(tp.gather_rows(matrix[:2] + step, team)[:, 0] * 1)
        results.append(tp.matmul_reduce_scatter(matrix + step, torch.eye(3), team)[:, 0])
    for step, (gathered, scattered) in enumerate(zip(results[::2], results[1::2], strict=True)):
        assert gathered.tolist() == [1.0 + place // 2 + step for place in range(2 * team.size)]
        assert scattered.tolist() == [sum(range(1, team.size + 1)) + team.size * step] * 2


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
    x, one = integers(2 * team.size, 4), torch.eye(4)
    streams = [gpu.cuda.stream(), gpu.stream]
    results = []
    for step in range(4):
        gpu.synchronize()  # x + step is there for every stream
        with gpu.on(streams[step % 2]):
            gpu.launch(lambda: threading.Event().wait(0.01))
            shard = (x + step)[2 * team.rank : 2 * team.rank + 2] * 1
            results.append(tp.all_gather_matmul(shard, one, team))
            results.append(tp.matmul_reduce_scatter(x + step, one, team))
            gpu.synchronize()
    for step, (gathered, scattered) in enumerate(zip(results[::2], results[1::2], strict=True)):
        assert torch.equal(gathered, x + step)
        assert torch.equal(scattered, team.size * (x + step)[2 * team.rank : 2 * team.rank + 2])


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
    team = tp.Team(method="pipeline" if hvd.rank() else "bulk")
    with pytest.raises(MismatchError, match="by bulk.*by pipeline"):
        tp.matmul_reduce_scatter(torch.ones(2 * team.size, 4), torch.ones(4, 4), team)


def test_methods_by_function() -> None:
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    methods = {"all_gather_matmul": "bulk", "backward of all_gather_matmul": "pipeline", "matmul_all_reduce": "none"}
    team = tp.Team(method=methods)
    carrier = team.carrier_for(torch.empty(0))
    found = {}
    for function in (*methods, "matmul_reduce_scatter"):
        rows = Rows.of(function, "", torch.empty(1, 1))
        found[function] = carrier._for(rows)  # type: ignore[attr-defined]
    kinds = {name: getattr(chosen, "method", None) for name, chosen in found.items()}
    assert isinstance(found["matmul_all_reduce"], UnfusedCarrier)
    assert isinstance(found["all_gather_matmul"], DeviceCarrier)
    assert [method and method.value for method in kinds.values()] == ["bulk", "pipeline", None, "ring_exchange"]
    with pytest.raises(ValueError, match="there is no 'matmul'; methods can be chosen for all_gather_matmul, backward"):
        tp.Team(method={"matmul": "bulk"})


def test_gpus_that_do_not_share_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    monkeypatch.setattr("hvdlite.tensor_parallel.device_windows.allocate_on_device", lambda *_: None)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        on_host.test_all_gather_matmul(tp.Team(), torch.float32, ())
    said = [text for text in caplog.messages if "do not reach one another's memory" in text]
    assert len(said) == (hvd.rank() == 0)
