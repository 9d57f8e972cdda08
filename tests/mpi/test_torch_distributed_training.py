"""What trains over torch.distributed comes to the same over hvdlite as over Gloo: DDP, FSDP2, DTensor, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from hvdlite import launched

process = launched.this_process()
if process is None or process.size == 1:
    pytest.skip("one rank has nobody to communicate with", allow_module_level=True)
pytest.importorskip("torch.distributed.tensor", reason="DTensor is public from torch 2.5 on")
fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("fully_shard is public from torch 2.6 on", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hvdlite.distributed  # noqa: E402, F401 (registers the backend)

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]

WIDTH = 12
STEPS = 3
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Groups:
    """Two process groups of all ranks."""

    hvdlite: dist.ProcessGroup
    gloo: dist.ProcessGroup

    def both(self, train: Callable[[dist.ProcessGroup], Weights], **tolerances: float) -> None:
        """What ``train`` returns must be the same over both groups, to rounding, and on all ranks, to the bit."""
        own, reference = train(self.hvdlite), train(self.gloo)
        assert own.keys() == reference.keys()
        for name, value in own.items():
            torch.testing.assert_close(
                value, reference[name], **tolerances, msg=lambda text, name=name: f"{name}: {text}"
            )
            everywhere = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, value, group=self.gloo)
            assert all(torch.equal(other, value) for other in everywhere), name


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    dist.init_process_group("hvdlite")
    assert dist.get_backend() == "hvdlite"
    everybody = dist.group.WORLD
    assert everybody is not None
    yield Groups(everybody, dist.new_group(backend="gloo"))
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Sequential):
    """Its last bias has 5 elements, which no number of ranks but 1 and 5 divides."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Block(), Block(), nn.Linear(WIDTH, 5))


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's own, or that of all alike."""
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, 5, generator=generator)


def whole(model: nn.Module) -> Weights:
    """All parameters, gathered where they are sharded."""
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found


def with_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, alike: bool = False, clip: bool = False
) -> None:
    if optimizer is None:
        _, optimizer = with_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, 0 if alike else None)
        mse_loss(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


DDPS: dict[str, dict[str, Any]] = {
    "default": {},
    "views in small buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


@pytest.mark.parametrize("options", DDPS.values(), ids=DDPS.keys())
def test_ddp(groups: Groups, options: dict[str, Any]) -> None:
    def train(group: dist.ProcessGroup) -> Weights:
        model = DistributedDataParallel(Net(), process_group=group, **options)
        steps(model, clip=True)
        return whole(model)

    groups.both(train)


def test_ddp_with_accumulated_gradients_buffers_and_half_precision_on_the_wire(groups: Groups) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def train(group: dist.ProcessGroup) -> Weights:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
        model = DistributedDataParallel(net, process_group=group)
        model.register_comm_hook(group, fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2 * STEPS):
            with model.no_sync() if step % 2 == 0 else nullcontext():
                x, y = batch(step)
                mse_loss(model(x), y).backward()
            if step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        for value in buffers.values():
            dist.broadcast(value, 0, group=group)  # as the next forward would
        return whole(model) | buffers

    # Half precision shows in the third digit in which order three and more ranks are added.
    tolerances = {} if dist.get_world_size() <= 2 else {"rtol": 1e-2, "atol": 1e-2}
    groups.both(train, **tolerances)


def test_ddp_by_power_sgd_in_several_buckets(groups: Groups) -> None:
    """Its callbacks call the group between the buckets. Over Gloo they wait for one another."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 32), *(nn.Linear(32, 32) for _ in range(8)), nn.Linear(32, 5))
    model = DistributedDataParallel(net, process_group=groups.hvdlite, bucket_cap_mb=0.005)
    model.register_comm_hook(PowerSGDState(groups.hvdlite, start_powerSGD_iter=2), powerSGD_hook)
    for _ in range(5):
        steps(model)
    for name, value in whole(model).items():
        everywhere = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, value, group=groups.gloo)
        assert all(torch.equal(other, value) for other in everywhere), name


@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those that are left"])
def test_ddp_with_uneven_inputs(groups: Groups, by_all: bool) -> None:
    """Averaged by all ranks, or by those that are left."""

    def train(group: dist.ProcessGroup) -> Weights:
        model = DistributedDataParallel(Net(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=by_all):
            for step in range(STEPS + dist.get_rank()):
                optimizer.zero_grad()
                x, y = batch(step)
                mse_loss(model(x), y).backward()
                optimizer.step()
        return whole(model)

    groups.both(train)


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = Net()
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh, **options)
    return fsdp.fully_shard(model, mesh=mesh, **options)


FSDPS: dict[str, dict[str, Any]] = {
    "default": {},
    "sharded between steps only": {"reshard_after_forward": False},
    "gradients in float64": {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    "parameters in bfloat16": {
        "mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    },
    "offloaded to the host": {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize("options", FSDPS.values(), ids=FSDPS.keys())
def test_fsdp2(groups: Groups, options: dict[str, Any]) -> None:
    def train(group: dist.ProcessGroup) -> Weights:
        model = sharded(DeviceMesh.from_group(group, "cpu"), **options)
        steps(model, clip=True)
        return whole(model)

    groups.both(train)


@pytest.mark.skipif(
    not hasattr(fsdp.FSDPModule, "set_allocate_memory_from_process_group_for_comm"), reason="older torch has none"
)
def test_fsdp2_asks_the_group_for_memory(groups: Groups) -> None:
    def train(group: dist.ProcessGroup) -> Weights:
        model = sharded(DeviceMesh.from_group(group, "cpu"))
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(enable=True)
        steps(model)
        return whole(model)

    groups.both(train)


def test_fsdp2_in_two_dimensions(groups: Groups) -> None:
    """Sharded between pairs of ranks, replicated across them (HSDP)."""
    ranks = dist.get_world_size()
    if ranks % 2:
        pytest.skip("with an even number of ranks")
    pairs = torch.arange(ranks).view(-1, 2)

    def train(group: dist.ProcessGroup) -> Weights:
        backend = dist.get_backend(group)
        across, _ = dist.new_subgroups_by_enumeration(pairs.T.tolist(), backend=backend)
        within, _ = dist.new_subgroups_by_enumeration(pairs.tolist(), backend=backend)
        names = ("replicate", "shard")
        model = sharded(DeviceMesh.from_group([across, within], "cpu", mesh=pairs, mesh_dim_names=names))
        steps(model)
        return whole(model)

    groups.both(train)


def test_tensor_parallel_by_dtensor(groups: Groups) -> None:
    """As over Gloo, and as one process does it."""
    ranks = dist.get_world_size()
    x = torch.randn(2 * ranks, WIDTH, generator=torch.Generator().manual_seed(5))
    plan = {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }

    def train(group: dist.ProcessGroup | None) -> Weights:
        torch.manual_seed(0)
        model, own = nn.Sequential(Block(), Block()), x
        if group is not None:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in model:
                parallelize_module(layer, mesh, plan)
            own = distribute_tensor(x, mesh, [Shard(0)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(own).square().mean().backward()
            optimizer.step()
        return whole(model)

    groups.both(train)
    alone = train(None)
    for name, value in train(groups.hvdlite).items():
        torch.testing.assert_close(value, alone[name])


@pytest.mark.parametrize("target", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("source", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_dtensor_is_redistributed(groups: Groups, source: Any, target: Any) -> None:
    """Rows and columns that the ranks do not divide, too."""
    mesh = DeviceMesh.from_group(groups.hvdlite, "cpu")
    full = torch.arange(35.0).view(5, 7)
    if source == Partial():
        tensor = DTensor.from_local(full.clone(), mesh, [source])
        full = full * dist.get_world_size()
    else:
        tensor = distribute_tensor(full, mesh, [source])
    moved = tensor.redistribute(mesh, [target])
    assert torch.equal(moved.full_tensor(), full)
    assert torch.equal(moved.to_local(), distribute_tensor(full, mesh, [target]).to_local())


def test_dtensor_is_redistributed_in_two_dimensions(groups: Groups) -> None:
    ranks = dist.get_world_size()
    if ranks % 2:
        pytest.skip("with an even number of ranks")
    mesh = dist.init_device_mesh("cpu", (2, ranks // 2))
    whole = torch.arange(35.0).view(5, 7)
    plain, rows, columns = Replicate(), Shard(0), Shard(1)
    for source in product((plain, rows, columns, Partial()), repeat=2):
        if Partial() in source:
            tensor, full = DTensor.from_local(whole.clone(), mesh, [Partial(), Partial()]), whole * ranks
            tensor = tensor.redistribute(mesh, source)
        else:
            tensor, full = distribute_tensor(whole, mesh, source), whole
        for target in ((plain, plain), (rows, columns), (columns, rows), (rows, rows), (plain, columns)):
            moved = tensor.redistribute(mesh, target)
            assert torch.equal(moved.full_tensor(), full), (source, target)
            assert torch.equal(moved.to_local(), distribute_tensor(full, mesh, target).to_local()), (source, target)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(groups: Groups, tmp_path: Path, change: int) -> None:
    """With the state of the optimizer, by one rank less or more; these train on to what no checkpoint would change."""
    place = [str(tmp_path)]
    dist.broadcast_object_list(place, 0)
    everybody = dist.get_world_size()
    some = dist.new_group(range(everybody - 1))  # over hvdlite, as the default group
    savers, loaders = (groups.hvdlite, some) if change < 0 else (some, groups.hvdlite)
    expected, optimizer = with_optimizer(Net())
    steps(expected, optimizer, alike=True)
    steps(expected, optimizer, alike=True)

    if isinstance(savers, dist.ProcessGroup):
        saved, optimizer = with_optimizer(sharded(DeviceMesh.from_group(savers, "cpu")))
        steps(saved, optimizer, alike=True)
        dcp.save(state_of(saved, optimizer), checkpoint_id=place[0], process_group=savers)
    dist.barrier()
    if isinstance(loaders, dist.ProcessGroup):
        loaded, optimizer = with_optimizer(sharded(DeviceMesh.from_group(loaders, "cpu")))
        state = state_of(loaded, optimizer)
        dcp.load(state, checkpoint_id=place[0], process_group=loaders)
        set_state_dict(loaded, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        steps(loaded, optimizer, alike=True)
        found = whole(loaded)
        for name, value in whole(expected).items():
            torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
    dist.barrier()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}
