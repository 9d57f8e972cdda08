"""DistributedOptimizer where things change: parameters go on and off, several optimizers, restarts, errors, the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from fake_runtime import FakeRuntime, install
from hvdlite.errors import MismatchError, ShutDownError
from optimizer_lab import FACTOR, Scales, expected, reduced, wrap


@pytest.fixture(params=[1, 2], ids=["1 node", "2 nodes"])
def runtime(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeRuntime:
    return install(monkeypatch, FakeRuntime(3, nodes=request.param, bucket_bytes=4096))


# Parameters that are switched off and on.


@pytest.mark.parametrize("set_to_none", [True, False])
def test_switched_off(runtime: FakeRuntime, set_to_none: bool) -> None:
    model = Scales((3,), (20000,), (5,))
    optimizer = wrap(model)
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    model.p[1].requires_grad_(False)
    model.p[2].requires_grad_(False)
    for _ in range(3):
        runtime.calls.clear()
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
    if len(runtime.topology.nodes) > 1:
        assert len(runtime.allocated) == 1


def test_a_stale_gradient_of_a_frozen_parameter_stays(runtime: FakeRuntime) -> None:
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


def test_frozen_between_backward_and_step(runtime: FakeRuntime) -> None:
    model = Scales((3,), (4,))
    optimizer = wrap(model)
    for _ in range(2):
        model.loss().backward()
        model.p[1].requires_grad_(False)
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
        model.p[1].requires_grad_(True)


def test_switched_on_for_the_first_time(runtime: FakeRuntime) -> None:
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
    assert "optimizer0.plan2.late" in runtime.names()
    (last,) = (call["home"] for call in runtime.calls[-3:] if call.get("names") == ["p.1"])
    assert last == (len(runtime.topology.nodes) > 1)


def test_a_gradient_that_is_left_behind_when_buckets_change_stays(runtime: FakeRuntime) -> None:
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


def test_all_frozen(runtime: FakeRuntime) -> None:
    model = Scales((3,), (4,))
    model.requires_grad_(False)
    optimizer = wrap(model)
    optimizer.step()
    assert reduced(model) == [None, None]
    model.requires_grad_(True)
    model.loss().backward()
    optimizer.step()
    assert reduced(model) == expected(model, FACTOR)


def test_added_groups(runtime: FakeRuntime) -> None:
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
    with pytest.raises(ValueError, match="parameter 0 of group 2"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


# Several, and the end.


def test_several_optimizers_have_names_of_their_own(runtime: FakeRuntime) -> None:
    models = [Scales((3,)), Scales((3,))]
    optimizers = [wrap(model) for model in models]
    for _ in range(2):
        for model in models:
            model.loss().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    names = runtime.names()
    assert {name.split(".")[0] for name in names} == {"optimizer0", "optimizer1"}


def test_hooks_go_with_the_optimizer(runtime: FakeRuntime) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    model.loss().backward()
    assert not runtime.calls
    assert reduced(model) == [1.0]


def test_alone_there_are_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = install(monkeypatch, FakeRuntime(1))
    model = Scales((3,), (4,))
    optimizer = wrap(model, backward_passes_per_step=2)
    assert not any(p._post_accumulate_grad_hooks for p in model.p)
    for _ in range(2):
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == [1.0, 2.0]
        optimizer.zero_grad()
    assert not runtime.calls


@pytest.mark.parametrize("sizes", [(3, 3), (1, 3), (3, 1)])
def test_after_a_restart(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]) -> None:
    model = Scales((3,), (20000,))
    install(monkeypatch, FakeRuntime(sizes[0]))
    optimizer = wrap(model)
    for size in sizes:
        runtime = install(monkeypatch, FakeRuntime(size))
        for _ in range(3):
            model.loss().backward()
            optimizer.step()
            assert reduced(model) == expected(model, (size + 1) / 2)
            optimizer.zero_grad()
        assert not size > 1 or "optimizer0.plan1.bucket0" in runtime.names()


def test_after_shutdown(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    monkeypatch.undo()
    with pytest.raises(ShutDownError):
        model.loss().backward()


def test_the_next_step_works_after_an_error(runtime: FakeRuntime) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    for step in range(6):
        if step % 2 == 0:
            runtime.error = MismatchError("shapes differ")
        model.loss().backward()
        if step % 2 == 0:
            with pytest.raises(MismatchError):
                optimizer.step()
            assert all(handle.done() for handle in runtime.handles)  # nothing is in flight any more
        else:
            optimizer.step()
            assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


def test_errors_in_backward_leave_a_clean_state(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scales((3,))
    optimizer = wrap(model)

    def refuse(*_: Any, **__: Any) -> None:
        raise ShutDownError("over")

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "allreduce_async", refuse)
        with pytest.raises(ShutDownError, match="over"):
            model.loss().backward()
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.step()
    assert reduced(model) == [FACTOR]


def test_timeline(runtime: FakeRuntime) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    runtime.recorder.start()
    for _ in range(2):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    events, _ = runtime.recorder.drain()
    spans = [(event[1].value, event[2]) for event in events]
    assert spans.count(("optimizer", "step")) == 2
    assert spans.count(("backward", "backward")) == 2
    assert spans.count(("wait", "synchronize")) == 2
    assert ("backward", "optimizer0.plan2.bucket0") in spans


@pytest.mark.parametrize("groups", [1, 2, lambda p: [[p[0], p[3]], [p[1]]]])
def test_groups(runtime: FakeRuntime, groups: int | Callable[[Any], Any]) -> None:
    model = Scales((3,), (4,), (5,), (6,), (7,))
    optimizer = wrap(model, groups=groups if isinstance(groups, int) else groups(model.p))
    for _ in range(2):
        runtime.calls.clear()
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
    assert len(runtime.calls) == (groups if isinstance(groups, int) else 3)
