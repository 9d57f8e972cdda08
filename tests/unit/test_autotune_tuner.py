"""Autotuning in DistributedOptimizer, on the runtime of fake_runtime.py: when it measures, what it must not disturb."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_runtime import FakeRuntime, install
from hvdlite.autotune.log import Choice, Job, TuningLog, read_choice
from hvdlite.autotune.search import Search
from hvdlite.autotune.settings import Settings, Space
from hvdlite.autotune.tuner import Tuner, start_tuning
from hvdlite.config import Config
from hvdlite.errors import MismatchError
from optimizer_lab import FACTOR, Scales, expected, reduced, wrap

SHAPES = [(300,)] * 40  # buckets of 4096 bytes hold three of these
BYTES = 40 * 300 * 4


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return install(monkeypatch, FakeRuntime(3, bucket_bytes=4096, autotune=True))


class Steps:
    """A tuner, and a clock by which steps take as long as ``cost`` says of the bucket size."""

    def __init__(self, runtime: FakeRuntime, cost: Any, path: str = "") -> None:
        self.runtime = runtime
        self.cost = cost
        self.now = 0.0
        self.replanned = 0
        default = Settings.of(runtime.config)
        space = Space(default, 1, 1, lambda limit: (limit,) * (100_000 // limit))
        self.search = Search(default, space.ladders(), space.effect, warmup=0, samples=14)
        log = TuningLog(path, Job(3, 1, 100_000))
        self.tuner = Tuner(runtime, self.search, log, self._replan, lambda: self.now)  # type: ignore[arg-type]

    def _replan(self) -> None:
        self.replanned += 1
        self.now += 1000.0  # what changes cost is not measured

    def step(self) -> bool:
        self.now += self.cost(self.runtime.config.bucket_bytes)
        return self.tuner.after_step()


def test_it_measures_and_changes_between_steps(runtime: FakeRuntime, tmp_path: Path) -> None:
    measured: list[int] = []

    def cost(bucket_bytes: int) -> float:
        measured.append(bucket_bytes)
        return {256: 1.2, 1024: 1.0, 4096: 1.5, 16384: 1.6}[bucket_bytes]

    steps = Steps(runtime, cost, str(tmp_path / "log.csv"))
    count = 1
    while steps.step():
        count += 1
    assert runtime.config.bucket_bytes == 1024
    # Both neighbours, what lies beyond the better one, four turns of two; seven steps each, and one before all.
    samples = [4096, 16384, 1024, 256, *[4096, 1024] * 4]
    assert measured == [4096, *(size for size in samples for _ in range(7))]
    assert count == len(measured) < 100
    assert steps.replanned == len(samples) - 1
    assert [call["name"] for call in runtime.calls if call["kind"] == "allreduce"] == ["autotune.step_times"] * 12
    choice = read_choice(str(tmp_path / "log.csv"))
    assert choice == Choice(Job(3, 1, 100_000), Settings.of(runtime.config))
    assert ",4500.000,defaults\n" in (tmp_path / "log.csv").read_text()  # three times of what this rank measured


def test_a_rank_that_has_joined_stops_it_until_all_are_back(runtime: FakeRuntime) -> None:
    steps = Steps(runtime, lambda _: 1.0)
    for _ in range(7):
        steps.step()
    runtime.error = MismatchError("rank 1 called join() and cannot take part")
    asked = len(runtime.calls)
    for _ in range(20):
        assert steps.step()
    assert [call["kind"] for call in runtime.calls[asked:]] == ["allreduce"]
    runtime.joins += 1
    for _ in range(7):
        assert steps.step()
        assert steps.search.settings.bucket_bytes == 4096
    steps.step()
    assert runtime.config.bucket_bytes == 16384


def test_others_that_joined_meanwhile_cost_one_sample(runtime: FakeRuntime) -> None:
    """All ranks hear of the end of a join, those too that were ahead in the sample."""
    steps = Steps(runtime, lambda _: 1.0)
    for _ in range(6):
        steps.step()
    runtime.joins += 1
    for _ in range(7):
        steps.step()
        assert not runtime.calls
    steps.step()
    assert [call["kind"] for call in runtime.calls] == ["allreduce", "configure"]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_right_in_every_step(runtime: FakeRuntime, dtype: torch.dtype, set_to_none: bool) -> None:
    """They stay what they are when they move, so that step() has the right ones, and whoever looks after it."""
    model = Scales(*SHAPES, dtype=dtype)
    optimizer = wrap(model)
    for step in range(101):
        model.loss(step % 3 + 1).backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR * (step % 3 + 1))
        optimizer.zero_grad(set_to_none=set_to_none)
    plans = {name.split(".")[1] for name in runtime.names() if name and name.startswith("optimizer")}
    assert len(plans) > 3
    assert len(runtime.allocated) == 1  # they move within their buffer
    asked = runtime.names().count("autotune.step_times")
    assert 3 <= asked <= 14
    for _ in range(20):  # over: nobody asks any more
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    assert runtime.names().count("autotune.step_times") == asked


def test_without_it_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = install(monkeypatch, FakeRuntime(3, bucket_bytes=4096))
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for _ in range(20):
        model.loss().backward()
        optimizer.step()
    assert optimizer._hvd_reducer._tuner is None
    assert "autotune.step_times" not in runtime.names()


@pytest.mark.parametrize("passes", [1, 3])
def test_accumulation_closures_and_skipped_steps_are_steps(runtime: FakeRuntime, passes: int) -> None:
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


def test_a_parameter_that_goes_and_one_that_comes(runtime: FakeRuntime) -> None:
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


def test_after_a_restart_it_starts_over(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for again in range(2):
        runtime = install(monkeypatch, FakeRuntime(3, bucket_bytes=4096, autotune=True)) if again else runtime
        for _ in range(30):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
            assert reduced(model) == expected(model, FACTOR)
        assert runtime.names().count("autotune.step_times") >= 3


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


def test_a_second_optimizer_is_not_tuned(runtime: FakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    first, second = train(), train()
    assert first._hvd_reducer._tuner is not None
    assert second._hvd_reducer._tuner is None
    assert "only the first DistributedOptimizer of all ranks is tuned; this is another one" in said(caplog)


def test_a_process_set_is_not_tuned(runtime: FakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    whole = SimpleNamespace(group=FakeRuntime(5), choice=None)
    tuner = start_tuning(whole, runtime, 0, BYTES, 4096, lambda limit: (limit,), lambda: None)  # type: ignore[arg-type]
    assert tuner is None
    assert "this is one of a process set" in said(caplog)


def test_where_nothing_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "log.csv")
    install(monkeypatch, FakeRuntime(3, nodes=1, autotune=True, autotune_log=path))
    assert train()._hvd_reducer._tuner is None
    assert "nothing to choose from" in said(caplog)
    choice = read_choice(path)
    assert choice is not None and choice.settings == replace(Settings.of(Config()), bucket_bytes=8 << 20)


@pytest.mark.parametrize("autotune", [True, False])
def test_a_choice_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch, autotune: bool) -> None:
    runtime = install(monkeypatch, FakeRuntime(3, autotune=autotune, autotune_load="log.csv"))
    found = replace(Settings.of(runtime.config), bucket_bytes=5000)
    runtime.choice = Choice(Job(3, 2, BYTES), found)
    optimizer = train()
    assert optimizer._hvd_reducer._tuner is None
    assert Settings.of(runtime.config) == found
    assert len({name for name in runtime.names() if name and ".plan2.bucket" in name}) > 8


@pytest.mark.parametrize("autotune", [True, False])
def test_a_choice_that_does_not_fit_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, autotune: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = install(monkeypatch, FakeRuntime(3, bucket_bytes=4096, autotune=autotune, autotune_load="log.csv"))
    default = Settings.of(runtime.config)
    runtime.choice = Choice(Job(8, 2, BYTES), replace(default, bucket_bytes=5000))
    optimizer = train()
    assert (optimizer._hvd_reducer._tuner is not None) is autotune
    assert Settings.of(runtime.config) == default
    text = said(caplog)
    assert f"log.csv was made for 8 ranks on 2 nodes with {BYTES} bytes of gradients; this job has 3 ranks" in text
