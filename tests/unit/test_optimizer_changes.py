"""DistributedOptimizer where things change: parameters go on and off, several optimizers, restarts, errors, the end."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from fake_world import FakeWorld, Universe
from hvdlite.errors import MismatchError, NotInitializedError, ShutDownError
from hvdlite.torch import arrival
from optimizer_lab import FACTOR, SHAPES, Scales, expected, reduced, wrap


@pytest.fixture(params=[(1, 4096), (2, 4096), (1, 1 << 30)], ids=["1 node", "2 nodes", "1 bucket"])
def world(universe: Universe, request: pytest.FixtureRequest) -> FakeWorld:
    nodes, bucket_bytes = request.param
    return universe.start(3, nodes=nodes, bucket_bytes=bucket_bytes)


# Parameters that are converted.


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("steps", [1, 2, arrival._ORDERLY_STEPS + 4])
def test_a_model_converted_between_steps(world: FakeWorld, steps: int, set_to_none: bool) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        for _ in range(steps):
            world.submitted.clear()
            model.loss().backward()
            optimizer.step()
            assert reduced(model) == expected(model, FACTOR)
            assert {p.grad.dtype for p in model.p if p.grad is not None} == {dtype}
            optimizer.zero_grad(set_to_none=set_to_none)
        if steps > 2:  # as if it had been of this dtype from the beginning
            assert len(world.submitted) == len(world.buckets)
            assert all(one.has_home for one in world.buckets) or len(world.topology.nodes) == 1


def test_some_layers_converted_between_steps(universe: Universe) -> None:
    universe.start(3, nodes=2, bucket_bytes=1 << 30)
    model = Scales((3,), (20000,), (5,))
    optimizer = wrap(model)

    def convert(dtype: torch.dtype, *layers: int) -> None:
        for p in (model.p[layer] for layer in layers):
            p.grad, gradient = None, p.grad
            p.data = p.data.to(dtype)
            p.grad = None if gradient is None else gradient.to(dtype)

    for converted in [(), (1, 2), (0, 1)]:
        convert(torch.float64, *converted)
        for _ in range(3):
            model.loss().backward()
            optimizer.step()
            assert reduced(model) == expected(model, FACTOR)
            optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize("steps", [1, 3, arrival._ORDERLY_STEPS + 4])
def test_a_layer_inside_a_bucket_that_is_converted_alone(
    world: FakeWorld, steps: int, is_used: bool, set_to_none: bool
) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)

    def step(leave_out: tuple[int, ...] = ()) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        model.loss(leave_out=leave_out).backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR, leave_out)

    for _ in range(steps):
        step()
    optimizer.zero_grad()
    model.p[1].data = model.p[1].data.double()
    model.p[3].data = model.p[3].data.half()
    step(leave_out=() if is_used else (1, 3))  # another rank has used them
    for _ in range(3):
        step()
    assert [p.grad.dtype for p in model.p[1:4]] == [torch.float64, torch.float32, torch.float16]


@pytest.mark.parametrize("layers", [(0, 1, 2, 3, 4, 5, 6), (1, 2)])
def test_a_model_in_half_precision_that_is_converted_for_each_step(
    world: FakeWorld, layers: tuple[int, ...], recwarn: pytest.WarningsRecorder
) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)

    def convert(dtype: torch.dtype) -> None:  # as programs do that train CLIP
        for p in (model.p[layer] for layer in layers):
            p.data = p.data.to(dtype)
            if p.grad is not None:
                p.grad.data = p.grad.data.to(dtype)

    for _ in range(arrival._ORDERLY_STEPS + 4):
        optimizer.zero_grad()
        convert(torch.bfloat16)
        model.loss().backward()
        convert(torch.float32)
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        assert {p.grad.dtype for p in model.p if p.grad is not None} == {torch.float32}
    assert len({one.name for one in world.buckets}) <= 3 * len(SHAPES)  # which are not made anew each time
    assert not recwarn.list


# Parameters that are switched off and on.


@pytest.mark.parametrize("set_to_none", [True, False])
def test_switched_off(world: FakeWorld, set_to_none: bool) -> None:
    model = Scales((3,), (20000,), (5,))
    optimizer = wrap(model)
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    model.p[1].requires_grad_(False)
    model.p[2].requires_grad_(False)
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == [FACTOR, None, None] if set_to_none else [FACTOR, 0.0, 0.0]
        optimizer.zero_grad(set_to_none=set_to_none)
    model.p[1].requires_grad_(True)
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        assert reduced(model)[:2] == [FACTOR, 2 * FACTOR]
        optimizer.zero_grad(set_to_none=set_to_none)
    if len(world.topology.nodes) > 1:
        assert len(world.allocated) == 1


def test_a_stale_gradient_of_a_frozen_parameter_stays(world: FakeWorld) -> None:
    model = Scales((3,), (4,))
    optimizer = wrap(model)
    model.loss().backward()
    optimizer.step()
    model.p[1].requires_grad_(False)
    for _ in range(3):
        model.p[0].grad = None
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == [FACTOR, 2 * FACTOR]


def test_frozen_between_backward_and_step(world: FakeWorld) -> None:
    model = Scales((3,), (4,))
    optimizer = wrap(model)
    for _ in range(2):
        model.loss().backward()
        model.p[1].requires_grad_(False)
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
        model.p[1].requires_grad_(True)


def test_switched_on_for_the_first_time(world: FakeWorld) -> None:
    model = Scales((3,), (20000,), (5,))
    model.p[1].requires_grad_(False)
    optimizer = wrap(model)
    assert not model.p[1].requires_grad
    for _ in range(2):
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == [FACTOR, None, 3 * FACTOR]
        optimizer.zero_grad()
    model.p[1].requires_grad_(True)
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
    assert sum(name.endswith(".late") for name in world.names()) == 1
    asked = [each.submission.request for each in world.submitted if each.name.endswith(".sparse")]
    # What a rank shows to others that have not switched it on: in the report of a stall; in the first step, an error.
    assert asked[-1].contents == "which are sparse among p.1"
    assert asked[0].contents.startswith("which are sparse among p.0 to p.2 (2 parameters), checksum ")
    last = next(each for each in reversed(world.buckets) if "p.1" in each.names)
    assert last.has_home == (len(world.topology.nodes) > 1)


def test_a_gradient_that_is_left_behind_when_buckets_change_stays(world: FakeWorld) -> None:
    model = Scales((3,), (20000,), (5,))
    model.p[0].requires_grad_(False)
    optimizer = wrap(model)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    model.p[0].requires_grad_(True)  # so that the buckets are planned anew
    optimizer.zero_grad()
    model.loss().backward()
    model.p[2].requires_grad_(False)
    optimizer.step()
    assert reduced(model) == expected(model, FACTOR)
    for factor in (2, 3):
        model.p[0].grad = model.p[1].grad = None
        model.loss(factor).backward()
        optimizer.step()
        assert reduced(model) == [FACTOR * factor, 2 * FACTOR * factor, 3 * FACTOR]


def test_all_frozen(world: FakeWorld) -> None:
    model = Scales((3,), (4,))
    model.requires_grad_(False)
    optimizer = wrap(model)
    optimizer.step()
    assert reduced(model) == [None, None]
    model.requires_grad_(True)
    model.loss().backward()
    optimizer.step()
    assert reduced(model) == expected(model, FACTOR)


def test_added_groups(world: FakeWorld) -> None:
    model = Scales((3,), (4,), (5,))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([model.p[0]], lr=1.0), named_parameters=model.named_parameters()
    )
    model.loss().backward()
    optimizer.step()
    optimizer.add_param_group({"params": [model.p[1]]})
    for _ in range(2):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
        assert reduced(model)[:2] == [FACTOR, 2 * FACTOR]
    with pytest.raises(ValueError, match=r"'group2\.0'.*complex64"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 2


def test_a_layer_that_is_made_later_than_the_optimizer(world: FakeWorld) -> None:
    model = Scales((3,), (4,))
    optimizer = wrap(model)
    for step in range(6):
        if step == 3:
            model.p.append(torch.nn.Parameter(torch.zeros(5)))
            optimizer.add_param_group({"params": [model.p[2]]})
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR), step
        optimizer.zero_grad()
    assert list(optimizer._parameter_names.values()) == ["p.0", "p.1", "group1.0"]
    restored = copy.deepcopy(optimizer)
    assert list(restored._parameter_names.values()) == ["p.0", "p.1", "group1.0"]


# Several, and the end.


@pytest.mark.parametrize("has_names", [False, True])
def test_a_parameter_in_place_of_another(world: FakeWorld, has_names: bool) -> None:
    """As of a layer that was resized, put into the parameter groups by hand."""
    model = Scales((3,), (4,))
    optimizer = wrap(model, named_parameters=model.named_parameters() if has_names else None)
    for step in range(6):
        if step == 3:
            model.p[1] = torch.nn.Parameter(torch.zeros(5))
            optimizer.param_groups[0]["params"][1] = model.p[1]
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == [FACTOR, 2 * FACTOR], step
        optimizer.zero_grad()


def test_several_optimizers_have_names_of_their_own(world: FakeWorld) -> None:
    models = [Scales((3,)), Scales((3,))]
    optimizers = [wrap(model) for model in models]
    for _ in range(2):
        for model in models:
            model.loss().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert {name.split(".")[0] for name in world.names()} == {"optimizer0", "optimizer1"}


def test_hooks_go_with_the_optimizer(world: FakeWorld) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    model.loss().backward()
    assert not world.submitted
    assert reduced(model) == [1.0]


def test_alone_there_are_no_hooks(universe: Universe) -> None:
    world = universe.start(1, nodes=1)
    model = Scales((3,), (4,))
    optimizer = wrap(model, backward_passes_per_step=2)
    assert not any(p._post_accumulate_grad_hooks for p in model.p)
    for _ in range(2):
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == [1.0, 2.0]
        optimizer.zero_grad()
    assert not world.submitted


@pytest.mark.parametrize("sizes", [(3, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 30])
def test_after_a_restart(universe: Universe, bucket_bytes: int, sizes: tuple[int, int]) -> None:
    model = Scales((3,), (20000,), (4,), (5,))
    universe.start(sizes[0], bucket_bytes=bucket_bytes)
    optimizer = wrap(model)
    for size in sizes:
        world = universe.start(size, nodes=1, bucket_bytes=bucket_bytes)
        for _ in range(4):
            model.loss().backward()
            optimizer.step()
            assert reduced(model) == expected(model, (size + 1) / 2)
            optimizer.zero_grad()
        assert (size > 1) == ("optimizer0.assignment1.bucket0" in world.names())


def test_after_shutdown(universe: Universe, world: FakeWorld) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    universe.end()
    with pytest.raises(NotInitializedError):
        model.loss().backward()


def test_the_next_step_works_after_an_error(world: FakeWorld) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    for step in range(6):
        if step % 2 == 0:
            world.error = MismatchError("shapes differ")
        model.loss().backward()
        if step % 2 == 0:
            with pytest.raises(MismatchError):
                optimizer.step()
            assert all(each.submission.is_done for each in world.submitted)  # nothing is in flight any more
        else:
            optimizer.step()
            assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


def test_refused_submissions_leave_a_clean_state(world: FakeWorld) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    world.refusal = ShutDownError("over")
    with pytest.raises(ShutDownError, match="over"):
        model.loss().backward()  # of the only bucket not before step()
        optimizer.step()
    world.refusal = None
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.step()
    assert reduced(model) == expected(model, FACTOR)


def test_gradients_on_their_way_when_hvdlite_is_started_again(universe: Universe, world: FakeWorld) -> None:
    """As hvd.elastic.run does it."""
    model = Scales((3,), (20000,), (4,))
    optimizer = wrap(model)
    for steps in range(4):
        for step in range(steps):
            model.loss(step + 10).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.loss(5).backward()
        universe.start(3, nodes=len(world.topology.nodes), bucket_bytes=world.config.bucket_bytes)
        optimizer._hvd_abandon()
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


def test_timeline(world: FakeWorld) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    world.recorder.start()
    for _ in range(2):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    events, _ = world.recorder.drain()
    spans = [(event[1].value, event[2]) for event in events]
    assert spans.count(("optimizer", "step")) == 2
    assert spans.count(("backward", "backward")) == 2
    assert spans.count(("wait", "synchronize")) == 2
    assert ("backward", "optimizer0.assignment2.bucket0") in spans


@pytest.mark.parametrize("groups", [1, 2, lambda p: [[p[0], p[3]], [p[1]]]])
def test_groups(world: FakeWorld, groups: int | Callable[[Any], Any]) -> None:
    model = Scales((3,), (4,), (5,), (6,), (7,))
    optimizer = wrap(model, groups=groups if isinstance(groups, int) else groups(model.p))
    for _ in range(2):
        world.submitted.clear()
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
    assert len(world.submitted) == (groups if isinstance(groups, int) else 3)
