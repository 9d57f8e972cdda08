"""Autotuning in DistributedOptimizer, in the worlds of fake_world.py: when it measures, what it must not disturb."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_world import FakeWorld, Universe
from hvdlite.autotune.log import Choice, TuningLog, Workload, read_choice
from hvdlite.autotune.search import Search
from hvdlite.autotune.settings import Space
from hvdlite.autotune.tuner import Tuner, start_tuning
from hvdlite.config import Config, Tunable
from hvdlite.errors import MismatchError
from optimizer_lab import FACTOR, Scales, expected, reduced, wrap

SHAPES = [(300,)] * 40  # buckets of 4096 bytes hold three of these
BYTES = 40 * 300 * 4


@pytest.fixture
def world(universe: Universe) -> FakeWorld:
    return universe.start(3, bucket_bytes=4096, autotune=True)


class Steps:
    """A tuner, and a clock by which steps take as long as ``cost`` says of the bucket size."""

    def __init__(self, world: FakeWorld, cost: Any, path: str = "") -> None:
        self.world = world
        self.cost = cost
        self.now = 0.0
        self.replanned = 0
        default = Tunable.of(world.config)
        space = Space(default, 1, 1, lambda limit: (limit,) * (100_000 // limit))
        self.search = Search(default, space.ladders(), space.effect, warmup=0, samples=14)
        log = TuningLog(path, Workload(3, 1, 100_000))
        self.tuner = Tuner(world.group, self.search, log, self._replan, lambda: self.now)

    def _replan(self) -> None:
        self.replanned += 1
        self.now += 1000.0  # what changes cost is not measured

    def step(self) -> bool:
        self.now += self.cost(self.world.config.bucket_bytes)
        return self.tuner.after_step()


def test_it_measures_and_changes_between_steps(world: FakeWorld, tmp_path: Path) -> None:
    measured: list[int] = []

    def cost(bucket_bytes: int) -> float:
        measured.append(bucket_bytes)
        return {256: 1.2, 1024: 1.0, 4096: 1.5, 16384: 1.6}[bucket_bytes]

    steps = Steps(world, cost, str(tmp_path / "log.csv"))
    count = 1
    while steps.step():
        count += 1
    assert world.config.bucket_bytes == 1024
    # Both neighbours, what lies beyond the better one, four turns of two; seven steps each, and one before all.
    samples = [4096, 16384, 1024, 256, *[4096, 1024] * 4]
    assert measured == [4096, *(size for size in samples for _ in range(7))]
    assert count == len(measured) < 100
    assert steps.replanned == len(samples) - 1
    assert [each.name for each in world.of_kind("allreduce")] == ["autotune.step_times"] * 12
    choice = read_choice(str(tmp_path / "log.csv"))
    assert choice == Choice(Workload(3, 1, 100_000), Tunable.of(world.config))
    assert ",4500.000,defaults\n" in (tmp_path / "log.csv").read_text()  # three times of what this rank measured


def test_a_rank_that_has_joined_stops_it_until_all_are_back(world: FakeWorld) -> None:
    steps = Steps(world, lambda _: 1.0)
    for _ in range(7):
        steps.step()
    world.error = MismatchError("rank 1 called join() and cannot take part")
    asked = len(world.submitted)
    for _ in range(20):
        assert steps.step()
    assert [each.request.label for each in world.submitted[asked:]] == ["allreduce"]
    world.joins += 1
    for _ in range(7):
        assert steps.step()
        assert steps.search.settings.bucket_bytes == 4096
    steps.step()
    assert world.config.bucket_bytes == 16384


def test_others_that_joined_meanwhile_cost_one_sample(world: FakeWorld) -> None:
    """All ranks hear of the end of a join, those too that were ahead in the sample."""
    steps = Steps(world, lambda _: 1.0)
    for _ in range(6):
        steps.step()
    world.joins += 1
    for _ in range(7):
        steps.step()
        assert not world.submitted
    steps.step()
    assert [each.request.label for each in world.submitted] == ["allreduce", "configure"]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_right_in_every_step(world: FakeWorld, dtype: torch.dtype, set_to_none: bool) -> None:
    """They stay what they are when they move, so that step() has the right ones, and whoever looks after it."""
    model = Scales(*SHAPES, dtype=dtype)
    optimizer = wrap(model)
    for step in range(101):
        model.loss(step % 3 + 1).backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR * (step % 3 + 1))
        optimizer.zero_grad(set_to_none=set_to_none)
    assignments = {name.split(".")[1] for name in world.names() if name.startswith("optimizer")}
    assert len(assignments) > 3
    assert len(world.allocated) == 1  # they move within their buffer
    asked = world.names().count("autotune.step_times")
    assert 3 <= asked <= 14
    for _ in range(20):  # over: nobody asks any more
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    assert world.names().count("autotune.step_times") == asked


def test_without_it_nothing_is_measured(universe: Universe) -> None:
    world = universe.start(3, bucket_bytes=4096)
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for _ in range(20):
        model.loss().backward()
        optimizer.step()
    assert optimizer._hvd_reducer._tuner is None
    assert "autotune.step_times" not in world.names()


@pytest.mark.parametrize("passes", [1, 3])
def test_accumulation_closures_and_skipped_steps_are_steps(world: FakeWorld, passes: int) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, backward_passes_per_step=passes)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for _ in range(passes):
            loss = model.loss()
            loss.backward()
        return loss

    for _ in range(60):
        optimizer.step(closure)
        assert reduced(model) == expected(model, FACTOR * passes)
        closure()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert reduced(model) == expected(model, FACTOR * passes)
    assert optimizer._hvd_reducer._tuner is None


def test_a_parameter_that_goes_and_one_that_comes(world: FakeWorld) -> None:
    model = Scales(*SHAPES)
    model.p[7].requires_grad_(False)
    optimizer = wrap(model)
    for step in range(100):
        if step == 9:
            model.p[7].requires_grad_(True)
        if step == 13:
            model.p[3].requires_grad_(False)
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
        gone = {7} if step < 9 else {3} if step >= 13 else set()
        values = expected(model, FACTOR)
        assert reduced(model) == [None if i in gone else value for i, value in enumerate(values)]


def test_after_a_restart_it_starts_over(universe: Universe, world: FakeWorld) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for again in range(2):
        world = universe.start(3, bucket_bytes=4096, autotune=True) if again else world
        for _ in range(30):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
            assert reduced(model) == expected(model, FACTOR)
        assert world.names().count("autotune.step_times") >= 3


# What is not tuned, and what is loaded.


def train(steps: int = 3) -> Any:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
    return optimizer


def said(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    return record.message


def test_a_second_optimizer_is_not_tuned(world: FakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    first, *others = [train() for _ in range(3)]
    assert first._hvd_reducer._tuner is not None
    assert [other._hvd_reducer._tuner for other in others] == [None, None]
    assert "only the first DistributedOptimizer of all ranks is tuned; this is another one" in said(caplog)


def test_a_process_set_is_not_tuned(world: FakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    whole: Any = SimpleNamespace(group=None, choice=None)
    for number in range(2):
        tuner = start_tuning(whole, world.group, number, BYTES, 4096, lambda limit: (limit,), lambda: None)
        assert tuner is None
    assert "this is one of a process set" in said(caplog)


def test_where_nothing_can_be_chosen(universe: Universe, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "log.csv")
    universe.start(3, nodes=1, autotune=True, autotune_log=path)
    assert train()._hvd_reducer._tuner is None
    assert "nothing to choose from" in said(caplog)
    choice = read_choice(path)
    assert choice is not None and choice.settings == Tunable.of(Config())._replace(bucket_bytes=8 << 20)


@pytest.mark.parametrize("autotune", [True, False])
def test_a_choice_that_fits_is_taken(universe: Universe, autotune: bool) -> None:
    world = universe.start(3, autotune=autotune, autotune_load="log.csv")
    found = Tunable.of(world.config)._replace(bucket_bytes=5000)
    world.runtime.choice = Choice(Workload(3, 2, BYTES), found)
    optimizer = train()
    assert optimizer._hvd_reducer._tuner is None
    assert Tunable.of(world.config) == found
    assert len({name for name in world.names() if ".assignment2.bucket" in name}) > 8


@pytest.mark.parametrize("autotune", [True, False])
def test_a_choice_that_does_not_fit_is_not_taken(
    universe: Universe, autotune: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = universe.start(3, bucket_bytes=4096, autotune=autotune, autotune_load="log.csv")
    default = Tunable.of(world.config)
    world.runtime.choice = Choice(Workload(8, 2, BYTES), default._replace(bucket_bytes=5000))
    optimizer = train()
    assert (optimizer._hvd_reducer._tuner is not None) is autotune
    assert Tunable.of(world.config) == default
    text = said(caplog)
    assert f"log.csv was made for 8 ranks on 2 nodes with {BYTES} bytes of gradients; this job has 3 ranks" in text
