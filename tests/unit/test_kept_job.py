"""Generations of an elastic job over hosts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

import pytest

import kept_job_lab
from hvdlite.cli import kept_job
from hvdlite.cli.children import Stops
from hvdlite.cli.discovery import IsOver
from hvdlite.cli.job import Host
from hvdlite.errors import ConfigError
from hvdlite.recovery.keeper import Word, pair_of
from hvdlite.recovery.membership import ADDED, REMOVED
from kept_job_lab import A, B, C, Job, commits, succeed

quick = kept_job_lab.quick


def test_ranks_begin_anew_on_the_hosts_that_answer(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(commits(3, "b"), succeed)
    assert job.run() == 0
    assert job.ran == [[A, B], [A]]
    said = capfd.readouterr().err
    assert "b does not answer, and is left alone for 10 s" in said
    assert "b did not answer; goes on from commit 3, which is kept in memory (1 of 9 restarts)" in said


def test_a_host_that_is_lost_twice_is_left_alone_once(capfd: pytest.CaptureFixture[str]) -> None:
    def lose(job: Job) -> int:
        job.keepers.silent.add("b")
        del job.keepers.kept["b"]
        time.sleep(0.2)  # its keeper is started again, in vain; then its ranks are missed
        return 1

    job = Job(lose, succeed)
    assert job.run() == 0
    assert job.ran == [[A, B], [A]]
    assert capfd.readouterr().err.count("b does not answer, and is left alone") == 1


def test_it_is_said_that_all_commits_are_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def change_hosts(job: Job) -> int:
        job.hosts = [A, B, C]
        return commits(3, "a", "b")(job)

    job = Job(change_hosts, succeed)
    assert job.run() == 0
    assert job.ran == [[A, B], [C]]
    said = capfd.readouterr().err
    assert "a, b did not answer; goes on from the beginning, as no host that answers has a commit (1 of 9" in said


def test_a_commit_that_hvdliterun_has_is_handed_to_a_host_that_takes_it(capfd: pytest.CaptureFixture[str]) -> None:
    def lose_all(job: Job) -> int:
        job.hosts = [A, B, C]
        job.keepers.copy = 3
        job.keepers.silent |= {"a", "b"}
        return 1

    job = Job(lose_all, succeed)
    assert job.run() == 0
    assert job.ran == [[A, B], [C]] and job.keepers.kept["c"] == 3
    assert "a, b did not answer; goes on from commit 3, which is kept in memory (1 of 9" in capfd.readouterr().err


def test_ranks_that_start_find_the_copy_though_the_keeper_of_that_commit_is_killed() -> None:
    def lose_keeper(job: Job) -> int:
        job.says(Word.STARTING, pair_of(job.words.start, 0))
        job.keepers.copy = 5
        job.keepers.kept = {"b": 2}  # that of a had commit 5
        deadline_s = time.monotonic() + 5
        while 5 not in job.keepers.kept.values() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return job.keepers.newest - max(job.keepers.kept.values())

    assert Job(lose_keeper).run() == 0


def test_ranks_that_have_started_are_handed_no_copy() -> None:
    def lose_keeper(job: Job) -> int:
        job.says(Word.STARTED, pair_of(job.words.start, 0))
        job.keepers.copy = 5
        job.keepers.kept = {"b": 2}
        time.sleep(0.2)
        return 5 in job.keepers.kept.values()

    assert Job(lose_keeper).run() == 0


def test_ranks_none_of_whose_hosts_answers_are_lost() -> None:
    def lose(job: Job) -> int:
        job.keepers.silent |= {"a", "b"}
        del job.keepers.kept["a"]
        time.sleep(0.2)
        assert not job.words.lost
        del job.keepers.kept["b"]
        deadline_s = time.monotonic() + 20
        while not job.words.lost:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert job.words.lost == "no host with ranks answers: a, b"
        job.hosts = [C]
        return 1

    job = Job(lose, succeed)
    assert job.run() == 0
    assert not job.words.lost


def hangs(is_over: IsOver) -> Sequence[Host]:
    """A script that hangs, see `hvdlite.cli.discovery`."""
    while not is_over():
        time.sleep(0.01)
    raise ConfigError("timed out")


def test_ranks_are_watched_while_a_script_hangs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_job, "_FRESH_S", 0.05)

    def lose(job: Job) -> int:
        job.look = hangs
        time.sleep(0.1)  # until it is called
        job.keepers.silent |= {"a", "b"}
        job.keepers.kept.clear()
        deadline_s = time.monotonic() + 20
        while not job.words.lost:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        return 1

    job = Job(lose, timeout_s=0.1)
    assert job.run() == 1
    assert "timed out" not in capfd.readouterr().err


def test_ranks_begin_anew_on_the_known_hosts_while_a_script_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_job, "_FRESH_S", 0.05)

    def fail(job: Job) -> int:
        job.look = hangs
        return commits(3, "b")(job)

    job = Job(fail, succeed)
    assert job.run() == 0
    assert job.ran == [[A, B], [A]]


def test_ranks_that_start_are_lost_with_one_host() -> None:
    def lose(job: Job) -> int:
        job.says(Word.STARTING, pair_of(1, 0))
        job.keepers.silent.add("b")
        del job.keepers.kept["b"]
        deadline_s = time.monotonic() + 20
        while not job.words.lost:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert job.words.lost == "hosts do not answer while ranks start: b"
        return 1

    job = Job(lose, succeed)
    assert job.run() == 0
    assert job.ran == [[A, B], [A]]


def test_it_waits_for_enough_hosts_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(commits(3, "b"), succeed, least=3)
    looks = iter(range(1000))
    job.look = lambda is_over: [A, B] if next(looks) < 5 else [A, B, C]
    assert job.run() == 0
    assert job.ran == [[A, B], [A, C]]
    said = capfd.readouterr().err
    waits = "waits for hosts, up to 5 s (HVDLITE_ELASTIC_TIMEOUT): there are 2 slots on those that answer, and --min-np"
    assert said.count(waits) == 1, said


def test_it_does_not_wait_forever(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(succeed, least=5, timeout_s=0.1)
    assert job.run() == 1
    assert job.ran == []
    assert "the job ends: fewer than --min-np 5 slots on hosts that answer for 0.1 s" in capfd.readouterr().err


def test_a_host_that_ends_while_others_are_waited_for_is_noticed() -> None:
    job = Job(succeed, least=4)
    looks = []

    def look(is_over: IsOver) -> Sequence[Host]:
        looks.append(1)
        if len(looks) == 3:
            job.keepers.silent.add("a")
        return [A] if len(looks) < 5 else [A, B, C]

    job.look = look
    assert job.run() == 0
    assert job.ran == [[B, C]]


def until_told(number: int, change: Callable[[Job], object]) -> Callable[[Job], int]:
    """A generation after whose start something changes, and that ends in order once it was told so."""

    def generation(job: Job) -> int:
        job.keepers.told.clear()
        change(job)
        deadline_s = time.monotonic() + 20
        while (Word.NEWS, number) not in job.keepers.told:
            assert time.monotonic() < deadline_s, job.keepers.told
            time.sleep(0.01)
        for host in job.ran[-1]:
            job.keepers.kept[host.name] += 1
        job.begin_anew()
        return 0

    return generation


def test_hosts_join_up_to_the_most_and_leave() -> None:
    def add(job: Job) -> None:
        job.hosts = [A, B, C]

    def remove(job: Job) -> None:
        job.hosts = [B, C]

    job = Job(until_told(ADDED, add), until_told(ADDED | REMOVED, remove), succeed, most=5, restarts=0)
    job.hosts = [A, B]
    assert job.run() == 0
    assert job.ran == [[A, B], [A, B, Host("c", 1)], [B, C]]


def test_a_host_that_is_silent_does_not_join() -> None:
    def watch(job: Job) -> int:
        job.hosts = [A, B, C]
        job.keepers.silent.add("c")
        time.sleep(0.3)
        assert [word for word, _ in job.keepers.told] == [Word.BEGIN]
        return 0

    assert Job(watch).run() == 0


@pytest.mark.parametrize(("hosts", "most"), [([B, A], 3), ([C, A, B], 4)], ids=str)
def test_hosts_in_another_order_are_no_news(hosts: list[Host], most: int) -> None:
    looks = 0

    def look(is_over: IsOver) -> Sequence[Host]:
        nonlocal looks
        looks += 1
        return [A, B] if looks == 1 else hosts

    def watch(job: Job) -> int:
        until = looks + 5
        while looks < until:
            time.sleep(0.01)
        assert [word for word, _ in job.keepers.told] == [Word.BEGIN]
        return 0

    job = Job(watch, most=most)
    job.look = look
    job.keepers.kept["c"] = 0
    assert job.run() == 0


def test_a_keeper_that_ends_while_ranks_run_is_replaced() -> None:
    def watch(job: Job) -> int:
        del job.keepers.kept["b"]
        deadline_s = time.monotonic() + 20
        while "b" not in job.keepers.kept:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        return 0

    assert Job(watch, most=4).run() == 0


def test_nothing_is_started_while_what_ranks_have_left_behind_is_ended() -> None:
    def end(job: Job) -> int:
        job.keepers.processes = [1, 2]
        assert job.spared() == [1, 2]
        job.hosts = [A, B, C]
        time.sleep(0.1)
        assert "c" not in job.keepers.kept
        return 0

    assert Job(end).run() == 0


def test_ranks_that_were_killed_are_no_success() -> None:
    """Which an mpirun that lets ranks go on without others may say, see `Word.AT_WORK`."""

    def killed(job: Job) -> int:
        job.says(Word.AT_WORK, 1)
        assert not job.words.is_over
        return 0

    def trained(job: Job) -> int:
        assert not job.words.is_over
        job.says(Word.AT_WORK, 1)
        job.says(Word.AT_WORK, 0)
        assert job.words.is_over
        return 0

    def died_after_training(job: Job) -> int:
        trained(job)
        job.says(Word.FAILED, 1)
        return 0

    job = Job(killed, died_after_training, trained, succeed)
    assert job.run() == 0
    assert len(job.ran) == 3


def test_ranks_that_go_on_without_others_are_through_when_each_has_said_so() -> None:
    """They do not wait for one another at their end, and mpirun does not mind one that is killed there."""

    def ended(job: Job, *generations: int) -> int:
        job.says(Word.CLAIM, pair_of(2, 3))
        job.says(Word.AT_WORK, 1)
        job.says(Word.CLAIM, pair_of(3, 2))
        job.says(Word.AT_WORK, 0)
        for generation in generations:
            job.says(Word.ENDED, generation)
        return 0

    job = Job(lambda job: ended(job, 3), lambda job: ended(job, 2, 3), lambda job: ended(job, 3, 3), succeed)
    assert job.run() == 0
    assert len(job.ran) == 3


@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_signal_is_the_end(begins_anew: bool) -> None:
    def interrupted(job: Job) -> int:
        if begins_anew:  # the ranks were just about to
            job.begin_anew()
        with Stops() as stops:  # as `supervise` has it
            signal.raise_signal(signal.SIGINT)
            return stops.status

    job = Job(interrupted, succeed)
    assert job.run() == 130
    assert len(job.ran) == 1


def test_nobody_goes_on_after_a_signal(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(job: Job) -> int:
        with Stops() as stops:
            signal.raise_signal(signal.SIGTERM)
            assert job.says(Word.CLAIM, pair_of(2, 3)) == 0
            return stops.status

    assert Job(interrupted).run() == 143
    assert "go on" not in capfd.readouterr().err


def test_a_rank_that_gets_a_signal_is_not_the_end() -> None:
    job = Job(commits(1, then=128 + signal.SIGTERM), succeed)
    assert job.run() == 0
    assert len(job.ran) == 2


def test_a_signal_between_generations_is_the_end() -> None:
    def fail(job: Job) -> int:
        signal.raise_signal(signal.SIGTERM)
        return 1

    job = Job(fail, succeed)
    assert job.run() == 143
    assert len(job.ran) == 1


def test_it_ends_when_no_restart_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(job: Job) -> int:
        job.says(Word.FAILED, 1)
        return commits(3, then=7)(job)

    job = Job(commits(1), commits(2), fail, restarts=2)
    assert job.run() == 7
    assert "the job ends: it has failed 3 times (--restarts 2)" in capfd.readouterr().err


@pytest.mark.parametrize("leaves_time", [True, False])
@pytest.mark.parametrize("are_killed", [True, False])
def test_who_had_no_time_to_save_gets_it_once_more(
    leaves_time: bool, are_killed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """All are killed, or mpirun has killed those that hear of it."""

    def fail(job: Job) -> int:
        if not are_killed:
            job.says(Word.FAILED, 1)
        return commits(3, "b", then=7)(job)

    def save(job: Job) -> int:
        assert job.to_save == "it has failed 1 time (--restarts 0)"
        return 1

    job = Job(fail, save, restarts=0, leaves_time=leaves_time)
    assert job.run() == 7
    had_time = leaves_time and not are_killed
    assert job.ran == [[A, B]] + [[A]] * (not had_time)
    assert ("only to save commit 3" in capfd.readouterr().err) is not had_time


def test_who_waits_in_vain_for_other_hosts_may_save() -> None:
    def save(job: Job) -> int:
        assert job.to_save == "fewer than --min-np 4 slots on hosts that answer for 0.1 s (HVDLITE_ELASTIC_TIMEOUT)"
        return 0

    job = Job(commits(3, "b"), save, least=4, timeout_s=0.1)
    assert job.run() == 1
    assert job.ran == [[A, B], [A]]


def test_nothing_is_saved_where_nothing_is_kept() -> None:
    job = Job(lambda job: 7, restarts=0)
    assert job.run() == 7
    assert len(job.ran) == 1


def test_a_script_that_fails_leaves_the_hosts_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    answers: list[Sequence[Host]] = [[A, B]]

    def look(is_over: IsOver) -> Sequence[Host]:
        if not answers:
            raise ConfigError("--host-discovery-script s: exit status 1")
        return answers.pop()

    job = Job(commits(1), succeed)
    job.look = look
    assert job.run() == 0
    assert job.ran == [[A, B], [A, B]]
    assert capfd.readouterr().err.count("exit status 1; the job goes on with the hosts that it has") == 1
