"""Corruption between real ranks: parameters and optimizer state that differ, and gradients that are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.errors import DivergenceError, NumericsError

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.not_with_three_ranks]


@contextmanager
def running(**settings: str) -> Iterator[None]:
    """hvdlite.torch with these settings."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(f"HVDLITE_{name}", value)
        hvd.init()
    try:
        if hvd.size() == 1:
            pytest.skip("alone there is nobody to differ from")
        yield
    finally:
        hvd.shutdown()


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 3))


def wrap(module: torch.nn.Module, make: Callable[..., torch.optim.Optimizer], **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(make(module.parameters(), lr=0.01), module.named_parameters(), **arguments)


def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.full((2, 100), 1.0 + hvd.rank())).sum().backward()
    optimizer.step()


def is_last() -> bool:
    return hvd.rank() == hvd.size() - 1


def who() -> str:
    """What is said where the last rank differs; of two nobody knows which is right."""
    return "differs between ranks 0 and 1" if hvd.size() == 2 else f"of rank {hvd.size() - 1} differs"


def flip_bit(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.int32).flatten()[7] ^= 1  # the lowest of a mantissa


def flip_parameter(module: torch.nn.Sequential, _: torch.optim.Optimizer) -> None:
    flip_bit(module[0].weight)


def flip_state(module: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    flip_bit(optimizer.state[module[1].weight]["exp_avg_sq"])


def drop_state(module: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[module[0].bias]["max_exp_avg_sq"] = torch.zeros(200)


def change_rate(_: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 1 + 1e-15


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (flip_parameter, "parameter '0.weight'"),
        (flip_state, "'exp_avg_sq' of the optimizer for '1.weight'"),
        (drop_state, "which entries there are of the optimizer for '0.bias'"),
        (change_rate, "'lr' of parameter group 0"),
    ],
)
def test_what_differs_is_named(spoil: Callable[..., None], what: str) -> None:
    with running(CHECK_EVERY="2"):
        module = model()
        optimizer = wrap(module, torch.optim.Adam)
        for _ in range(3):
            step(module, optimizer)
        optimizer.zero_grad()
        module(torch.ones(2, 100)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            if is_last():
                hook = optimizer.register_step_post_hook(lambda *_: spoil(module, optimizer))
            with pytest.raises(DivergenceError) as raised:
                optimizer.step()
        text = str(raised.value)
        assert text.startswith(f"after step 4 {what} {who()}"), text
        assert "after step 2 all ranks had the same" in text
        if is_last():
            hook.remove()
        # It is no end of the job: a checkpoint can be loaded.
        if hvd.size() > 1:
            again = model()
            fresh = wrap(again, torch.optim.Adam)
            for _ in range(4):
                step(again, fresh)


class Keeping(torch.optim.SGD):
    """Its state has keys that are no names, and tensors that are not compared."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p] |= {
                1: p.detach().clone(),
                ("a", 2): torch.eye(8).to_sparse(),
                "b": torch.empty(8, device="meta"),
            }
        return loss


def test_state_of_every_kind() -> None:
    with running(CHECK_EVERY="1"):
        module = model()
        optimizer = wrap(module, Keeping)
        for _ in range(3):
            step(module, optimizer)
        if is_last():
            optimizer.register_step_post_hook(lambda *_: flip_bit(optimizer.state[module[1].weight][1]))
        with pytest.raises(DivergenceError, match=rf"'1' of the optimizer for '1.weight' {who()}"):
            step(module, optimizer)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_ranks_that_are_alike_go_on(make: Callable[..., torch.optim.Optimizer], op: int) -> None:
    with running(CHECK_EVERY="1"):
        if op == hvd.Adasum and hvd.size() != 2:
            pytest.skip("Adasum takes powers of two")
        module = model()
        optimizer = wrap(module, make, op=op)
        before = module[0].weight.detach().clone()
        for _ in range(4):
            step(module, optimizer)
        assert not torch.equal(module[0].weight, before)


def test_ranks_that_have_joined_count_from_there() -> None:
    with running(CHECK_EVERY="3"):
        module = model()
        optimizer = wrap(module, torch.optim.SGD)
        for _ in range(4 if is_last() else 5):
            step(module, optimizer)
        hvd.join()
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        for _ in range(2):
            step(module, optimizer)
        if is_last():
            module[0].weight.data.add_(1.0)
        own = 7 if is_last() else 8
        with pytest.raises(DivergenceError, match=rf"after step {own} .* after step 3 all ranks had the same"):
            step(module, optimizer)


def test_adasum() -> None:
    with running(CHECK_EVERY="3", CHECK_NUMERICS="warn"):
        if hvd.size() != 2:
            pytest.skip("Adasum takes powers of two")
        module = model()
        optimizer = wrap(module, torch.optim.SGD, op=hvd.Adasum)
        step(module, optimizer)
        if is_last():
            flip_parameter(module, optimizer)
        step(module, optimizer)
        with pytest.raises(DivergenceError, match=r"after step 3 parameter '0.weight' differs between ranks 0 and 1"):
            step(module, optimizer)


def test_elastic_code_goes_back_to_its_last_commit() -> None:
    with running(CHECK_EVERY="1", LOG_LEVEL="error"):
        module = model()
        optimizer = wrap(module, torch.optim.SGD)
        state = hvd.elastic.TorchState(model=module, optimizer=optimizer, number=0)

        @hvd.elastic.run
        def train(state: Any) -> None:
            while state.number < 4:
                if state.number == 2 and not flipped and is_last():
                    flipped.append(True)
                    flip_parameter(module, optimizer)
                step(module, optimizer)
                state.number += 1
                state.commit()

        flipped: list[bool] = []
        train(state)
        assert state.number == 4 and len(flipped) == is_last()
        weights = hvd.allgather(module[0].weight.detach().unsqueeze(0))
        assert all(torch.equal(other, weights[0]) for other in weights)


def test_a_rank_that_has_joined_is_not_compared() -> None:
    with running(CHECK_EVERY="1"):
        module = model()
        optimizer = wrap(module, torch.optim.SGD)
        for _ in range(2 if is_last() else 4):
            step(module, optimizer)
        hvd.join()


class Lossless(hvd.Compression.none):  # type: ignore[misc]
    """A compressor of the user's."""


@pytest.mark.parametrize(
    "arguments",
    [{}, {"compression": hvd.Compression.fp16}, {"compression": Lossless}, {"groups": 2}, {"sparse_as_dense": True}],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_every_kind_of_bucket_is_looked_at(
    arguments: dict[str, Any], sparse: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first step, when buckets are a guess, and in later ones, small gradients and large ones."""
    with running(CHECK_NUMERICS="warn", LOG_LEVEL="warning"):
        logger = logging.getLogger("hvdlite")
        logger.addHandler(caplog.handler)
        try:
            table = torch.nn.Embedding(10, 100, sparse=sparse)
            layers = model()
            module = torch.nn.ModuleDict({"table": table, "layers": layers})
            optimizer = wrap(module, torch.optim.SGD, **arguments)
            spoiled = [layers[0].weight, layers[1].bias, table.weight]
            for number in range(8):
                optimizer.zero_grad()
                layers(table(torch.arange(4))).sum().backward()
                victim = spoiled[number // 2 % 3]
                if number % 2 == 0 and is_last():
                    # As a hook of the user's would: the sum that autograd accumulates next is not finite.
                    handle = victim.register_hook(lambda gradient: gradient * math.nan)
                optimizer.step()
                with torch.no_grad():
                    for p in module.parameters():
                        p.fill_(0.5)
                if number % 2 == 1 and is_last():
                    handle.remove()
        finally:
            logger.removeHandler(caplog.handler)
        told = [r.getMessage().partition(" has ")[0] for r in caplog.records if "has found it" in r.getMessage()]
        names = ["layers.0.weight", "layers.1.bias", "table.weight", "layers.0.weight"]
        last = hvd.size() - 1
        wanted = [f"step {2 + 2 * i}: the gradient of '{name}' on rank {last}" for i, name in enumerate(names)]
        assert told == (wanted if is_last() else [])


@pytest.mark.parametrize("sparse", [False, True])
def test_what_float16_makes_infinite_is_found_and_nothing_else(sparse: bool) -> None:
    """Sparse gradients are divided before they are cast, and others afterwards."""
    with running(CHECK_NUMERICS="raise"):
        table = torch.nn.Embedding(10, 100, sparse=sparse)
        optimizer = wrap(table, torch.optim.SGD, compression=hvd.Compression.fp16, gradient_predivide_factor=4.0)

        def reduce(value: float) -> None:
            optimizer.zero_grad()
            (table(torch.arange(4)) * value).sum().backward()
            optimizer.synchronize()
            assert table.weight.grad is not None
            assert table.weight.grad.to_dense().isfinite().all()

        for _ in range(3):
            reduce(6e4)
        if sparse:
            reduce(1e5)
        else:
            with pytest.raises(NumericsError, match="values up to 100000, which are Inf in float16"):
                reduce(1e5)
