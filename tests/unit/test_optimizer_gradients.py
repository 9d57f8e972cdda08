"""The way of gradients through DistributedOptimizer, among ranks that send multiples of them (fake_world.py).

What every op, dtype, compression and memory format comes to is tested between real ranks (tests/mpi/test_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

import hvdlite.torch as hvd
from fake_world import FakeWorld, Universe
from hvdlite.dtypes import DType
from hvdlite.errors import UsageError
from hvdlite.torch import arrival
from optimizer_lab import FACTOR, SHAPES, Scales, expected, reduced, wrap
from wrapper_lab import Sharded


@pytest.fixture(params=[(1, 4096), (2, 4096), (1, 1 << 30)], ids=["1 node", "2 nodes", "1 bucket"])
def world(universe: Universe, request: pytest.FixtureRequest) -> FakeWorld:
    nodes, bucket_bytes = request.param
    return universe.start(3, nodes=nodes, bucket_bytes=bucket_bytes)


class _Halves(hvd.Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.double() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return (tensor * 2).to(ctx)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps(world: FakeWorld, set_to_none: bool) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for step in range(4):
        model.loss(step + 1).backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR * (step + 1))
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert model.p[1][0].item() == -2 * FACTOR * (1 + 2 + 3 + 4)


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, _Halves])
def test_one_warning_names_the_first_of_many_gradients_that_were_clipped_too_early(
    world: FakeWorld, compression: type[hvd.Compressor]
) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, compression=compression)
    for _ in range(4):
        model.loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        more = len(SHAPES) - 1
        with pytest.warns(UserWarning, match=f"the gradients of 'p.0' and {more} more were changed between") as raised:
            optimizer.step()
        assert [warning.filename for warning in raised] == [__file__]
        optimizer.zero_grad()


def test_parameters_without_gradient_count_as_zeros(world: FakeWorld) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for leave_out in [(0, 2), (), (2,), (0, 1, 3)]:
        model.loss(leave_out=leave_out).backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR, leave_out)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


def test_a_step_without_backward_sends_zeros(world: FakeWorld) -> None:
    model = Scales((3,), (4,))
    optimizer = wrap(model)
    for _ in range(3):
        optimizer.step()
        assert reduced(model) == [0.0, 0.0]
        optimizer.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_backward_passes_per_step(world: FakeWorld, set_to_none: bool) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, backward_passes_per_step=3)
    for _ in range(3):
        calls = len(world.submitted)
        model.loss(1).backward()
        model.loss(10).backward()
        assert len(world.submitted) == calls
        model.loss(100).backward()
        assert (len(world.submitted) > calls) == (world.config.bucket_bytes == 4096)
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR * 111)
        optimizer.zero_grad(set_to_none=set_to_none)
    assert optimizer.backward_passes_per_step == 3
    optimizer.backward_passes_per_step = 1
    model.loss(1).backward()
    optimizer.synchronize()
    assert reduced(model) == expected(model, FACTOR)


def test_fewer_passes_than_announced(world: FakeWorld) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, backward_passes_per_step=3)
    for _ in range(2):
        model.loss().backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


def test_more_passes_than_announced(world: FakeWorld) -> None:
    model = Scales((2,), (3,))
    optimizer = wrap(model)
    model.loss().backward()
    with pytest.raises(UsageError, match=r"'p\.\d' was computed 2 times.*backward_passes_per_step is 1.*no_sync"):
        model.loss().backward()
    with pytest.raises(UsageError, match="between backward"):
        optimizer.set_backward_passes_per_step(2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync(world: FakeWorld, set_to_none: bool) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for _ in range(3):
        calls = len(world.submitted)
        with optimizer.no_sync():
            model.loss(1).backward()
            model.loss(10).backward()
            optimizer.synchronize_pending()
        assert len(world.submitted) == calls
        model.loss(100).backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR * 111)
        optimizer.zero_grad(set_to_none=set_to_none)


def test_what_no_sync_left_can_be_dropped(world: FakeWorld) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    with optimizer.no_sync():
        model.loss().backward()
    optimizer.zero_grad()
    assert reduced(model) == [None]


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, _Halves])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_changes_of_gradients_on_their_way_are_noticed(
    world: FakeWorld, compression: type[hvd.Compressor], set_to_none: bool
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


@pytest.mark.parametrize("numel", [3, 20000])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_is_replaced_on_its_way_is_noticed(world: FakeWorld, set_to_none: bool, numel: int) -> None:
    model = Scales((numel,), (3,))
    optimizer = wrap(model)
    for replaces in (False, False, False, True, False, True):
        model.loss().backward()
        if replaces:
            gradient = model.p[0].grad
            assert gradient is not None
            replacement = gradient * 7.0
            while replacement._version < gradient._version:
                replacement.mul_(1.0)  # so that both were changed as often
            model.p[0].grad = replacement
            with pytest.warns(UserWarning, match=r"gradient of 'p\.0' was changed"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("numel", [3, 20000])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_is_dropped_on_its_way_is_noticed(world: FakeWorld, set_to_none: bool, numel: int) -> None:
    model = Scales((numel,), (3,))
    optimizer = wrap(model)
    for drops in (False, True, False, True, False, True):
        model.loss().backward()
        if drops:
            drop(model.p[0])
            with pytest.warns(UserWarning, match=r"gradient of 'p\.0' was changed"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            model.loss().backward()
            optimizer.synchronize()
            drop(model.p[0])  # which is the way out
            before = model.p[0].clone()
            with optimizer.skip_synchronize():
                optimizer.step()
            assert torch.equal(model.p[0], before)
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.filterwarnings("ignore:the gradient")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("after_synchronize", [True, False])
def test_gradients_that_the_program_gives_other_memory(
    world: FakeWorld, set_to_none: bool, after_synchronize: bool
) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for step in range(5):
        model.loss(step + 1).backward()
        if after_synchronize:
            optimizer.synchronize()
        for p in model.p:
            assert p.grad is not None
            p.grad.data = p.grad.data * 0.5
        if after_synchronize:
            assert reduced(model) == expected(model, FACTOR * (step + 1) / 2)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            with pytest.warns(UserWarning, match=r"were changed") if step > 1 else nullcontext():
                optimizer.step()
            arrived = zip(reduced(model), expected(model, FACTOR * (step + 1)), strict=True)
            # With the change, where gradients are looked at in step(); without it where they were on their way.
            assert all(value in (all_of_it, all_of_it / 2) for value, all_of_it in arrived)
        optimizer.zero_grad(set_to_none=set_to_none)


def test_zero_grad_between_backward_and_step(world: FakeWorld) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    model.loss().backward()
    with pytest.raises(UsageError, match=r"zero_grad\(\) before loss.*on all ranks.*synchronize") as caught:
        optimizer.zero_grad()
    assert isinstance(caught.value, AssertionError)  # which Horovod raises
    optimizer.synchronize()
    optimizer.zero_grad()


def test_model_zero_grad_drops_views_without_harm(world: FakeWorld) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    for _ in range(3):
        model.zero_grad()
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)


def test_synchronizing_once(world: FakeWorld) -> None:
    """step() and closures then reduce what synchronize() has not."""
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    optimizer.synchronizes_once = True

    def step(how: str) -> float:
        optimizer.zero_grad()
        model.loss().backward()
        if how == "pending":
            optimizer.synchronize_pending()
            optimizer.synchronize_pending()
        elif how == "twice":
            optimizer.synchronize()
            optimizer.synchronize()
        return 0.0

    for how in ("pending", "twice", "not", "not"):
        step(how)
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.step(lambda how=how: step(how))
        assert reduced(model) == expected(model, FACTOR)
    optimizer.zero_grad()
    submitted = len(world.submitted)
    optimizer.step()  # where there was no backward pass, other ranks may have had one
    assert len(world.submitted) > submitted


def test_step_after_synchronize_warns(world: FakeWorld, recwarn: pytest.WarningsRecorder) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    model.loss().backward()
    optimizer.synchronize()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.warns(UserWarning, match="skip_synchronize") as raised:
        scaler.step(optimizer)
    assert [warning.filename for warning in raised] == [__file__]
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


def test_a_step_that_skips_what_was_not_done_before(world: FakeWorld) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for _ in range(3):
        model.loss().backward()
        with optimizer.skip_synchronize():
            with pytest.raises(UsageError, match=r"step\(\).*skip_synchronize.*Call optimizer.synchronize\(\) before"):
                optimizer.step()
            assert not any(p.any() for p in model.p)  # which ranks would have changed each by its own gradients
            optimizer.synchronize()
            optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        with torch.no_grad():
            for p in model.p:
                p.zero_()
        optimizer.zero_grad()
    with optimizer.no_sync():
        model.loss().backward()
    with optimizer.skip_synchronize():
        optimizer.step()  # by gradients of this rank alone, which is what the program says
    assert reduced(model) == expected(model, 1.0)


def test_predivide(world: FakeWorld) -> None:
    model = Scales((3,))
    optimizer = wrap(model, gradient_predivide_factor=4.0)
    model.loss().backward()
    optimizer.step()
    assert world.buckets[0].request.reduction == (hvd.Average, 0.25, 4.0)
    assert reduced(model) == [FACTOR]


def test_fp16_compression_is_the_runtimes(world: FakeWorld) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, compression=hvd.Compression.fp16)
    for _ in range(2):
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
    assert all(each.request.wire_dtype is DType.FLOAT16 for each in world.buckets)
    assert not world.allocated


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("orderly_steps", [1, 20])
def test_steps_in_inference_mode(
    world: FakeWorld, set_to_none: bool, orderly_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "_ORDERLY_STEPS", orderly_steps)
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for step in range(4):
        leave_out = () if step else (1,)
        model.loss(leave_out=leave_out).backward()
        with torch.inference_mode():
            optimizer.step()
        assert reduced(model) == expected(model, FACTOR, leave_out)
        optimizer.zero_grad(set_to_none=set_to_none)


def halve(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def double_elsewhere(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad * 2


def drop(p: torch.Tensor) -> None:
    p.grad = None


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize(("change", "factor"), [(halve, 0.5), (double_elsewhere, 2.0), (drop, 0.0)])
def test_hooks_of_the_program_change_what_is_reduced(
    world: FakeWorld, groups: int | None, change: Callable[[torch.Tensor], None], factor: float
) -> None:
    model = Scales((3,), (5,), (20000,))
    optimizer = wrap(model, groups=groups)
    for p in model.p:
        p.register_post_accumulate_grad_hook(change)
    for _ in range(4):
        model.loss().backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR * factor)
        optimizer.zero_grad()


def test_gradients_in_an_odd_layout(world: FakeWorld) -> None:
    model = Scales((200, 100), (4, 5))
    optimizer = wrap(model)
    for _ in range(3):
        for i, p in enumerate(model.p):
            p.grad = torch.full(p.shape[::-1], i + 1.0).t()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 and later have Tensor.grad_dtype")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_another_dtype_than_their_parameters(world: FakeWorld, set_to_none: bool) -> None:
    model = Scales((3,), (20000,), (0, 2), dtype=torch.bfloat16)
    for p in model.p:
        p.grad_dtype = torch.float32
    optimizer = wrap(model)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        leave_out = () if step else (1,)
        with optimizer.no_sync():
            model.loss(256.0, leave_out).backward()
        model.loss(1.0, leave_out).backward()  # the sum has more digits than bf16
        optimizer.synchronize()
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.p)
        assert reduced(model) == expected(model, 257.0 * FACTOR, leave_out)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph(world: FakeWorld) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    for _ in range(3):
        loss = torch.stack([(p - 2).square().sum() for p in model.p]).sum()
        loss.backward(create_graph=True)
        optimizer.synchronize()
        assert all(p.grad is not None and not p.grad.requires_grad for p in model.p)
        assert reduced(model) == [-4 * FACTOR, -4 * FACTOR]
        optimizer.zero_grad()


@pytest.mark.parametrize("numel", [3, 20000])
def test_one_tensor_as_the_gradient_of_two_parameters(world: FakeWorld, numel: int) -> None:
    model = Scales((numel,), (numel,))
    optimizer = wrap(model)
    for step in range(4):
        model.p[0].grad = model.p[1].grad = torch.full((numel,), step + 1.0)
        optimizer.synchronize()
        assert reduced(model) == [FACTOR * (step + 1)] * 2


@pytest.mark.parametrize("numel", [3, 20000])
def test_a_gradient_without_memory_of_its_own(world: FakeWorld, numel: int) -> None:
    model = Scales((numel,), (5,))
    optimizer = wrap(model)
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    gradient = Sharded(torch.ones(numel))
    model.p[0].grad = gradient
    with pytest.raises(ValueError, match=r"gradient of 'p\.0': a Sharded without memory of its own; pass .*to_local"):
        optimizer.step()
    assert gradient.to_local().tolist() == [1.0] * numel
