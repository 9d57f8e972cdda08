"""Process groups on GPUs: every call, the order of torch's streams and futures, DDP, and FSDP2 with its streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hvdlite.distributed
import hvdlite.torch as hvd
from gpu_lab import Gpu, of_rank
from test_with_torch import batches, exact, new_model, same_parameters

assert exact  # products in float32, here too
assert hvdlite.distributed  # registers the backend
pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")
SHAPES = [(0,), (3,), (700,), (300_001,)]


@pytest.fixture(scope="module", autouse=True)
def group(cuda: Gpu) -> Iterator[dist.ProcessGroup]:
    if hvd.size() > 1:
        dist.init_process_group("hvdlite")
    else:  # nobody has launched it
        dist.init_process_group("hvdlite", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def of_each(shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [of_rank(rank, shape) for rank in range(dist.get_world_size())]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_call(cuda: Gpu, shape: tuple[int, ...]) -> None:
    rank, size, each = dist.get_rank(), dist.get_world_size(), of_each(shape)
    mine, whole = (cuda.late(of_rank(rank, shape)) for _ in range(2))
    wholes = torch.cat(each)
    dist.all_reduce(mine)
    assert torch.equal(mine.cpu(), torch.stack(each).sum(0))
    dist.broadcast(whole, size - 1)
    assert torch.equal(whole.cpu(), each[-1])
    found = torch.empty(wholes.shape, device=cuda.where)
    dist.all_gather_into_tensor(found, cuda.late(of_rank(rank, shape)))
    assert torch.equal(found.cpu(), wholes)
    listed = [torch.empty(shape, device=cuda.where) for _ in range(size)]
    dist.all_gather(listed, cuda.late(of_rank(rank, shape)))
    assert all(torch.equal(part.cpu(), theirs) for part, theirs in zip(listed, each, strict=True))
    share = torch.empty(shape, device=cuda.where)
    dist.reduce_scatter_tensor(share, cuda.late(wholes), dist.ReduceOp.AVG)
    assert torch.equal(share.cpu(), each[rank])
    dist.all_to_all_single(found, cuda.late(of_rank(rank, shape).repeat(size)))
    assert torch.equal(found.cpu(), wholes)
    sent = dist.isend(cuda.late(of_rank(rank, shape)), (rank + 1) % size)
    dist.recv(share, (rank - 1) % size)
    assert torch.equal(share.cpu(), each[rank - 1])
    assert sent is not None
    sent.wait()
    dist.barrier()


def test_the_order_of_streams(cuda: Gpu) -> None:
    """Of a stream that waits, of a future's callback, and of memory that its owner has dropped."""
    shape = (300_001,)
    total = torch.stack(of_each(shape)).sum(0)
    for waits_by in ("work", "future", "callback"):
        tensor = cuda.late(of_rank(dist.get_rank(), shape))
        dist.all_reduce(cuda.late(torch.ones(shape)), async_op=True)  # of nobody
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        with cuda.side_stream():
            if waits_by == "work":
                work.wait()
                result = tensor + 1
            elif waits_by == "future":
                result = work.get_future().wait()[0] + 1
            else:
                result = work.get_future().then(lambda done: done.value()[0] + 1).wait()
            assert torch.equal(result.cpu(), total + 1), waits_by
        assert work.is_completed()


def trained(model: torch.nn.Module, where: torch.device, share: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(where):
        optimizer.zero_grad()
        cross_entropy(model(share(x)), share(y)).backward()
        optimizer.step()


def own(rows: torch.Tensor) -> torch.Tensor:
    return rows[dist.get_rank() :: dist.get_world_size()]


@pytest.mark.parametrize("in_place", [False, True])
def test_ddp_is_one_process(cuda: Gpu, in_place: bool) -> None:
    alone, model = new_model(cuda.where), new_model(cuda.where)
    trained(alone, cuda.where, lambda rows: rows)
    ddp = DistributedDataParallel(model, device_ids=[cuda.where], gradient_as_bucket_view=in_place, bucket_cap_mb=1)
    trained(ddp, cuda.where, own)
    same_parameters(model, alone)


def test_fsdp2_is_one_process(cuda: Gpu) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    alone, model = new_model(cuda.where), new_model(cuda.where)
    trained(alone, cuda.where, lambda rows: rows)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    assert isinstance(model, torch.nn.Sequential)
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh)
    trained(model, cuda.where, own)
    for parameter, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), wanted, rtol=1e-3, atol=1e-5)
