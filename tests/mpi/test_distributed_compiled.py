"""Collectives of process groups inside what torch.compile makes, as whole graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from distributed_lab import RANK, SIZE, net, process_group, trained

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.not_with_three_ranks,
    pytest.mark.skipif(SIZE == 1, reason="two find what one does, and to compile takes long"),
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning", "ignore::DeprecationWarning"),
]


def functional_ones(x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    assert group is not None
    total = functional.all_reduce(x, "sum", group)
    everything = functional.all_gather_tensor(total * x, 0, group)
    share = functional.reduce_scatter_tensor(everything, "avg", 0, group)
    return functional.all_to_all_single(share + x, [1] * SIZE, [1] * SIZE, group)


def in_place_ones(x: torch.Tensor) -> torch.Tensor:
    total = x * 2
    dist.all_reduce(total)
    everything = total.new_empty(SIZE * SIZE)
    dist.all_gather_into_tensor(everything, total * x)
    return everything + 1


def several_at_once_and_messages(x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    assert group is not None
    totals = functional.all_reduce_coalesced([x, x * 2], "sum", group)
    (everything,) = functional.all_gather_into_tensor_coalesced([totals[0]], group)
    (share,) = functional.reduce_scatter_tensor_coalesced([everything], "sum", [0], group)
    of_root = functional.broadcast(share + totals[1] + x, SIZE - 1, group)
    return functional.permute_tensor(of_root + x, [(rank + 1) % SIZE for rank in range(SIZE)], group)


# Inductor, which is the default, compiles C++ of what lies between the collectives, half a minute long.
backends = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])


@backends
@pytest.mark.parametrize("step", [functional_ones, in_place_ones, several_at_once_and_messages])
def test_a_whole_graph_is_what_its_calls_are(step: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    with process_group():
        x = torch.arange(float(SIZE)) + 10 * RANK
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for _ in range(2):
            assert torch.equal(compiled(x), step(x))
        torch._dynamo.reset()


@pytest.mark.parametrize("of_torch", ["hvdlite", "gloo"])
def test_collectives_into_a_given_tensor(of_torch: str) -> None:
    """What torch.compile makes where its settings, as bucket_all_gathers_fx, let it put several together."""
    ops = torch.ops._c10d_functional
    if not hasattr(ops, "reduce_scatter_tensor_out"):
        pytest.skip("this torch has none of both")
    with process_group(backend=of_torch) as group:
        x = torch.arange(float(SIZE)) + 10 * RANK
        everything, share = torch.empty(SIZE * SIZE), torch.empty(1)
        assert ops.wait_tensor(ops.all_gather_into_tensor_out(x, SIZE, group.group_name, out=everything)) is everything
        assert torch.equal(everything, functional.all_gather_tensor(x, 0, group))
        assert ops.wait_tensor(ops.reduce_scatter_tensor_out(x, "max", SIZE, group.group_name, out=share)) is share
        assert share.item() == RANK + 10 * (SIZE - 1)


@pytest.mark.parametrize("of_torch", ["hvdlite", "gloo"])
def test_whether_a_call_is_done_is_no_constant_of_what_is_compiled(of_torch: str) -> None:
    """Else a loop until it is done would be traced for ever."""
    with process_group(backend=of_torch):
        work = dist.barrier(async_op=True)
        asks = torch.compile(lambda x: x + work.is_completed(), fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.Unsupported):
            asks(torch.ones(1))
        work.wait()
        torch._dynamo.reset()


def messages(x: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(x)
    following, preceding = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    batch = [dist.P2POp(dist.isend, x * 2, following), dist.P2POp(dist.irecv, received, preceding)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return received + 1


@pytest.mark.parametrize("of_torch", ["hvdlite", "gloo"])
def test_a_batch_of_messages_is_called_by_what_is_compiled(of_torch: str) -> None:
    with process_group(backend=of_torch):
        x = torch.arange(4.0) + RANK
        assert torch.equal(torch.compile(messages, backend="aot_eager")(x), messages(x))
        torch._dynamo.reset()


def by_ddp(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model)


def by_fsdp2(model: torch.nn.Module) -> torch.nn.Module:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("fully_shard is public from torch 2.6 on")
    return fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (SIZE,)))


@backends
@pytest.mark.parametrize("wrap", [by_ddp, by_fsdp2])
def test_a_compiled_model_trains_as_it_does_otherwise(
    wrap: Callable[[torch.nn.Module], torch.nn.Module], backend: str
) -> None:
    with process_group():
        plain, compiled = wrap(net()), wrap(net())
        trained(plain, lambda tensor: tensor)
        trained(torch.compile(compiled, backend=backend), lambda tensor: tensor)
        for own, other in zip(compiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, other)
        torch._dynamo.reset()
