"""torch.profiler shows what the timeline does, on the threads that it profiles."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hvdlite
import hvdlite.torch as hvd

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]


def names_of(run: profile) -> set[str]:
    return {event.name for event in run.events() if event.name.startswith("hvdlite ")}


def test_waits_and_reductions() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as run:
        for _ in range(50):
            hvd.allreduce(torch.ones(1000), name="loss")
    found = names_of(run)
    assert "hvdlite wait: allreduce 'loss'" in found
    if hvd.size() > 1:  # a thread that waits does the coordinator's work, unless the coordinator is at it
        assert "hvdlite node allreduce: loss" in found


def test_a_step_of_an_optimizer() -> None:
    model = torch.nn.Linear(3, 4)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    with profile(activities=[ProfilerActivity.CPU]) as run:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert names_of(run) >= {"hvdlite optimizer: step"} | ({"hvdlite wait: synchronize"} if hvd.size() > 1 else set())


def test_nothing_is_recorded_without_a_profiler_or_a_timeline() -> None:
    recorder = hvdlite.runtime().recorder
    with profile(activities=[ProfilerActivity.CPU]):
        assert recorder.enabled
        hvd.allreduce(torch.ones(10))
    assert not recorder.enabled
    assert recorder.held == 0
