"""What DistributedOptimizer accepts, and how it says no."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hvdlite.torch as hvd
from fake_world import FakeWorld, Universe
from hvdlite.errors import NotInitializedError, UsageError


@pytest.fixture(autouse=True)
def world(universe: Universe) -> FakeWorld:
    return universe.start(2)


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))


def wrap(model: torch.nn.Module, **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


@pytest.mark.parametrize(
    "named",
    [lambda m: list(m.parameters()), lambda m: [("weight",)], lambda m: [("weight", 1.0)], lambda m: m.state_dict()],
)
def test_named_parameters_must_be_pairs(model: torch.nn.Module, named: Any) -> None:
    with pytest.raises(ValueError, match=r"model\.named_parameters\(\)"):
        wrap(model, named_parameters=named(model))


def test_duplicate_names_are_listed(model: torch.nn.Module) -> None:
    named = [(name.split(".")[1], parameter) for name, parameter in model.named_parameters()]
    with pytest.raises(ValueError, match="weight, bias"):
        wrap(model, named_parameters=named)


def test_a_parameter_without_name_is_described(model: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match=r"parameter 2 of group 0, of shape \(1, 4\)"):
        wrap(model, named_parameters=model[0].named_parameters())


def test_more_names_than_parameters_are_fine(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@pytest.mark.parametrize("passes", [0, -1, "2", 2.0])
def test_backward_passes(model: torch.nn.Module, passes: Any) -> None:
    with pytest.raises(ValueError, match=f"backward_passes_per_step is {passes!r}"):
        wrap(model, backward_passes_per_step=passes)
    with pytest.raises(ValueError, match=f"backward_passes_per_step is {passes!r}"):
        wrap(model).backward_passes_per_step = passes


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"gradient_predivide_factor": 0.0}, "above 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Adasum}, "gradient_predivide_factor"),
        ({"groups": -1}, "groups is -1"),
        ({"groups": [[1.0]]}, "lists of parameters"),
        ({"groups": [torch.ones(1)]}, "lists of parameters"),
        ({"process_set": None}, "global_process_set"),
    ],
)
def test_arguments_that_make_no_sense(model: torch.nn.Module, arguments: dict[str, Any], text: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(optimizer, **arguments)
    assert type(optimizer) is torch.optim.SGD  # as it was
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.parametrize("op", [6, True, "sum", hvd.Sum + 0.0])
def test_an_op_that_is_none(model: torch.nn.Module, op: Any) -> None:
    with pytest.raises(UsageError, match="pass hvd.Average"):
        wrap(model, op=op)


def test_a_parameter_in_two_groups(model: torch.nn.Module) -> None:
    weight = model[0].weight
    for groups in ([[weight], [weight]], [[weight, weight]]):
        with pytest.raises(ValueError, match=r"'0\.weight' several times"):
            wrap(model, named_parameters=model.named_parameters(), groups=groups)


def test_num_groups_is_deprecated(model: torch.nn.Module, world: FakeWorld) -> None:
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = wrap(model, num_groups=3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert len(world.buckets) == 3


def test_adasum_of_a_part_of_the_ranks(model: torch.nn.Module) -> None:
    """Of three ranks: tests/mpi/test_adasum.py."""
    with pytest.raises(NotImplementedError, match="global process set"):
        wrap(model, op=hvd.Adasum, process_set=hvd.ProcessSet([0]))


def test_wrapping_twice(model: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(wrap(model))


def test_parameters_that_cannot_travel() -> None:
    for tensor, text in [
        (torch.ones(1, dtype=torch.complex64), "complex64; make a real one"),
        (torch.ones(1).to(torch.float8_e4m3fn), "float8_e4m3fn; keep a wider one"),
        (torch.ones(1, device="meta"), "CPU"),
    ]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(tensor)], lr=0.1)
        with pytest.raises(ValueError, match=rf"parameter 'group0\.0'.*{text}"):
            hvd.DistributedOptimizer(optimizer)


def test_parameters_of_a_ddp_module_are_refused(model: torch.nn.Module) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapper = torch.nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ValueError, match="wrapped by torch's DistributedDataParallel, which .* Use one of the two"):
            wrap(model)
        wrap(torch.nn.Linear(2, 2))  # another model's
        del wrapper
        wrap(model)
    finally:
        dist.destroy_process_group()


def test_an_optimizer_is_wrapped_once(model: torch.nn.Module) -> None:
    optimizer = wrap(model)
    with pytest.raises(
        ValueError, match=r"is a hvd\.DistributedOptimizer already, and would reduce every gradient twice"
    ):
        hvd.DistributedOptimizer(optimizer, op=hvd.Sum)


@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [
        (None, {}, "optimizer is a Sequential; pass a torch.optim.Optimizer, as in "),
        (torch.optim.SGD, {"named_parameters": torch.nn.Linear(1, 1)}, "pass model.named_parameters()"),
        (torch.optim.SGD, {"compression": "fp16"}, "compression is 'fp16'; pass hvd.Compression.none, fp16 or bf16"),
        (torch.optim.SGD, {"compression": "fp16", "op": hvd.Adasum}, "compression is 'fp16'; pass hvd.Compression"),
    ],
)
def test_arguments_of_the_wrong_kind(model: torch.nn.Module, optimizer: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hvd.DistributedOptimizer(model if optimizer is None else optimizer(model.parameters(), lr=0.1), **options)


def test_two_optimizers_of_one_model(model: torch.nn.Module) -> None:
    """While both live, and one of them is not stepped."""
    first = wrap(model, named_parameters=model.named_parameters())
    second = wrap(model, named_parameters=model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    second.step()
    words = r"two DistributedOptimizers have the parameter '0\.weight'.*Keep one for all steps; or delete the first"
    with pytest.raises(UsageError, match=words):
        first.zero_grad()
    with pytest.raises(UsageError, match=words):
        model(torch.ones(1, 3)).sum().backward()
    kept = first._hvd_reducer  # by a traceback, say
    del first
    second = wrap(model)
    for _ in range(3):
        second.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        second.step()
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UsageError, match=r"was computed 2 times before"):
        model(torch.ones(1, 3)).sum().backward()
    assert kept.arrival.shared_parameter() is not None  # it would say so, had it hooks


def test_parameters_that_fsdp_has_sharded_are_refused(model: torch.nn.Module) -> None:
    """They, and their gradients, have no memory of their own."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")  # slow
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has it in another place; 2.6 and later have it there")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"wrapped by torch's fully_shard\(\), which .* Use one of the two"):
            wrap(model, named_parameters=model.named_parameters())
        with pytest.raises(ValueError, match=r"'t': a DTensor without memory of its own; pass tensor\.to_local\(\)"):
            hvd.allreduce(model[0].weight, name="t")
        local = model[0].weight.to_local().detach()
        assert torch.equal(hvd.allreduce(local, op=hvd.Sum), 3 * local)  # of this rank and one that has twice as much
    finally:
        dist.destroy_process_group()


def test_integer_parameters_are_left_alone(world: FakeWorld) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    scales = torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([scales, weight], lr=0.1))
    weight.sum().backward()
    optimizer.step()
    assert world.buckets[0].shapes == [(2,)]


@pytest.mark.parametrize("named", [True, False])
def test_names_of_parameters(model: torch.nn.Module, named: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"named_parameters": model.named_parameters()} if named else {}
    names = hvd.DistributedOptimizer(optimizer, **arguments)._parameter_names
    assert list(names) == list(model.parameters())
    expected = [name for name, _ in model.named_parameters()]
    assert list(names.values()) == (expected if named else [f"group0.{i}" for i in range(len(expected))])


def test_before_init(universe: Universe, model: torch.nn.Module) -> None:
    universe.end()
    with pytest.raises(NotInitializedError, match="init"):
        wrap(model)
