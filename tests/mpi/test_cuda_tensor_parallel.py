"""Split layers on GPUs, by every method: each wait of a stream for another one, on this rank or on another, is there.

Kernels come late here, memory that nobody has written is NaN, and so is what was freed (cuda_torch.py).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
import test_tensor_parallel as on_host
from cuda_lab import simulated_for
from cuda_torch import TorchOnGpu
from hvdlite import _native
from hvdlite._native import Moment
from hvdlite.config import Config
from hvdlite.errors import MismatchError, UsageError
from hvdlite.memory.device import DeviceMemory
from hvdlite.recorder import Lane
from hvdlite.tensor_parallel.carrier import Produce, Rows
from hvdlite.tensor_parallel.device import DeviceCarrier
from hvdlite.tensor_parallel.device_windows import DeviceWindows, Place
from hvdlite.tensor_parallel.methods import Method
from tensor_parallel_lab import integers
from test_tensor_parallel_misuse import everywhere_the_same

pytestmark = [pytest.mark.any_mpi, pytest.mark.not_with_three_ranks, pytest.mark.usefixtures("running")]

METHODS = ["ring_exchange", "pipeline", "bulk", "multicast", "unfused"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[TorchOnGpu]:
    if hvd.size() > 3:
        pytest.skip("three ranks have all that more have: several peers, both streams")
    cuda = simulated_for(hvd.rank())
    with cuda.current(), TorchOnGpu(cuda, everywhere=True).in_hvdlite() as found:
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


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "rows"])
def test_under_autocast(team: tp.Team, sequence_parallel: bool) -> None:
    """What travels are products in bfloat16; gradients of parameters have their own dtype."""
    if not hasattr(torch, "get_autocast_dtype"):
        pytest.skip("torch before 2.4 is asked otherwise, and says what it has for a real GPU only")
    on_host.test_under_autocast(team, sequence_parallel)


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


def test_what_is_read_late_is_not_overwritten(team: tp.Team, gpu: TorchOnGpu) -> None:
    """A gather that is read beside the next exchange, by the one after that, which may write to other ranks at once."""
    n = team.size
    x, nothing = integers(8 * n, 4), torch.zeros(4 * n, 4)
    shard, sums = on_host.rows_of(x, team), Rows.of("sum", "", nothing)
    gathers = Rows.of("gather", "", shard)
    carrier = team.carrier_for(shard)

    def produce(out: torch.Tensor, begin: int, onto: torch.Tensor | None = None) -> None:
        out.copy_(nothing[begin : begin + len(out)])

    results = []
    for step in range(2 * n):
        gathered = carrier.begin_gather(gathers, shard + step)
        carrier.begin_reduce_scatter(sums, produce)()
        whole = gathered()
        if step % n == team.rank:
            gpu.launch(lambda: time.sleep(0.05))
        results.append(whole * 1)
        if step < n:
            carrier.gather(gathers, shard * 0)
        else:
            carrier.reduce_scatter(sums, produce)
    for step, found in enumerate(results):
        assert torch.equal(found, x + step), step


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


@pytest.mark.parametrize("method", METHODS[:-1])
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


def test_the_timeline_shows_when_a_gpu_did_it(team: tp.Team, gpu: TorchOnGpu) -> None:
    """By its own clock: after what the stream had to do before, for which the host did not wait."""
    if team.size == 1 or team.method == "unfused":
        pytest.skip("no windows")
    x = torch.ones(2, 400)
    tp.gather_rows(x, team)
    gpu.synchronize()
    recorder = team.process_set.group().recorder
    recorder.start()
    try:
        start_ns = time.monotonic_ns()
        gpu.launch(lambda: time.sleep(0.2))
        tp.gather_rows(x, team)
        gpu.synchronize()
        deadline_s, events = time.monotonic() + 30, []
        while not events and time.monotonic() < deadline_s:  # whoever looks after the streams writes it down
            time.sleep(0.01)
            events += [event for event in recorder.drain()[0] if event[1] is Lane.ON_GPU]
        now_ns = time.monotonic_ns()
    finally:
        recorder.stop()
    ((_, _, name, begun_ns, done_ns, _, _),) = events
    assert name.startswith("gather_rows")
    assert start_ns + 0.1e9 < begun_ns <= done_ns <= now_ns  # 0.2, but for what the clock may be late


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
    assert set(tried) == set(METHODS[:-1])
    assert len(tried) < 2 * 2 * 4 * 4


def test_gpus_that_do_not_share_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    monkeypatch.setattr("hvdlite.tensor_parallel.device_windows.allocate_on_device", lambda *_, **__: None)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        on_host.test_all_gather_matmul(tp.Team(), torch.float32, ())
    said = [text for text in caplog.messages if "do not reach one another's memory" in text]
    assert len(said) == (hvd.rank() == 0)
    assert all("unfused, which here is by way of memory of the host" in text for text in said)


# Multicast.


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each of them went by multicast, as far as carriers that are asked for it decide."""
    decided = []
    by_multicast = DeviceCarrier._by_multicast

    def decide(carrier: DeviceCarrier, address: int, part_bytes: int) -> bool:
        decision = by_multicast(carrier, address, part_bytes)
        if carrier.method is Method.MULTICAST:
            decided.append(decision)
        return decision

    monkeypatch.setattr(DeviceCarrier, "_by_multicast", decide)
    return decided


def check_exchanges(team: tp.Team, dtype: torch.dtype, columns: int) -> None:
    """A gather, a sum for each and one for all, of rows of whose number each rank has two."""
    n, rank = team.size, team.rank
    carrier = team.carrier_for(torch.ones(1))
    parts = [integers(2 * n, columns, dtype=dtype, salt=salt) for salt in range(n)]
    total = sum(parts, torch.zeros_like(parts[0]))
    own, shard = parts[rank], on_host.rows_of(parts[0], team)
    assert torch.equal(carrier.gather(Rows.of("gather", "", shard), shard), parts[0])
    begun = carrier.begin_gather(Rows.of("begin", "", shard), shard)
    assert torch.equal(begun(), parts[0])
    rows = Rows.of("sum", "", own)
    scattered = carrier.reduce_scatter(rows, lambda out, begin, onto=None: out.copy_(own[begin : begin + len(out)]))
    assert torch.equal(scattered, on_host.rows_of(total, team))
    assert torch.equal(carrier.all_reduce(rows, lambda out, begin, onto=None: out.copy_(own)), total)


@pytest.mark.parametrize("dtype", [*on_host.DTYPES, torch.float16], ids=str)
def test_whole_vectors_go_by_multicast(dtype: torch.dtype, exchanges: list[bool]) -> None:
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    team = tp.Team(method="multicast")
    check_exchanges(team, dtype, 400)
    assert exchanges.count(True) == len(exchanges) > 0
    exchanges.clear()
    check_exchanges(team, dtype, 7)
    assert not all(exchanges) or dtype is torch.float64  # of which two rows of seven are whole vectors
    shard = torch.ones(9, 400, dtype=dtype).flatten()[1:3201].view(8, 400)  # between vectors
    assert torch.equal(tp.gather_rows(shard, team), torch.ones(8 * team.size, 400, dtype=dtype))


def test_what_multicast_reads_is_kept(gpu: TorchOnGpu, exchanges: list[bool]) -> None:
    """Until it is read, though whoever passed it on has forgotten it."""
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    team = tp.Team(method="multicast")
    whole = integers(4 * team.size, 400)
    carrier = team.carrier_for(whole)
    gpu.synchronize()
    for step in range(4):
        shard = on_host.rows_of(whole, team) + step
        finish = carrier.begin_gather(Rows.of("gather", "", shard), shard)
        del shard
        others = [torch.full((4, 400), 99.0) for _ in range(3)]  # where it was, were it freed
        assert torch.equal(finish(), whole + step)
        assert len(others) == 3
    assert all(exchanges)


def test_multicast_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, exchanges: list[bool]
) -> None:
    """Where it is not wanted, where a GPU has none, or where two ranks have one GPU: the log says so once."""
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    is_last = hvd.rank() == hvd.size() - 1

    def refuse(*_: object) -> None:
        raise RuntimeError("no multicast here")

    for reason, where, name, instead in (
        ("UB_SKIPMC is set", Config, "ub_skip_multicast", property(lambda _: True)),
        (f"rank {hvd.size() - 1}: no multicast here", _native, "Multicast", refuse if is_last else _native.Multicast),
        ("ranks share a GPU", _native, "cuda_device_uuid", lambda _: "the same"),
    ):
        with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "hvdlite"):
            patch.setattr(where, name, instead)
            check_exchanges(tp.Team(method="multicast"), torch.float32, 400)
        said = [record for record in caplog.records if "multicast" in record.message]
        assert [reason in record.message for record in said] == [True] * (hvd.rank() == 0)
        assert all(record.levelno == logging.WARNING for record in said)  # it was asked for
        caplog.clear()
    assert exchanges == []


@pytest.mark.parametrize("fault", ["store", "sum"])
def test_multicast_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """On one rank, which is found out by patterns; all go without."""
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "hvdlite"):
        if hvd.rank() == hvd.size() - 1:
            spread, pull_sums = DeviceCarrier._spread, DeviceCarrier._pull_sums

            def store_something_else(carrier: DeviceCarrier, rows: Rows, source: torch.Tensor, place: Place) -> Moment:
                return spread(carrier, rows, source.zero_(), place)

            def leave_something_out(carrier: DeviceCarrier, rows: Rows, produce: Produce, *rest: Any) -> None:
                kept = produce if carrier._windows.no_multicast else lambda out, begin, onto=None: out.zero_()
                pull_sums(carrier, rows, kept, *rest)

            patch.setattr(DeviceCarrier, "_spread", store_something_else if fault == "store" else spread)
            patch.setattr(DeviceCarrier, "_pull_sums", leave_something_out if fault == "sum" else pull_sums)
        team = tp.Team(method="multicast")
        check_exchanges(team, torch.float32, 400)
    found = "did not arrive" if fault == "store" else "was not added up"
    said = [text for text in caplog.messages if "without multicast" in text]
    assert [found in text for text in said] == [True] * (hvd.rank() == 0)


def test_windows_that_grow_beyond_multicast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, exchanges: list[bool]
) -> None:
    """There may be no more of it: the larger windows do without."""
    if hvd.size() == 1:
        pytest.skip("nothing moves")
    team = tp.Team(method="multicast")
    check_exchanges(team, torch.float32, 400)
    assert all(exchanges)
    exchanges.clear()

    def refuse(*_: object) -> None:
        raise RuntimeError("no more of it")

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "hvdlite"):
        patch.setattr(_native, "Multicast", refuse)
        check_exchanges(team, torch.float32, 200_000)
    said = [text for text in caplog.messages if "go on without multicast: windows of" in text]
    assert len(said) == (hvd.rank() == 0)
    assert not any(exchanges)
