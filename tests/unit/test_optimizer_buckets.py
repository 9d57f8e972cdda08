"""Buckets of DistributedOptimizer: which gradients travel together, when, and where they live (fake_world.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from fake_world import FakeWorld, Universe
from hvdlite.engine import Engine
from hvdlite.errors import UsageError
from hvdlite.torch import arrival
from optimizer_lab import FACTOR, SHAPES, Scales, expected, reduced, wrap


@pytest.fixture(params=[1, 2], ids=["1 node", "2 nodes"])
def several_buckets(universe: Universe, request: pytest.FixtureRequest) -> FakeWorld:
    return universe.start(3, nodes=request.param, bucket_bytes=4096)


def test_across_nodes_the_first_step_shows_the_order_and_later_ones_live_in_the_buffer(universe: Universe) -> None:
    world = universe.start(3, nodes=2, bucket_bytes=4096)
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    large, small = model.p[2], [p for p in model.p if p.numel() < 1000]
    homes = []
    for step in range(3):
        model.loss().backward()
        before = [p.grad for p in small]
        optimizer.step()
        homes.append(large.grad.data_ptr())
        assert step == 0 or all(p.grad is gradient for p, gradient in zip(small, before, strict=True))
        optimizer.zero_grad()
    assert not any(each.has_home for each in world.buckets if ".assignment1." in each.name)
    assert all(each.has_home for each in world.buckets if ".assignment2." in each.name)
    assert homes[0] == homes[1] == homes[2]
    assert len(world.allocated) == 1
    assert homes[0] % 64 == 0
    assert [each.name for each in world.of_kind("broadcast")] == ["optimizer0.assignment1.order"]


def test_on_one_node_gradients_are_reduced_where_autograd_left_them(universe: Universe) -> None:
    world = universe.start(3, nodes=1)
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for step in range(4):
        world.submitted.clear()
        model.loss().backward()
        before = [p.grad for p in model.p]
        optimizer.step()
        assert model.p[2].grad is before[2]
        assert step < 2 or all(p.grad is gradient for p, gradient in zip(model.p, before, strict=True))
        optimizer.zero_grad()
    assert [(each.has_home, each.loose) for each in world.submitted] == [(False, 0)]
    assert world.allocated == []


def test_on_one_node_gradients_that_stay_move_into_homes(universe: Universe) -> None:
    world = universe.start(3, nodes=1)
    model = Scales((40, 400), (300, 300), (5,))
    optimizer = wrap(model)
    homes = []
    for _ in range(4):
        # What was submitted owns the memory of gradients, which then would not be the program's alone.
        world.submitted[:] = [each for each in world.submitted if each not in world.buckets]
        model.loss().backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR)
        homes.append(world.buckets[-1].has_home)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert homes == [False, False, True, True]
    assert len(world.allocated) == 1
    assert world.buckets[-1].loose == 0


@pytest.mark.parametrize(
    ("nodes", "spare_cores", "bytes_per_s", "calls"),
    [(1, 0, 0.0, 1), (1, 1, 0.0, 5), (2, 0, 0.0, 5), (2, 0, 100e6, 20), (2, 0, 100e9, 5)],
)
def test_bucket_sizes(
    universe: Universe,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    spare_cores: int,
    bytes_per_s: float,
    calls: int,
) -> None:
    """20 MiB, in one bucket, in buckets of 8 MiB with small ones before and after, or in one of 1 MiB for each."""
    measured = property(lambda _: bytes_per_s, lambda *_: None)
    monkeypatch.setattr(Engine, "fastest_allreduce", measured, raising=False)
    world = universe.start(3, nodes=nodes)
    world.node.cores = 3 * torch.get_num_threads() + spare_cores
    model = Scales(*20 * [(1 << 18,)])
    optimizer = wrap(model)
    for _ in range(3):
        world.submitted.clear()
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(world.submitted) == calls


def test_buckets_go_while_backward_runs(several_buckets: FakeWorld) -> None:
    world = several_buckets
    model = Scales((300,), (300,), (300,), (300,))
    optimizer = wrap(model)
    submitted: list[int] = []
    for p in model.p:
        p.register_post_accumulate_grad_hook(lambda _: submitted.append(len(world.submitted)))
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    submitted.clear()
    world.submitted.clear()
    model.loss().backward()
    assert submitted == [0, 1, 1, 2]
    assert [names for each in world.submitted for names in each.names] == ["p.3", "p.2 to p.1 (2 parameters)", "p.0"]


def test_buckets_go_without_what_is_switched_off(several_buckets: FakeWorld) -> None:
    model = Scales((300,), (300,), (300,), (300,))
    optimizer = wrap(model)
    for _ in range(4):
        several_buckets.submitted.clear()
        model.loss().backward()
        in_backward = len(several_buckets.submitted)
        optimizer.step()
        optimizer.zero_grad()
        model.p[1].requires_grad_(False)
    assert in_backward == len(several_buckets.submitted) == 3


def test_a_gradient_that_comes_twice_is_not_taken_for_another(universe: Universe) -> None:
    """Those between the first and the last have no hooks until something else comes."""
    universe.start(3, nodes=1, bucket_bytes=1 << 30)
    model = Scales((3,), (4,), (5,), (6,))
    optimizer = wrap(model)
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.loss(leave_out=(0, 1)).backward()
    with pytest.raises(UsageError, match=r"'p\.2' was computed 2 times"):
        model.loss(leave_out=(1, 3)).backward()


def test_the_only_bucket_goes_in_step(universe: Universe) -> None:
    world = universe.start(3, nodes=1)
    world.node.cores = 3 * torch.get_num_threads()
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for _ in range(4):
        world.submitted.clear()
        model.loss().backward()
        assert not world.submitted
        optimizer.step()
        optimizer.zero_grad()
    assert [each.background for each in world.submitted] == [False]  # by the thread that waits for it


def test_gradients_of_the_only_bucket_count_in_any_order(universe: Universe) -> None:
    universe.start(3, nodes=1, bucket_bytes=1 << 30)
    model = Scales((3,), (4,), (5,), (6,), (20000,))
    optimizer = wrap(model)
    for order in [(0, 1, 2, 3, 4)] * 3 + [(4, 0, 2, 1, 3), (2, 4, 3, 0, 1), (1, 2, 3)]:
        with optimizer.no_sync():
            model.loss(10).backward()
        for i in order:
            model.loss(leave_out=tuple({0, 1, 2, 3, 4} - {i})).backward()
            with pytest.raises(UsageError, match=r"zero_grad\(\).*synchronize"):
                optimizer.zero_grad()
        optimizer.synchronize()
        assert reduced(model) == [(i + 1) * FACTOR * (11.0 if i in order else 10.0) for i in range(5)]
        optimizer.zero_grad()
    model.loss(leave_out=(0, 3, 4)).backward()
    with pytest.raises(UsageError, match=r"'p\.\d' was computed 2 times"):
        model.loss(leave_out=(0, 3, 4)).backward()


def hooks_of(model: Scales) -> list[int]:
    """How many each parameter has."""
    nodes = [get_gradient_edge(p).node for p in model.p]  # which live no longer than somebody holds them
    return [
        len(p._post_accumulate_grad_hooks or ()) + hooks_of_node(node) for p, node in zip(model.p, nodes, strict=True)
    ]


def hooks_of_node(node: Any) -> int:
    """How many lead to `Arrival`."""
    probe = node.register_hook(lambda *_: None)
    probe.remove()
    return len(probe.hooks_dict_ref() or ())


@pytest.fixture
def hooked_at_its_ends(universe: Universe, monkeypatch: pytest.MonkeyPatch) -> tuple[Scales, Any]:
    """A model whose gradients have come in order for a while, and its optimizer."""
    universe.start(3, nodes=1, bucket_bytes=1 << 30)
    monkeypatch.setattr(arrival, "_ORDERLY_STEPS", 4)
    model = Scales((3,), (4,), (5,), (6,), (20000,))
    optimizer = wrap(model)
    hooks = []
    for _ in range(5):
        model.loss().backward()
        hooks.append(hooks_of(model))
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
    assert hooks == [[1, 1, 1, 1, 1]] * 5
    assert hooks_of(model) == [1, 0, 0, 0, 1]
    return model, optimizer


@pytest.mark.parametrize("again", [(0,), (2, 4), (4,), (0, 1, 2, 3, 4)])
def test_gradients_of_the_only_bucket_that_come_twice(
    hooked_at_its_ends: tuple[Scales, Any], again: tuple[int, ...]
) -> None:
    model, _optimizer = hooked_at_its_ends
    model.loss().backward()
    with pytest.raises(UsageError, match=r"'p\.\d' was computed 2 times"):
        model.loss(leave_out=tuple({0, 1, 2, 3, 4} - set(again))).backward()


def test_a_gradient_without_a_hook_that_comes_again_after_the_last(hooked_at_its_ends: tuple[Scales, Any]) -> None:
    model, optimizer = hooked_at_its_ends
    model.loss().backward()
    model.loss(leave_out=(0, 1, 3, 4)).backward()
    optimizer.step()
    assert reduced(model) == [FACTOR * (i + 1) * (1 + (i == 2)) for i in range(5)]


@pytest.mark.parametrize("which", [0, 4])
@pytest.mark.parametrize("how", ["scaled", "replaced", "dropped"])
def test_an_end_that_is_changed_is_told_of_and_all_have_hooks_for_a_while(
    hooked_at_its_ends: tuple[Scales, Any], which: int, how: str
) -> None:
    model, optimizer = hooked_at_its_ends
    model.loss().backward()
    gradient = model.p[which].grad
    if how == "scaled":
        gradient.mul_(2)
    else:
        model.p[which].grad = None if how == "dropped" else 2 * gradient
    with pytest.warns(UserWarning, match=rf"'p\.{which}' was changed between loss\.backward\(\) and optimizer\.step"):
        optimizer.step()
    kept = 0 if how == "dropped" else 2
    assert reduced(model) == [FACTOR * (i + 1) * (kept if i == which else 1) for i in range(5)]
    for _ in range(arrival._ORDERLY_STEPS):
        optimizer.zero_grad()
        model.loss().backward()
        assert hooks_of(model) == [1, 1, 1, 1, 1]
        optimizer.step()
    assert hooks_of(model) == [1, 0, 0, 0, 1]
    assert reduced(model) == expected(model, FACTOR)


def test_whoever_changes_gradients_in_every_step_keeps_all_hooks(hooked_at_its_ends: tuple[Scales, Any]) -> None:
    model, optimizer = hooked_at_its_ends
    for step in range(3 * arrival._ORDERLY_STEPS):
        model.loss().backward()
        assert step == 0 or hooks_of(model) == [1, 1, 1, 1, 1]
        for p in model.p:
            p.grad.mul_(2)
        with pytest.warns(UserWarning, match="'p.0' and . more were changed between"):
            optimizer.step()
        optimizer.zero_grad()


def test_a_gradient_without_a_hook_is_reduced_as_it_is_in_the_step(hooked_at_its_ends: tuple[Scales, Any]) -> None:
    model, optimizer = hooked_at_its_ends
    model.loss().backward()
    model.p[1].grad.mul_(3)
    model.p[2].grad = 4 * model.p[2].grad
    model.p[3].grad = None
    optimizer.step()
    assert reduced(model) == [FACTOR * (i + 1) * factor for i, factor in enumerate([1, 3, 4, 0, 1])]


@pytest.mark.parametrize("grads", ["dropped", "zeroed", "left"])
@pytest.mark.parametrize("leave_out", [(0,), (4,), (2,), (0, 4), (1, 2, 3), (0, 2), (2, 4), (0, 1, 2, 3, 4)])
def test_gradients_without_hooks_are_reduced_whatever_comes(
    hooked_at_its_ends: tuple[Scales, Any], leave_out: tuple[int, ...], grads: str
) -> None:
    model, optimizer = hooked_at_its_ends
    total = [0.0] * 5
    for without in [(), (), leave_out, (), leave_out, leave_out, ()]:
        if grads != "left":
            optimizer.zero_grad(set_to_none=grads == "dropped")
            total = [0.0] * 5
        if len(without) < 5:
            model.loss(leave_out=without).backward()
        optimizer.step()
        total = [FACTOR * (was + (i + 1) * (i not in without)) for i, was in enumerate(total)]
        assert reduced(model) == total


@pytest.mark.parametrize("without", [(0,), (4,)])
def test_where_an_end_does_not_come_all_have_hooks_for_a_while(
    hooked_at_its_ends: tuple[Scales, Any], without: tuple[int, ...]
) -> None:
    model, optimizer = hooked_at_its_ends
    for step in range(3 * arrival._ORDERLY_STEPS):
        leave_out = without if step in (0, 2) else ()
        model.loss(leave_out=leave_out).backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR, leave_out)
        optimizer.zero_grad()
        is_orderly = step >= 2 + arrival._ORDERLY_STEPS
        assert hooks_of(model) == ([1, 0, 0, 0, 1] if is_orderly else [1, 1, 1, 1, 1])


def test_hooks_stay_where_order_is_broken_again_and_again(hooked_at_its_ends: tuple[Scales, Any]) -> None:
    model, optimizer = hooked_at_its_ends
    for step in range(4 * arrival._ORDERLY_STEPS):
        leave_out = (4,) if step % 3 == 0 else ()
        model.loss(leave_out=leave_out).backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR, leave_out)
        assert hooks_of(model) == [1, 1, 1, 1, 1]
        optimizer.zero_grad()


def test_others_may_come_after_the_last(hooked_at_its_ends: tuple[Scales, Any]) -> None:
    model, optimizer = hooked_at_its_ends
    for _ in range(2 * arrival._ORDERLY_STEPS):
        for i in (4, 0, 1, 2, 3):
            model.loss(leave_out=tuple({0, 1, 2, 3, 4} - {i})).backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
    assert hooks_of(model) == [1, 0, 0, 0, 1]


def test_hooks_stay_where_another_gradient_comes_first(hooked_at_its_ends: tuple[Scales, Any]) -> None:
    model, optimizer = hooked_at_its_ends
    for _ in range(2 * arrival._ORDERLY_STEPS):
        for i in (0, 4, 1, 2, 3):
            model.loss(leave_out=tuple({0, 1, 2, 3, 4} - {i})).backward()
        optimizer.step()
        assert hooks_of(model) == [1, 1, 1, 1, 1]
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_frozen_after_its_gradient_came_without_a_hook(
    hooked_at_its_ends: tuple[Scales, Any], set_to_none: bool
) -> None:
    model, optimizer = hooked_at_its_ends
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        model.loss().backward()
        assert hooks_of(model) == [1, 0, 0, 0, 1]
        if step == 3:
            model.p[2].requires_grad_(False)
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)


def test_a_pass_that_reaches_no_hook_is_reduced_in_the_step(hooked_at_its_ends: tuple[Scales, Any]) -> None:
    model, optimizer = hooked_at_its_ends
    model.loss(leave_out=(0, 4)).backward()
    optimizer.step()
    assert hooks_of(model) == [1, 0, 0, 0, 1]
    assert reduced(model) == expected(model, FACTOR, (0, 4))


def test_passes_that_are_not_counted_bring_no_hooks(hooked_at_its_ends: tuple[Scales, Any]) -> None:
    model, optimizer = hooked_at_its_ends
    for _ in range(2):
        with optimizer.no_sync():
            model.loss(10).backward()
        model.loss().backward()
        assert hooks_of(model) == [1, 0, 0, 0, 1]
        optimizer.step()
        assert reduced(model) == expected(model, 11 * FACTOR)
        optimizer.zero_grad()


def test_gradients_of_a_backward_pass_within_another(hooked_at_its_ends: tuple[Scales, Any]) -> None:
    """As a reentrant checkpoint runs one: it ends before the last gradient has come."""
    model, optimizer = hooked_at_its_ends

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 5 * model.p[4].sum() + 4 * model.p[3].sum() + 3 * model.p[2].sum()

    for _ in range(3):
        start = (2 * model.p[1].sum() + model.p[0].sum()).requires_grad_()
        checkpoint(inner, start, use_reentrant=True).backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


def test_gradients_are_counted_in_their_hooks_while_they_are_accumulated(
    hooked_at_its_ends: tuple[Scales, Any],
) -> None:
    model, optimizer = hooked_at_its_ends
    optimizer.set_backward_passes_per_step(2)
    assert hooks_of(model) == [1, 1, 1, 1, 1]
    for _ in range(3):
        for _ in range(2):
            model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, 2 * FACTOR)
        optimizer.zero_grad()
    model.loss().backward()
    model.loss().backward()
    with pytest.raises(UsageError, match="computed 3 times"):
        model.loss().backward()


def test_small_gradients_live_in_the_buffer(universe: Universe) -> None:
    """They are copied into a block in any case."""
    world = universe.start(3, nodes=1)
    model = Scales((3, 5), (5,), (33, 3))
    optimizer = wrap(model)
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
    assert world.buckets[-1].has_home
    assert len(world.allocated) == 1


def test_the_order_of_arrival_is_that_of_autograd(several_buckets: FakeWorld) -> None:
    world = several_buckets
    model = Scales((300,), (300,), (300,), (300,))

    def loss() -> torch.Tensor:  # p2, p0, p3, p1 from the loss on backward
        x = model.p[1] * 1.0
        for i in (3, 0, 2):
            x = x * model.p[i]
        return x.sum()

    optimizer = wrap(model)
    for _ in range(2):
        world.submitted.clear()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = [name for each in world.buckets for name in each.names]
    assert sent[0] == "p.2"
    assert sent[-1] == "p.1"


def test_nothing_is_copied_where_gradients_accumulate_in_their_slots(several_buckets: FakeWorld) -> None:
    world = several_buckets
    model = Scales((40, 400), (300, 300))
    optimizer = wrap(model)
    for _ in range(3):
        world.submitted.clear()
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert [each.loose for each in world.submitted] == [0, 0]
