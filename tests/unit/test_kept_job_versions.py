"""Elastic jobs over hosts whose ranks run different versions."""

from __future__ import annotations

import pytest

import kept_job_lab
from hvdlite.recovery.keeper import Word, pair_of
from kept_job_lab import A, B, C, Job, commits, succeed

quick = kept_job_lab.quick


def run_unlike(job: Job) -> int:
    job.says(Word.STARTING, pair_of(job.words.start, 0))
    job.says(Word.UNLIKE, pair_of(job.words.start, 0))
    return 1


def test_ranks_of_different_versions_are_not_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(run_unlike)
    assert job.run() == 1
    assert job.ran == [[A, B]]
    assert "the job ends: its ranks run different versions, which no restart changes" in capfd.readouterr().err


def test_a_host_that_comes_with_other_versions_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    def let_in_another(job: Job) -> int:
        job.says(Word.STARTED, pair_of(job.words.start, 0))
        job.hosts = [A, B, C]
        job.begin_anew()
        return commits(3)(job)

    job = Job(let_in_another, run_unlike, commits(4), succeed)
    assert job.run() == 0
    assert job.ran == [[A, B], [A, B, C], [A, B], [A, B]]
    said = capfd.readouterr().err
    assert "ranks run different versions since c came, which the job leaves out; goes on from commit 3" in said


def test_versions_that_change_on_hosts_of_the_job_are_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    def train(job: Job) -> int:
        job.says(Word.STARTED, pair_of(job.words.start, 0))
        return commits(3)(job)

    job = Job(train, run_unlike, leaves_time=False)
    assert job.run() == 1
    assert job.ran == [[A, B], [A, B]]
    assert "different versions, which no restart changes" in capfd.readouterr().err
