"""DistributedOptimizer between real ranks: what ends up in ``p.grad``, and that all ranks have the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.recorder import Lane
from scales_lab import SHAPES, Scales, check, needs_two, same_everywhere, total, wrap

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps(dtype: torch.dtype, set_to_none: bool) -> None:
    model = Scales(dtype=dtype)
    optimizer = wrap(model, op=hvd.Sum)
    for step in range(4):
        model.loss((hvd.rank() + 1) * (step + 1)).backward()
        optimizer.synchronize()
        check(model, lambda _: total() * (step + 1))  # noqa: B023
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert model.p[0][0, 0].item() == -0.5 * total() * (1 + 2 + 3 + 4)
    assert same_everywhere(model)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        (hvd.Average, lambda n: (n + 1) / 2),
        (hvd.Min, lambda n: 1.0),
        (hvd.Max, lambda n: float(n)),
    ],
)
def test_ops(op: int, factor: Callable[[int], float]) -> None:
    model = Scales()
    optimizer = wrap(model, op=op)
    for _ in range(3):
        model.loss(hvd.rank() + 1).backward()
        optimizer.step()
        check(model, lambda _: factor(hvd.size()))
        optimizer.zero_grad()


@pytest.mark.parametrize("compression", ["fp16", "bf16", "custom"])
def test_compression(compression: str) -> None:
    class Halving(hvd.Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor.double() / 2, tensor.dtype

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return (tensor * 2).to(ctx)

    needs_two()
    model = Scales()
    compressor = Halving if compression == "custom" else getattr(hvd.Compression, compression)
    optimizer = wrap(model, op=hvd.Sum, compression=compressor)
    for leave_out in [(), (0, 2, 7), ()]:
        model.loss(hvd.rank() + 1, leave_out).backward()
        optimizer.step()
        check(model, lambda i: 0.0 if i in leave_out else total())  # noqa: B023
        optimizer.zero_grad()


def test_predivide() -> None:
    model = Scales()
    optimizer = wrap(model, gradient_predivide_factor=float(hvd.size()))
    model.loss(hvd.rank() + 1).backward()
    optimizer.step()
    for i, p in enumerate(model.p):
        assert p.grad is not None
        assert torch.allclose(p.grad, torch.full_like(p, (i + 1) * total() / hvd.size()))


def test_other_parameters_on_every_rank() -> None:
    """Each rank leaves out parameters of its own; one is left out by all."""
    needs_two()
    model = Scales()
    optimizer = wrap(model, op=hvd.Sum)
    rng = random.Random(0)
    for _ in range(6):
        leave_out = [(*rng.sample(range(len(SHAPES) - 1), 3), 2) for _ in range(hvd.size())]
        model.loss(hvd.rank() + 1, leave_out[hvd.rank()]).backward()
        optimizer.synchronize()
        check(model, lambda i: float(sum(rank + 1 for rank in range(hvd.size()) if i not in leave_out[rank])))  # noqa: B023
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere(model)


def test_a_rank_without_any_backward() -> None:
    needs_two()
    model = Scales()
    optimizer = wrap(model, op=hvd.Sum)
    for step in range(4):
        silent = step % hvd.size()
        if hvd.rank() != silent:
            model.loss(1.0).backward()
        optimizer.step()
        check(model, lambda _: hvd.size() - 1.0)
        optimizer.zero_grad()


@pytest.mark.parametrize("who", ["all", "rank 0"])
@pytest.mark.parametrize("groups", [0, 2])  # 0: one bucket; with two, each is on its way before step()
def test_a_state_loaded_between_backward_and_step(groups: int, who: str) -> None:
    """Ranks that load none do not wait, and step() may come after it."""
    model = Scales()
    optimizer = wrap(model, op=hvd.Sum, groups=groups)
    for does_step in [True, False, True, False, True]:
        optimizer.zero_grad()
        model.loss(hvd.rank() + 1).backward()
        if who == "all" or hvd.rank() == 0:
            optimizer.load_state_dict(optimizer.state_dict())
            check(model, lambda _: total())
        if does_step or (who != "all" and hvd.rank() > 0):
            optimizer.step()
            check(model, lambda _: total())


def test_another_order_on_every_rank() -> None:
    """Rank 0's order is planned; the others' arrive otherwise and must still match."""
    shapes = [(200, 200)] * 12
    model = Scales(shapes)
    optimizer = wrap(model, op=hvd.Sum)
    order = list(range(len(shapes)))
    random.Random(hvd.rank()).shuffle(order)
    for _ in range(4):
        # Gradients arrive in the reverse of the order in which parameters are used.
        x = torch.ones(())
        for i in order:
            x = x + (i + 1) * (hvd.rank() + 1) * model.p[i].sum()
        x.backward()
        optimizer.step()
        check(model, lambda _: total())
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["passes", "no_sync"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(how: str, set_to_none: bool) -> None:
    model = Scales()
    optimizer = wrap(model, op=hvd.Sum, backward_passes_per_step=3 if how == "passes" else 1)
    for _ in range(3):
        for factor in (1, 10, 100):
            loss = model.loss(factor * (hvd.rank() + 1))
            if how == "no_sync" and factor < 100:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        check(model, lambda _: 111 * total())
        optimizer.zero_grad(set_to_none=set_to_none)


def test_switched_off_and_on() -> None:
    needs_two()
    model = Scales()
    model.p[3].requires_grad_(False)
    optimizer = wrap(model, op=hvd.Sum)
    frozen = {3}
    for step in range(12):
        if step == 3:
            frozen = {0, 7}
        if step == 6:
            frozen = set(range(len(SHAPES))) - {1}
        if step == 9:
            frozen = set()
        for i, p in enumerate(model.p):
            p.requires_grad_(i not in frozen)
        model.loss(hvd.rank() + 1).backward()
        optimizer.step()
        for i, p in enumerate(model.p):
            if i in frozen:
                assert p.grad is None
            else:
                assert p.grad is not None
                assert torch.equal(p.grad, torch.full_like(p, (i + 1) * total()))
        optimizer.zero_grad()
    assert same_everywhere(model)


@pytest.mark.parametrize("groups", [1, 4])
def test_frozen_after_backward_where_ranks_lack_gradients(groups: int) -> None:
    """A rank with all its gradients takes another way than one without some; both reduce the same buckets."""
    needs_two()
    model = Scales([(3,), (9000,), (40, 300), (7,), (5,), (20000,)])
    optimizer = wrap(model, op=hvd.Sum, groups=groups)
    everything = range(len(model.p))
    together = random.Random(0)
    frozen: set[int] = set()
    on = set(everything)
    for _ in range(40):
        for i, p in enumerate(model.p):
            p.requires_grad_(i not in frozen)
        was_on, on = on, set(everything) - frozen
        lacking = [
            {i for i in everything if together.random() < 0.2} if together.random() < 0.5 else set()
            for _ in range(hvd.size())
        ]
        mine = on - lacking[hvd.rank()]
        if mine:
            model.loss(hvd.rank() + 1.0, tuple(set(everything) - mine)).backward()
        later = {i for i in on & was_on if together.random() < 0.2}
        for i in later:
            model.p[i].requires_grad_(False)
        optimizer.step()
        for i in on - later:
            gradient = model.p[i].grad
            assert gradient is not None
            total = sum(rank + 1.0 for rank in range(hvd.size()) if i not in lacking[rank])
            assert torch.equal(gradient, torch.full_like(gradient, (i + 1) * total))
        frozen = {i for i in later | frozen if together.random() < 0.5}
        on -= later
        optimizer.zero_grad()


def test_two_optimizers_in_turns() -> None:
    models = [Scales([(50, 50), (3,)]), Scales([(20,), (60, 60)], torch.float64)]
    optimizers = [wrap(model, op=hvd.Sum) for model in models]
    for step in range(4):
        for model in models if step % 2 else reversed(models):
            model.loss(hvd.rank() + 1).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            check(model, lambda _: total())
            optimizer.zero_grad()


def test_mixed_dtypes() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    model = torch.nn.ModuleList([Scales([(30, 30), (5,)], dtype) for dtype in dtypes])
    optimizer = wrap(model, op=hvd.Sum)
    for _ in range(3):
        torch.stack([part.loss(hvd.rank() + 1) for part in model]).sum().backward()
        optimizer.step()
        for part in model:
            check(part, lambda _: total())
        optimizer.zero_grad()


def test_channels_last() -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    alone = copy.deepcopy(conv)
    optimizer = wrap(conv, op=hvd.Sum)
    x = torch.randn(2, 8, 6, 6)
    for _ in range(3):
        conv.zero_grad()
        alone.zero_grad()
        (conv(x).sum() * (hvd.rank() + 1)).backward()
        (alone(x).sum() * total()).backward()
        optimizer.synchronize()
        for p, q in zip(conv.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.allclose(p.grad, q.grad, rtol=1e-5)


@pytest.mark.parametrize("numel", [100, 300_000])
def test_gradients_in_one_place(numel: int) -> None:
    """Autograd makes both gradients of ``p[None] + q[None]`` views of one; here on the first rank only."""
    p, q = (torch.nn.Parameter(torch.zeros(numel)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=0.0), op=hvd.Sum)
    for _ in range(4):
        optimizer.zero_grad()
        both = p[None] + q[None] if hvd.rank() == 0 else p[None] * 2 + q[None] * 3
        (both * torch.ones(1, numel)).sum().backward()
        optimizer.step()
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, torch.full((numel,), 1.0 + 2 * (hvd.size() - 1)))
        assert torch.equal(q.grad, torch.full((numel,), 1.0 + 3 * (hvd.size() - 1)))


class ReducedBelow(torch.autograd.Function):
    """The identity; what was submitted before is reduced when its backward pass goes on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        hvd.barrier()
        return gradient * 1


def test_a_gradient_that_backward_is_not_done_with() -> None:
    """With a batch of one, that of ``p.unsqueeze(0)`` in a sum is a view of what goes on to layers below."""
    numel = 300_000
    below, p = (torch.nn.Parameter(torch.ones(numel)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([below, p], lr=0.0), op=hvd.Sum, groups=[[below], [p]])
    for _ in range(4):
        optimizer.zero_grad()
        hidden = ReducedBelow.apply(below * torch.ones(1, numel))  # type: ignore[no-untyped-call]
        ((hidden + p.unsqueeze(0)) * torch.full((1, numel), hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        for gradient in (below.grad, p.grad):
            assert gradient is not None
            assert torch.equal(gradient, torch.full((numel,), total()))


class Halved(hvd.Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor * 2


@pytest.mark.parametrize("compression", [hvd.Compression.none, Halved])
@pytest.mark.parametrize("how", ["replaced", "dropped"])
def test_the_result_is_that_of_what_backward_has_made(how: str, compression: Any) -> None:
    """Not of what the program puts in its place before the step; else ranks would go on with different ones."""
    needs_two()
    model = Scales()
    optimizer = wrap(model, op=hvd.Sum, compression=compression)
    for _ in range(4):
        optimizer.zero_grad()
        model.loss(hvd.rank() + 1).backward()
        for p in model.p:
            assert p.grad is not None
            p.grad = p.grad * 2 if how == "replaced" else None
        with pytest.warns(UserWarning, match="were changed between"):
            optimizer.step()
        check(model, lambda _: total())


@pytest.mark.parametrize("arguments", [{}, {"groups": 3}, {"compression": Halved}], ids=str)
def test_gradients_stay_in_a_buffer_of_the_program(arguments: dict[str, Any]) -> None:
    """Which it zeroes itself."""
    model = Scales()
    optimizer = wrap(model, op=hvd.Sum, **arguments)
    buffer = torch.empty(sum(p.numel() for p in model.p))
    places = [part.view(p.shape) for part, p in zip(buffer.split([p.numel() for p in model.p]), model.p, strict=True)]
    for p, place in zip(model.p, places, strict=True):
        p.grad = place
    for step in range(6):
        buffer.zero_()
        model.loss((hvd.rank() + 1) * (step + 1)).backward()
        optimizer.step()
        check(model, lambda _: total() * (step + 1))  # noqa: B023
        assert all(p.grad is place for p, place in zip(model.p, places, strict=True)), step


def test_after_shutdown_and_init() -> None:
    model = Scales()
    optimizer = wrap(model, op=hvd.Sum)
    for _ in range(2):
        for _ in range(3):
            optimizer.zero_grad()
            model.loss(hvd.rank() + 1).backward()
            optimizer.step()
            check(model, lambda _: total())
        hvd.shutdown()
        hvd.init()
    gradients = [p.grad for p in model.p]
    assert all(gradient is not None and gradient.sum() >= 0 for gradient in gradients)  # memory outlives the runtime


def test_gradients_of_users_in_the_fusion_buffer() -> None:
    """An allreduce of ``p.grad`` itself, once it lives in its slot."""
    model = Scales([(100, 100), (3,)])
    optimizer = wrap(model, op=hvd.Sum)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model.loss(hvd.rank() + 1).backward()
        optimizer.step()
    for p in model.p:
        assert p.grad is not None
        hvd.allreduce_(p.grad, op=hvd.Average)
    check(model, lambda _: total())


def test_timeline_spans() -> None:
    recorder = hvdlite.runtime().recorder
    model = Scales()
    optimizer = wrap(model)
    recorder.start()
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(1.0).backward()
        optimizer.step()
    recorder.stop()
    events, _ = recorder.drain()
    assert sum(event[1] is Lane.OPTIMIZER and event[2] == "step" for event in events) == 3
    if hvd.size() > 1:
        backward = [event for event in events if event[1] is Lane.BACKWARD and event[2] == "backward"]
        assert len(backward) == 3
        negotiated = [event[2] for event in events if event[1] is Lane.NEGOTIATION]
        assert any(name.startswith("NEGOTIATE_ALLREDUCE allreduce.optimizer") for name in negotiated)
        assert all(0 < start < end for _, _, _, start, end, _, _ in backward)
