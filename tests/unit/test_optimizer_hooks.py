"""Hooks of DistributedOptimizer where all gradients are in one bucket: none for most, once they come as expected."""

from __future__ import annotations

from typing import Any

import pytest

from fake_world import FakeWorld, Universe
from hvdlite.errors import UsageError
from optimizer_lab import FACTOR, Scales, expected, reduced, wrap

COUNT = 12
STEPS = 6  # until there are no hooks that are not needed


@pytest.fixture
def steady(universe: Universe) -> tuple[FakeWorld, Scales, Any]:
    """A model in whose steps gradients come as expected."""
    world = universe.start(3, nodes=1)
    model = Scales(*[(5,)] * COUNT)
    optimizer = wrap(model)
    for _ in range(STEPS):
        train(model, optimizer)
    assert hooked(model) == 2
    return world, model, optimizer


def hooked(model: Scales) -> int:
    return sum(bool(p._post_accumulate_grad_hooks) for p in model.p)


def train(model: Scales, optimizer: Any, *leave_out: int, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    model.loss(leave_out=leave_out).backward()
    optimizer.step()
    assert reduced(model) == expected(model, FACTOR, leave_out)


def order_of(model: Scales, optimizer: Any) -> list[int]:
    """In which the gradients come."""
    came: list[int] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, i=i: came.append(i))  # type: ignore[misc]
        for i, p in enumerate(model.p)
    ]
    train(model, optimizer)
    for handle in handles:
        handle.remove()
    return came


def test_steps_without_hooks_are_right_and_submit_in_step(steady: tuple[FakeWorld, Scales, Any]) -> None:
    world, model, optimizer = steady
    world.submitted.clear()
    for _ in range(3):
        train(model, optimizer)
        assert hooked(model) == 2
    assert len(world.submitted) == 3


def test_gradients_are_loaded_in_backward(steady: tuple[FakeWorld, Scales, Any]) -> None:
    """So a change before step() is told apart from a gradient."""
    _, model, optimizer = steady
    optimizer.zero_grad()
    model.loss().backward()
    model.p[3].grad.mul_(7)
    with pytest.warns(UserWarning, match=r"the gradient of 'p\.3' was changed between"):
        optimizer.step()


@pytest.mark.parametrize("place", ["first", "inner", "last"])
def test_a_gradient_that_does_not_come_counts_as_zeros(steady: tuple[FakeWorld, Scales, Any], place: str) -> None:
    _, model, optimizer = steady
    order = order_of(model, optimizer)
    train(model, optimizer, {"first": order[0], "inner": order[4], "last": order[-1]}[place])
    assert hooked(model) == COUNT
    for _ in range(STEPS):
        train(model, optimizer)
    assert hooked(model) == 2


def test_gradients_that_were_there_before_need_hooks(steady: tuple[FakeWorld, Scales, Any]) -> None:
    _, model, optimizer = steady
    for _ in range(STEPS):
        train(model, optimizer, set_to_none=False)
        assert hooked(model) == COUNT
    train(model, optimizer, 5, set_to_none=False)


def test_passes_before_that_are_local(steady: tuple[FakeWorld, Scales, Any]) -> None:
    _, model, optimizer = steady
    optimizer.zero_grad()
    with optimizer.no_sync():
        model.loss().backward()
    model.loss().backward()
    optimizer.step()
    assert reduced(model) == expected(model, 2 * FACTOR)


def test_several_passes_have_hooks(steady: tuple[FakeWorld, Scales, Any]) -> None:
    _, model, optimizer = steady
    optimizer.set_backward_passes_per_step(2)
    assert hooked(model) == COUNT
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.loss().backward()
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, 2 * FACTOR)
    assert hooked(model) == COUNT


def test_a_pass_too_many_is_an_error(steady: tuple[FakeWorld, Scales, Any]) -> None:
    _, model, optimizer = steady
    optimizer.zero_grad()
    model.loss().backward()
    with pytest.raises(UsageError, match="was computed 2 times"):
        model.loss().backward()
