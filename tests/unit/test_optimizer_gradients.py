"""The way of gradients through DistributedOptimizer, with a runtime that multiplies them (fake_runtime.py)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from fake_runtime import FakeRuntime, install
from hvdlite.dtypes import DType
from hvdlite.errors import MismatchError, ShutDownError

FACTOR = 2.0  # of the average of 3 ranks


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return install(monkeypatch, FakeRuntime(3, bucket_bytes=4096))


class Scales(torch.nn.Module):
    """``sum_i i * sum(p_i)`` of parameters of given shapes: the gradient of parameter i is i everywhere."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = torch.nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def loss(self, factor: float = 1.0, leave_out: tuple[int, ...] = ()) -> torch.Tensor:
        terms = [(i + 1) * p.sum() for i, p in enumerate(self.p) if i not in leave_out]
        return factor * torch.stack([term.double() for term in terms]).sum()


class _Halves(hvd.Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.double() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return (tensor * 2).to(ctx)


SHAPES = ((3, 5), (5,), (40, 400), (7,), (), (0, 2), (33, 3))


def wrap(model: torch.nn.Module, **arguments: Any) -> Any:
    arguments.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **arguments)


def reduced(model: Scales) -> list[float | None]:
    """The value of every gradient, which is the same in all its elements."""
    values: list[float | None] = []
    for p in model.p:
        if p.grad is not None and p.numel():
            assert (p.grad == p.grad.flatten()[0]).all()
        values.append(None if p.grad is None else p.grad.flatten()[0].item() if p.numel() else 0.0)
    return values


def expected(model: Scales, factor: float, leave_out: tuple[int, ...] = ()) -> list[float]:
    return [(i + 1) * factor if p.numel() and i not in leave_out else 0.0 for i, p in enumerate(model.p)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps(runtime: FakeRuntime, set_to_none: bool, dtype: torch.dtype) -> None:
    model = Scales(*SHAPES, dtype=dtype)
    optimizer = wrap(model)
    for step in range(4):
        model.loss(step + 1).backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR * (step + 1))
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert model.p[1][0].item() == -2 * FACTOR * (1 + 2 + 3 + 4)


def test_the_first_step_plans_and_later_ones_live_in_the_buffer(runtime: FakeRuntime) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    homes = []
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        homes.append([p.grad.data_ptr() for p in model.p if p.numel()])
        optimizer.zero_grad()
    first, second = runtime.calls[: len(runtime.calls) // 2], runtime.calls[len(runtime.calls) // 2 :]
    assert not first[0]["home"]
    assert second[-1]["home"]
    assert homes[0] == homes[1] == homes[2]
    assert len(set(homes[0])) == len(homes[0])
    assert len(runtime.allocated) == 1
    assert all(pointer % 64 == 0 for pointer in homes[0])
    assert [call["name"] for call in runtime.calls if call["kind"] == "broadcast"] == ["optimizer0.plan1.order"]


def test_buckets_go_while_backward_runs(runtime: FakeRuntime) -> None:
    model = Scales((300,), (300,), (300,), (300,))
    optimizer = wrap(model)
    submitted: list[int] = []
    for p in model.p:
        p.register_post_accumulate_grad_hook(lambda _: submitted.append(len(runtime.calls)))
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    submitted.clear()
    runtime.calls.clear()
    model.loss().backward()
    assert submitted[0] < submitted[-1] == len(runtime.calls)
    assert [names for call in runtime.calls for names in call["names"]] == ["p.3", "p.2 to p.1 (2 parameters)", "p.0"]


def test_the_order_of_arrival_is_that_of_autograd(runtime: FakeRuntime) -> None:
    model = Scales((300,), (300,), (300,), (300,))

    def loss() -> torch.Tensor:  # p2, p0, p3, p1 from the loss on backward
        x = model.p[1] * 1.0
        for i in (3, 0, 2):
            x = x * model.p[i]
        return x.sum()

    optimizer = wrap(model)
    for _ in range(2):
        runtime.calls.clear()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = [name for call in runtime.calls for name in call["names"]]
    assert sent[0] == "p.2"
    assert sent[-1] == "p.1"


def test_nothing_is_copied_where_gradients_accumulate_in_their_slots(runtime: FakeRuntime) -> None:
    model = Scales((40, 400), (300, 300))
    optimizer = wrap(model)
    for _ in range(3):
        runtime.calls.clear()
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert [call["loose"] for call in runtime.calls] == [0, 0]


def test_parameters_without_gradient_count_as_zeros(runtime: FakeRuntime) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for leave_out in [(0, 2), (), (2,), (0, 1, 3)]:
        model.loss(leave_out=leave_out).backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR, leave_out)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


def test_a_step_without_backward_sends_zeros(runtime: FakeRuntime) -> None:
    model = Scales((3,), (4,))
    optimizer = wrap(model)
    for _ in range(3):
        optimizer.step()
        assert reduced(model) == [0.0, 0.0]
        optimizer.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_backward_passes_per_step(runtime: FakeRuntime, set_to_none: bool) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, backward_passes_per_step=3)
    for _ in range(3):
        calls = len(runtime.calls)
        model.loss(1).backward()
        model.loss(10).backward()
        assert len(runtime.calls) == calls
        model.loss(100).backward()
        assert len(runtime.calls) > calls
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR * 111)
        optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.set_backward_passes_per_step(1)
    model.loss(1).backward()
    optimizer.synchronize()
    assert reduced(model) == expected(model, FACTOR)


def test_fewer_passes_than_announced(runtime: FakeRuntime) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, backward_passes_per_step=3)
    for _ in range(2):
        model.loss().backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


def test_more_passes_than_announced(runtime: FakeRuntime) -> None:
    model = Scales((2,), (3,))
    optimizer = wrap(model)
    model.loss().backward()
    with pytest.raises(AssertionError, match=r"'p\.\d' was computed 2 times.*backward_passes_per_step is 1.*no_sync"):
        model.loss().backward()
    with pytest.raises(AssertionError, match="between backward"):
        optimizer.set_backward_passes_per_step(2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync(runtime: FakeRuntime, set_to_none: bool) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for _ in range(3):
        calls = len(runtime.calls)
        with optimizer.no_sync():
            model.loss(1).backward()
            model.loss(10).backward()
        assert len(runtime.calls) == calls
        model.loss(100).backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR * 111)
        optimizer.zero_grad(set_to_none=set_to_none)


def test_what_no_sync_left_can_be_dropped(runtime: FakeRuntime) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    with optimizer.no_sync():
        model.loss().backward()
    optimizer.zero_grad()
    assert reduced(model) == [None]


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, _Halves])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_changes_of_gradients_on_their_way_are_noticed(
    runtime: FakeRuntime, compression: type[hvd.Compressor], set_to_none: bool
) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model, compression=compression)
    for step in range(6):
        model.loss().backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_([model.p[step % 4 // 2]], 0.1)
            with pytest.warns(UserWarning, match=rf"'p\.{step % 4 // 2}' was changed.*skip_synchronize"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def test_zero_grad_between_backward_and_step(runtime: FakeRuntime) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    model.loss().backward()
    with pytest.raises(AssertionError, match=r"zero_grad\(\).*synchronize"):
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()


def test_model_zero_grad_drops_views_without_harm(runtime: FakeRuntime) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    for _ in range(3):
        model.zero_grad()
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)


def test_step_after_synchronize_warns(runtime: FakeRuntime, recwarn: pytest.WarningsRecorder) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    model.loss().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    recwarn.clear()
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    # A step that was left out (an overflow under mixed precision) is no reason to warn in the next one.
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.step()
    assert not recwarn.list


@pytest.mark.parametrize(("op", "factor"), [(hvd.Sum, 6.0), (hvd.Min, 1.0), (hvd.Max, 3.0)])
def test_ops(runtime: FakeRuntime, op: int, factor: float) -> None:
    model = Scales((3,), (4,))
    optimizer = wrap(model, op=op)
    model.loss().backward()
    optimizer.step()
    assert reduced(model) == [factor, 2 * factor]


def test_predivide(runtime: FakeRuntime) -> None:
    model = Scales((3,))
    optimizer = wrap(model, gradient_predivide_factor=4.0)
    model.loss().backward()
    optimizer.step()
    assert (runtime.calls[0]["prescale"], runtime.calls[0]["postscale"]) == (0.25, 4.0)
    assert reduced(model) == [FACTOR]


def test_fp16_compression_is_the_runtimes(runtime: FakeRuntime) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, compression=hvd.Compression.fp16)
    for _ in range(2):
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
    assert all(call["wire_dtype"] is DType.FLOAT16 for call in runtime.calls if ".bucket" in call["name"])
    assert not runtime.allocated


def test_compression_of_users(runtime: FakeRuntime) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, compression=_Halves)
    for leave_out in [(), (1,), ()]:
        model.loss(leave_out=leave_out).backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR, leave_out)
        optimizer.zero_grad()
    assert runtime.calls[0]["wire_dtype"] is None


def test_channels_last(runtime: FakeRuntime) -> None:
    conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    alone = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    alone.load_state_dict(conv.state_dict())
    optimizer = wrap(conv)
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    for _ in range(3):
        conv.zero_grad()
        alone.zero_grad()
        conv(x).square().sum().backward()
        alone(x).square().sum().backward()
        optimizer.synchronize()
        assert conv.weight.grad is not None
        assert alone.weight.grad is not None
        assert torch.allclose(conv.weight.grad, FACTOR * alone.weight.grad, rtol=1e-6)
        assert conv.weight.grad.stride() == conv.weight.stride()
    # Ranks whose weights lie in another order must find out.
    assert (4, 2, 2, 3) in runtime.calls[0]["shapes"]


def test_gradients_in_an_odd_layout(runtime: FakeRuntime) -> None:
    model = Scales((200, 100), (4, 5))
    optimizer = wrap(model)
    for _ in range(3):
        for i, p in enumerate(model.p):
            p.grad = torch.full(p.shape[::-1], i + 1.0).t()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph(runtime: FakeRuntime) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    for _ in range(3):
        loss = torch.stack([(p - 2).square().sum() for p in model.p]).sum()
        loss.backward(create_graph=True)
        optimizer.synchronize()
        assert all(p.grad is not None and not p.grad.requires_grad for p in model.p)
        assert reduced(model) == [-4 * FACTOR, -4 * FACTOR]
        optimizer.zero_grad()


def test_parameters_converted_after_the_first_step(runtime: FakeRuntime) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    model.double()  # before it is fine
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.half()
    with pytest.raises(ValueError, match=r"'p\.\d' is torch\.float16.*torch\.float64"):
        model.loss().backward()


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
    assert runtime.calls[-1]["home"]


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
