"""DistributedOptimizer among the rest of torch: classes, hooks, schedulers, pickles, closures, mixed precision.

Every optimizer of torch, and the documented orders of clipping and unscaling: tests/mpi/test_optimizer_in_torch.py.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import hvdlite.torch as hvd
from fake_world import FakeWorld, Universe

FACTOR = 2.0  # of the average of 3 ranks


@pytest.fixture(autouse=True)
def world(universe: Universe) -> FakeWorld:
    return universe.start(3)


class Odd(torch.optim.Optimizer):
    """A user's optimizer: other arguments, no closure, attributes of its own."""

    def __init__(self, step_size: float, *, params: Any, extra: str) -> None:
        super().__init__(params, {"step_size": step_size})
        self.extra = extra

    @torch.no_grad()
    def step(self) -> str:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["step_size"] * p.grad
        return self.extra


def model_of_ones() -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()  # the gradient is 1 everywhere


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: Odd(0.1, params=p, extra="x"),
    ],
    ids=["SGD", "AdamW", "Odd"],
)
def test_is_its_own_class_and_steps_like_it(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, alone = model_of_ones(), model_of_ones()
    optimizer, plain = make(model.parameters()), make(alone.parameters())
    base, groups, state = type(optimizer), optimizer.param_groups, optimizer.state
    wrapped = hvd.DistributedOptimizer(optimizer)
    assert isinstance(wrapped, base)
    assert isinstance(wrapped, hvd.DistributedOptimizer)
    assert type(wrapped).__name__ == base.__name__
    assert wrapped.param_groups is groups
    assert wrapped.state is state
    for _ in range(3):
        backward(model)
        backward(alone)
        assert alone.weight.grad is not None
        alone.weight.grad *= FACTOR
        assert wrapped.step() == plain.step()
        assert torch.equal(model.weight, alone.weight)
        wrapped.zero_grad()
        plain.zero_grad()
    assert repr(wrapped) == repr(plain)
    assert repr(wrapped.state_dict()) == repr(plain.state_dict())


def test_step_hooks_fire_once(world: FakeWorld) -> None:
    model = model_of_ones()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fired: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda o, *_: fired.append(("before", o, o.param_groups[0]["params"][0].grad.sum().item()))
    )
    wrapped = hvd.DistributedOptimizer(optimizer)
    wrapped.register_step_post_hook(lambda o, *_: fired.append(("after", o)))
    wrapped.load_state_dict(wrapped.state_dict())  # torch patches step() once more here
    backward(model)
    wrapped.step()
    assert fired == [("before", wrapped, 2 * FACTOR), ("after", wrapped)]  # hooks see reduced gradients


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter in")  # of torch 2.4's own SequentialLR
        yield


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.5)], [1]),
]


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("make", SCHEDULERS, ids=["StepLR", "LambdaLR", "SequentialLR"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("reload", [True, False])
def test_schedulers(make: Callable[[Any], Any], before: bool, reload: bool) -> None:
    rates = []
    for distributed in (False, True):
        model = model_of_ones()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = make(optimizer) if before else None
        wrapped = hvd.DistributedOptimizer(optimizer) if distributed else optimizer
        scheduler = scheduler or make(wrapped)
        if reload:
            wrapped.load_state_dict(wrapped.state_dict())
        seen = []
        for _ in range(3):
            wrapped.zero_grad()
            backward(model)
            wrapped.step()
            scheduler.step()
            seen.append(wrapped.param_groups[0]["lr"])
        rates.append(seen)
        gradient = FACTOR if distributed else 1.0
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[gradient, gradient]]
    assert rates[0] == rates[1]


def test_scheduler_step_before_optimizer_step_still_warns() -> None:
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model_of_ones().parameters(), lr=1.0))
    scheduler = lr_scheduler.StepLR(wrapped, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
@pytest.mark.parametrize("named", [True, False])
def test_copies(how: str, named: bool, world: FakeWorld) -> None:
    model = model_of_ones()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    lr_scheduler.StepLR(optimizer, 1)  # its wrapper of step() does not pickle
    names = list(model.named_parameters(prefix="m")) if named else None
    wrapped = hvd.DistributedOptimizer(optimizer, names, backward_passes_per_step=2, op=hvd.Sum)
    backward(model)
    backward(model)
    wrapped.step()
    if how == "deepcopy":
        other_model, other = copy.deepcopy((model, wrapped))
    else:
        file = io.BytesIO()
        torch.save((model, wrapped), file)
        file.seek(0)
        other_model, other = torch.load(file, weights_only=False)
    assert isinstance(other, torch.optim.SGD)
    assert isinstance(other, hvd.DistributedOptimizer)
    assert other.param_groups[0]["params"][0] is other_model.weight
    for m, o in ((model, wrapped), (other_model, other)):
        o.zero_grad()
        world.submitted.clear()
        backward(m)
        assert not world.submitted
        backward(m)
        o.step()
        assert m.weight.grad is not None
        assert m.weight.grad.tolist() == [[12.0, 12.0]]  # two passes, times 1 + 2 + 3
        assert world.buckets[0].names == ["m.weight" if named else "group0.0"]
    assert torch.equal(model.weight, other_model.weight)


def test_a_copied_model_is_left_alone(world: FakeWorld) -> None:
    model = model_of_ones()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for _ in range(2):
        wrapped.zero_grad()
        backward(model)
        wrapped.step()
    world.submitted.clear()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    backward(twin)
    assert not world.submitted
    assert twin.weight.grad is not None
    assert twin.weight.grad.tolist() == [[1.0, 1.0]]


def test_a_gradient_takes_little_along(world: FakeWorld) -> None:
    model = torch.nn.ModuleList(model_of_ones() for _ in range(50))
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for part in model:
        backward(part)
    wrapped.step()
    gradient = model[0].weight.grad
    assert isinstance(gradient, torch.Tensor)
    assert gradient.untyped_storage().nbytes() == 8


@pytest.mark.parametrize("passes", [1, 2])
def test_closure(passes: int) -> None:
    model = model_of_ones()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backward_passes_per_step=passes)

    def closure() -> torch.Tensor:
        wrapped.zero_grad()
        for _ in range(passes):
            loss: torch.Tensor = model(torch.ones(1, 2)).sum()
            loss.backward()
        return loss

    assert wrapped.step(closure).item() == 2 * FACTOR  # the loss is averaged as well
    assert model.weight.tolist() == [[1 - passes * FACTOR] * 2]
    backward(model)  # what is under way when a closure comes is finished first
    if passes == 2:
        backward(model)
    wrapped.step(closure=closure)
    assert model.weight.tolist() == [[1 - 2 * passes * FACTOR] * 2]


def test_closure_that_synchronizes_itself() -> None:
    model = model_of_ones()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    def closure() -> None:
        wrapped.zero_grad()
        backward(model)
        wrapped.synchronize()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)

    with wrapped.skip_synchronize():
        assert wrapped.step(closure) is None
    assert model.weight.tolist() == [[0.5, 0.5]]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_sees_reduced_gradients(fused: bool, world: FakeWorld) -> None:
    """Only the sum over ranks overflows, here: a rank that looked at its own gradient would step."""
    model = model_of_ones()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25, fused=fused), op=hvd.Sum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for overflow in (False, True, False):
        wrapped.zero_grad()
        world.submitted.clear()
        scaler.scale((1e35 if overflow else 1.0) * model(torch.ones(1, 2)).sum()).backward()
        scaler.step(wrapped)
        assert len(world.buckets) == 1  # reduced once
        scaler.update()
    assert model.weight.tolist() == [[1 - 2 * 0.25 * 6.0] * 2]
    assert scaler.get_scale() == 512.0


def test_a_scaler_that_skipped_does_not_spare_the_next_reduction(world: FakeWorld) -> None:
    model = model_of_ones()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(float("inf") * model(torch.ones(1, 2)).sum()).backward()
    scaler.step(wrapped)
    scaler.update()
    for _ in range(2):  # without zero_grad() of the optimizer, which would forget as well
        model.zero_grad()
        backward(model)
        wrapped.step()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[FACTOR, FACTOR]]


def test_patched_step_of_the_object_is_kept() -> None:
    model = model_of_ones()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen: list[float] = []
    inner = optimizer.step

    def counting_step(*args: Any, **kwargs: Any) -> Any:
        assert model.weight.grad is not None
        seen.append(model.weight.grad.sum().item())
        return inner(*args, **kwargs)

    optimizer.step = counting_step
    wrapped = hvd.DistributedOptimizer(optimizer)
    backward(model)
    wrapped.step()
    assert seen == [2 * FACTOR]
    assert model.weight.tolist() == [[1 - FACTOR] * 2]
