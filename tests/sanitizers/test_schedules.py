"""Schedules by random priorities (tests/gpusim/scheduler.h) find mistakes that timing hides, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from compiler import COMPILER, CSRC, of_gpus, run
from gpusim.build import built, joined

SEEDS = range(50)
Schedule = Callable[[str, int], "CompletedProcess[str]"]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    """A case of device_schedules.cpp, by the schedule of a seed."""
    program = tmp_path_factory.mktemp("schedules") / "program"
    sources = [*of_gpus("cuda_driver"), Path(__file__).with_name("device_schedules.cpp")]
    flags = ["-std=c++17", "-O1", "-pthread", "-iquote", CSRC]
    result = run(*COMPILER, *flags, *joined(sources), "-ldl", "-o", program)
    assert result.returncode == 0, result.stdout
    # Patience enough for a busy machine: where no thread waits for another, the schedule is then that of the seed.
    return lambda case, seed: run(
        program, built(), case, GPUSIM_PCT=str(seed), GPUSIM_PATIENCE_US="2000" if "hand" in case else "1000000"
    )


@pytest.mark.parametrize("case", ["two slots", "hand over"])
def test_what_is_right_is_right_by_every_schedule(schedule: Schedule, case: str) -> None:
    results = [schedule(case, seed) for seed in SEEDS]
    assert [result.stdout for result in results if result.returncode != 0] == []


@pytest.mark.parametrize("case", ["two slots, race", "hand over, race"])
def test_a_mistake_is_seen_by_some_schedule(schedule: Schedule, case: str) -> None:
    results = [schedule(case, seed) for seed in SEEDS]
    assert any("failed: results" in result.stdout for result in results)


def test_a_seed_repeats_its_schedule(schedule: Schedule) -> None:
    orders = [schedule("order", seed).stdout for seed in range(8)]
    assert orders == [schedule("order", seed).stdout for seed in range(8)]
    assert len(set(orders)) > 4
