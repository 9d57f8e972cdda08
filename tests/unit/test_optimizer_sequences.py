"""DistributedOptimizer under random sequences of all that a program may do between two steps."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch

from fake_world import Universe
from hvdlite.errors import MismatchError
from hvdlite.torch import arrival
from optimizer_lab import FACTOR, Scales, wrap

SHAPES = ((3,), (20000,), (), (40, 300), (7,), (0, 2), (9000,))
STEPS = 25


@pytest.mark.parametrize(("nodes", "bucket_bytes"), [(1, 4096), (2, 4096), (1, 1 << 30)])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("orderly_steps", [1, 3])
def test_gradients_are_right_after_every_step(
    universe: Universe,
    nodes: int,
    bucket_bytes: int,
    seed: int,
    orderly_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters go on and off, before and after backward; passes are several, paused, or leave parameters out."""
    monkeypatch.setattr(arrival, "_ORDERLY_STEPS", orderly_steps)
    choose = random.Random(seed)
    world = universe.start(3, nodes=nodes, bucket_bytes=bucket_bytes)
    model = Scales(*SHAPES)
    optimizer, before = wrap(model), 1
    everything = range(len(SHAPES))
    for step in range(STEPS):
        is_eventful = choose.random() < 0.6  # else a step as most are
        if is_eventful and choose.random() < 0.1:
            world = universe.start(3, nodes=nodes, bucket_bytes=bucket_bytes)
        optimizer.zero_grad(set_to_none=choose.random() < 0.7)
        switched = {i for i in everything if is_eventful and choose.random() < 0.15}
        for i in switched:
            model.p[i].requires_grad_(not model.p[i].requires_grad)
        on = {i for i in everything if model.p[i].requires_grad}
        passes = choose.choice([1, 1, 2]) if is_eventful else 1
        if passes != before:
            optimizer.set_backward_passes_per_step(passes)
            before = passes
        local = dict.fromkeys(everything, 0.0)
        came: set[int] = set()
        for number in range(choose.randint(0, passes) if is_eventful else passes):
            for is_paused in (True, False) if is_eventful and choose.random() < 0.3 else (False,):
                leave_out = {i for i in everything if is_eventful and choose.random() < 0.15}
                if not on - leave_out:
                    continue
                factor = 1.0 + number + 10 * is_paused
                loss = model.loss(factor, tuple(leave_out))
                if is_paused:
                    with optimizer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
                    came |= on - leave_out
                for i in on - leave_out:
                    local[i] += (i + 1) * factor
        for i in sorted(came) if is_eventful and choose.random() < 0.2 else ():
            if choose.random() < 0.3:
                model.p[i].requires_grad_(False)  # too late to make a difference
        if is_eventful and choose.random() < 0.1:
            world.error = MismatchError("another rank's shape")
            with suppress(MismatchError):  # where something was left to submit
                optimizer.synchronize()
            world.error = None
            continue
        optimizer.synchronize()
        for i, p in enumerate(model.p):
            if i in on:
                assert p.grad is not None, (step, i)
                assert torch.equal(p.grad, torch.full_like(p, FACTOR * local[i])), (step, i, local[i])
            else:
                assert p.grad is None or not p.grad.any(), (step, i)
        with optimizer.skip_synchronize():
            optimizer.step()
