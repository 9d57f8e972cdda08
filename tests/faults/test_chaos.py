"""A minute of tests/chaos.py on one machine, and what its job must count by itself."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import chaos
import chaos_job
from chaos import run


def test_no_sample_is_lost_or_counted_twice_while_ranks_die() -> None:
    seed = random.randrange(1000)  # which it prints
    assert run(1.0, 4, seed) == []


@pytest.mark.parametrize(
    ("words", "refusal", "runs"),
    [
        ([], None, ("on hosts", 20.0, 2)),
        ([], "they are refused", ("on one machine", 20.0, 4)),
        (["--one-machine", "--minutes", "1"], None, ("on one machine", 1.0, 4)),
        (["--hosts", "--ranks", "1"], None, ("on hosts", 20.0, 1)),
        (["--hosts"], "they are refused", None),
    ],
)
def test_it_is_on_emulated_hosts_where_there_can_be_some(
    words: list[str],
    refusal: str | None,
    runs: tuple[str, float, int] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran: list[tuple[str, float, int]] = []

    def run_where(where: str) -> Callable[..., list[str]]:
        return lambda minutes, ranks, *others: ran.append((where, minutes, ranks)) or []

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(chaos, "run", run_where("on one machine"))
    monkeypatch.setitem(sys.modules, "chaos_on_hosts", SimpleNamespace(run_on_hosts=run_where("on hosts")))
    monkeypatch.setitem(sys.modules, "lab", SimpleNamespace(refusal=lambda: refusal))
    with nullcontext() if runs else pytest.raises(SystemExit):
        assert chaos.main(words) == 0
    assert ran == ([runs] if runs else [])
    said = capsys.readouterr()
    assert said.out == ("chaos: on one machine, as they are refused\n" if refusal and runs else "")
    assert runs or "they are refused" in said.err


def test_a_failure_between_the_last_commit_of_a_pass_and_the_end_of_its_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sample comes twice, as 119 do not divide by 2 ranks, and is in the commit that is gone back to."""
    training = chaos_job.TRAINING.replace("SAMPLES, BATCH = 120, 2", "SAMPLES, BATCH = 119, 2")
    fails = "                if state.batch == 30 and hvd.rank() == 1:\n                    raise Asked\n"
    commit = "                state.commit()\n"
    assert training.count(commit) == 1
    monkeypatch.setattr(chaos_job, "TRAINING", training.replace(commit, commit + fails))
    front = [sys.executable, "-m", "hvdlite", "run", "--elastic", "-np", "2"]
    job = chaos_job.Job(tmp_path, front, {**os.environ, **chaos_job.SETTINGS})
    assert job.end() == [], "".join(job.log)
    assert "raised Asked" in "".join(job.log)


@pytest.mark.parametrize(("start", "is_lost"), [(6, False), (3, False), (2, True)])
def test_a_commit_that_is_lost_is_wrong_if_it_was_an_old_one(
    start: int, is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_job, "KEPT_S", 0.5)
    says = f"echo commit 1 3; sleep 1; echo commit 2 6; echo starts 0 1 77 {start}; echo starts 1 1 78 {start}"
    job = chaos_job.Job(tmp_path, ["sh", "-c", says], os.environ)
    wrong = [problem for problem in job.end() if "starts at batch" in problem]
    assert len(wrong) == is_lost and all("commit 3 is lost" in problem for problem in wrong), wrong


def test_a_step_that_is_lost_shows_in_the_next_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight that loses what step 10 has given it; once from each rank, however many losses are wrong then."""
    step = "            optimizer.step()\n"
    assert chaos_job.TRAINING.count(step) == 1
    lost = "            height.data -= 4 * (state.batch == 10)\n"
    monkeypatch.setattr(chaos_job, "TRAINING", chaos_job.TRAINING.replace(step, step + lost))
    job = chaos_job.Job(tmp_path, [sys.executable, "-m", "hvdlite", "run", "--elastic", "-np", "2"], os.environ)
    assert job.end() == ["wrong: loss of step 11 is -170.0 and not -190"] * 2, "".join(job.log)
