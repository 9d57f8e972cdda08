"""torch.distributed over hvdlite on tensors of a simulated GPU, where a wait that is missing is NaN."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdlite.device_engine
import test_distributed as calls
import test_distributed_reductions as reductions
from cuda_distributed import BucketsOnGpu, on_gpu
from cuda_torch import TorchOnGpu
from distributed_lab import NODES, RANK, SIZE, net, of_rank, process_group, told, total, trained
from hvdlite.errors import CollectiveError, HorovodInternalError, MismatchError, StallError
from hvdlite.liveness.health import Health
from hvdlite.liveness.sentinel_messages import Failed

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.not_with_three_ranks,
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning", "ignore:Sparse invariant checks"),
]
LAST = SIZE - 1


@pytest.fixture(autouse=True)
def gpu() -> Iterator[TorchOnGpu]:
    """All tensors are there; kernels come late, in another order on each rank."""
    with on_gpu(seed=RANK, late=0.05, everywhere=True) as found:
        yield found


@pytest.fixture(params=NODES, ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    with process_group(request.param) as group:
        yield group


@pytest.fixture
def node() -> Iterator[dist.ProcessGroup]:
    with process_group() as group:
        yield group


@contextmanager
def held(gpu: TorchOnGpu) -> Iterator[Callable[[], None]]:
    """The current stream does nothing until what this returns is called, at last at the end of the block."""
    gate = threading.Event()
    gpu.cuda.launch(gpu.stream, lambda: gate.wait(60))
    try:
        yield gate.set
    finally:
        gate.set()


# The order of streams.


@pytest.mark.parametrize("is_async", [False, True])
def test_no_call_waits_for_a_gpu(node: dist.ProcessGroup, gpu: TorchOnGpu, is_async: bool) -> None:
    tensor = of_rank(RANK, 700)
    with held(gpu) as let_go:
        work = node.allreduce([tensor])
        if is_async:
            future = work.get_future()
            future.wait()
        work.wait()
        told(None)  # all are here, and no GPU has begun
        assert not work.is_completed()
        let_go()
        assert torch.equal(tensor, total(700))  # which waits for the current stream alone
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None


def test_the_result_is_there_for_streams_that_wait(node: dist.ProcessGroup, gpu: TorchOnGpu) -> None:
    found = torch.empty(SIZE * 700)
    mine = of_rank(RANK, 700)
    expected = torch.cat([of_rank(rank, 700) for rank in range(SIZE)])
    other = gpu.cuda.stream()
    with held(gpu) as let_go:
        work = dist.all_gather_into_tensor(found, mine, async_op=True)
        assert work is not None
        with gpu.on(other):
            assert torch.isnan(found).all()  # read too early
            work.wait()
            let_go()
            assert torch.equal(found, expected)


def test_memory_lives_until_the_stream_has_passed(node: dist.ProcessGroup, gpu: TorchOnGpu) -> None:
    other = gpu.cuda.stream()
    for numel in (9, 700, 20_000):
        works, results = [], []
        with held(gpu):
            for number in range(6):
                results.append(torch.empty(numel * SIZE))
                mine = of_rank(RANK, numel)
                works.append(dist.all_gather_into_tensor(results[-1], mine, async_op=True))
                del mine
                dist.all_reduce(torch.ones(numel), async_op=True)  # of nobody
                if number % 2:
                    with gpu.on(other):  # which is not that of the memory
                        works[-1].wait()  # type: ignore[union-attr]
                torch.full((numel,), 7.0)  # gets that memory, if it is free
        for work, result in zip(works, results, strict=True):
            assert work is not None
            work.wait()
            assert torch.equal(result, torch.cat([of_rank(rank, numel) for rank in range(SIZE)]))


def test_futures(node: dist.ProcessGroup) -> None:
    tensor = torch.ones(1000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(4)]
    future = works[2].get_future().then(lambda done: done.value()[0].numel())  # type: ignore[union-attr]
    assert works[3].get_future().wait()[0] is tensor  # type: ignore[union-attr]
    assert torch.equal(tensor, torch.full((1000,), float(SIZE**4)))
    assert future.wait() == 1000


def test_a_wait_with_a_timeout_is_for_the_gpu(node: dist.ProcessGroup, gpu: TorchOnGpu) -> None:
    tensor = torch.ones(5)
    with held(gpu) as let_go:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        with pytest.raises(CollectiveError, match="all_reduce of process group .* after the timeout of 0.05 s of its"):
            work.wait(timedelta(seconds=0.05))
        let_go()
        work.wait(timedelta(seconds=60))
        assert work.is_completed()
    assert tensor[0] == SIZE


def test_a_barrier_is_of_gpus_too(node: dist.ProcessGroup, gpu: TorchOnGpu) -> None:
    """Of what the group has been given, and of what the current stream has."""
    gone: list[str] = []
    for what in ("group", "current stream"):
        with held(gpu) as let_go:
            if what == "group":
                work = dist.all_reduce(torch.ones(5), async_op=True)
            threading.Timer(0.1 * (RANK + 1), lambda go, what: (gone.append(what), go()), (let_go, what)).start()
            with gpu.on(gpu.cuda.stream()) if what == "group" else nullcontext():
                dist.barrier()
            assert gone[-1:] == [what]
    assert work is not None
    assert work.is_completed()


def test_what_is_coalesced_is_waited_for(node: dist.ProcessGroup, gpu: TorchOnGpu) -> None:
    tensors, expected = ([of_rank(rank, numel) for numel in (700, 9)] for rank in (RANK, LAST))
    gpu.synchronize()
    with held(gpu) as let_go:
        with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:
            for tensor in tensors:
                dist.broadcast(tensor, LAST, async_op=True)
        (work,) = manager.works
        with gpu.on(gpu.cuda.stream()):
            manager.wait()
            assert not work.is_completed()
            let_go()
            assert all(map(torch.equal, tensors, expected))
    assert work.is_success()


# Messages.


def test_messages(node: dist.ProcessGroup, gpu: TorchOnGpu) -> None:
    following, previous = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for numel in (0, 1, 700, 50_000):
        tensor = torch.empty(numel)
        gpu.cuda.launch(gpu.stream, lambda: None, delay_s=0.005)
        mine = of_rank(RANK, numel)
        sent = dist.isend(mine, following)
        mine.fill_(7.0)  # it has been read
        dist.recv(tensor, previous)
        sent.wait()  # type: ignore[union-attr]
        assert torch.equal(tensor, of_rank(previous, numel)), numel
    operations = [
        dist.P2POp(dist.isend, of_rank(RANK, 9), following),
        dist.P2POp(dist.irecv, tensor := torch.empty(9), previous),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(tensor, of_rank(previous, 9))


def test_a_message_comes_after_what_the_stream_does_before(node: dist.ProcessGroup, gpu: TorchOnGpu) -> None:
    """And memory on its way is that of one message."""
    found = [torch.ones(700), torch.ones(700)]
    messages = [of_rank(RANK + tag, 700).cpu() for tag in range(2)]  # which would wait for the stream
    with held(gpu) as let_go:
        for tensor in found:
            tensor.fill_(7.0)
        works = [dist.irecv(tensor, RANK, tag=tag) for tag, tensor in enumerate(found)]
        for tag, message in enumerate(messages):
            node.send([message], RANK, tag)
        for work in works:
            work.wait()  # type: ignore[union-attr]
            assert not work.is_completed()  # type: ignore[union-attr]
        let_go()
        assert all(torch.equal(tensor, of_rank(RANK + tag, 700)) for tag, tensor in enumerate(found))


@pytest.mark.skipif(SIZE == 1, reason="nobody to send")
def test_messages_between_host_and_gpu(node: dist.ProcessGroup) -> None:
    for to_gpu in (True, False):
        if RANK == 0:
            dist.send(of_rank(0, 700).cpu() if to_gpu else of_rank(0, 700), LAST)
        if RANK == LAST:
            tensor = torch.zeros(700)
            tensor = tensor if to_gpu else tensor.cpu()
            assert dist.recv(tensor) == 0
            assert torch.equal(tensor.cpu(), of_rank(0, 700).cpu())


# What cannot be done, or not by GPUs.


def test_gpus_that_cannot_work_together(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are asked for passes through the host."""
    monkeypatch.setattr(hvdlite.device_engine, "build", lambda *_: None)
    for part in (calls.test_uneven_shares, reductions.test_other_reductions, calls.test_memory_that_is_not_contiguous):
        part(group)


@pytest.mark.skipif(SIZE == 1, reason="nobody to contradict")
def test_ranks_that_are_on_the_host_and_on_a_gpu(node: dist.ProcessGroup) -> None:
    tensor = torch.ones(3)
    with pytest.raises(
        MismatchError, match=f"device is a GPU on .* but the CPU on rank {LAST}|device is a GPU on rank"
    ):
        dist.all_reduce(tensor.cpu() if RANK == LAST else tensor)
    assert tensor.tolist() == [1.0] * 3
    dist.all_reduce(tensor)
    assert tensor.tolist() == [SIZE] * 3


def test_what_is_refused(node: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="on the host and on a GPU"):
        dist.all_gather_into_tensor(torch.ones(3 * SIZE), torch.ones(3).cpu())
    with pytest.raises(ValueError, match="takes dense tensors"):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (3,)))
    with pytest.raises(ValueError, match="takes contiguous tensors"):
        dist.irecv(torch.ones(3, 2).t(), 0)


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
def test_a_gpu_that_does_not_come(gpu: TorchOnGpu) -> None:
    with process_group(timeout_s=1.0) as group:
        dist.all_reduce(torch.ones(3))
        told(None)
        with held(gpu) if RANK == LAST else nullcontext():
            work = dist.all_reduce(torch.ones(300), async_op=True)
            assert work is not None
            work.wait()  # it is enqueued
            if RANK != LAST:
                gpu.synchronize()  # streams are let go
            with pytest.raises(HorovodInternalError, match="all_reduce .* has not done it within the timeout of 1 s"):
                until_it_fails(group)
            with pytest.raises(HorovodInternalError):
                work.wait()
            told(None)
    assert not work.is_success()
    assert work.exception() is not None


@pytest.mark.skipif(SIZE == 1, reason="nobody to hear it from")
def test_a_stream_that_was_let_go_by_a_rank_which_knew_of_the_failure_first(
    gpu: TorchOnGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank hears of it after its stream has gone on."""
    may_hear, learn = threading.Event(), Health._learn

    def late(health: Health, failed: Failed) -> None:
        if RANK == LAST:
            may_hear.wait(60)
        learn(health, failed)

    monkeypatch.setattr(Health, "_learn", late)
    with process_group() as group:
        dist.all_reduce(torch.ones(3))
        told(None)
        with held(gpu) if RANK == 0 else nullcontext():
            work = dist.all_reduce(torch.ones(300), async_op=True)
            assert work is not None
            work.wait()  # it is enqueued
            told(None)
            if RANK == 0:
                group.membership.health.report(StallError("a rank is late"))  # type: ignore[attr-defined]
            else:
                gpu.synchronize()  # streams are let go
            threading.Timer(0.2, may_hear.set).start()
            with pytest.raises(HorovodInternalError, match="a rank is late"):
                work.wait()
            assert not work.is_success()
            assert work.exception() is not None
            told(None)


@pytest.mark.skipif(len(NODES) == 1, reason="one node")
def test_a_gpu_of_another_node_that_does_not_come(gpu: TorchOnGpu) -> None:
    """The host of its rank, which is to send what it has, waits for it, and others wait for that."""
    with process_group(NODES[-1], timeout_s=1.0) as group:
        dist.all_reduce(torch.ones(3))
        told(None)
        with held(gpu) if RANK == LAST else nullcontext():
            with suppress(HorovodInternalError):
                dist.all_reduce(torch.ones(300))
            with pytest.raises(HorovodInternalError, match="all_reduce.* a GPU has not done it within the timeout"):
                until_it_fails(group)
            told(None)


def until_it_fails(group: dist.ProcessGroup) -> None:
    while True:
        group.membership.check()  # type: ignore[attr-defined]
        time.sleep(0.01)


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
def test_a_rank_that_does_not_come() -> None:
    with process_group(timeout_s=0.3):
        if RANK != LAST:
            with pytest.raises(HorovodInternalError, match=f"rank {LAST} did not come within the timeout of 0.3 s"):
                dist.all_reduce(torch.ones(3))
        told(None)


def test_a_group_that_ends_with_calls_under_way(gpu: TorchOnGpu) -> None:
    with process_group(), held(gpu) as let_go:
        tensors = [of_rank(RANK, 700) for _ in range(4)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        threading.Timer(0.1, let_go).start()
    for work, tensor in zip(works, tensors, strict=True):
        assert work is not None
        assert work.is_completed()
        gpu.synchronize()
        assert torch.equal(tensor, total(700))


def test_the_backend_may_be_named_for_both() -> None:
    with process_group(backend="cpu:hvdlite,cuda:hvdlite"):
        for tensor in (torch.ones(3), torch.ones(3).cpu()):
            dist.all_reduce(tensor)
            assert tensor[0] == SIZE


# Training.


@pytest.mark.skipif(SIZE == 1, reason="nobody to train with")
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, {"find_unused_parameters": True}],
    ids=["default", "views in small buckets", "unused parameters"],
)
def test_ddp_is_that_on_the_host(gpu: TorchOnGpu, node: dist.ProcessGroup, options: dict[str, Any]) -> None:
    gpu.everywhere = False
    host, device = net(), net().cuda()
    trained(DistributedDataParallel(host, **options), torch.Tensor.cpu)
    with BucketsOnGpu(gpu):
        trained(DistributedDataParallel(device, **options), torch.Tensor.cuda)
    for on_device, on_host in zip(device.parameters(), host.parameters(), strict=True):
        assert on_device.is_cuda
        assert torch.equal(on_device.detach().cpu(), on_host.detach())
