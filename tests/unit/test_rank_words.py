"""What ranks say to hvdliterun: whether they are through, and which of them may go on."""

from __future__ import annotations

import pytest

import hvdlite.cli.rank_words
from hvdlite.cli.rank_words import RankWords
from hvdlite.recovery.keeper import Word, pair_of
from hvdlite.start.start_watch import UNSEEN


def test_one_group_goes_on_as_each_generation() -> None:
    words = RankWords(2, 10.0, 5.0)
    assert words.left is None
    assert words.hear(Word.CLAIM, pair_of(2, 3)) == 1 and words.left == 3
    assert words.hear(Word.CLAIM, pair_of(2, 2)) == 0 and words.left == 3  # the other side of a cut network
    assert words.hear(Word.CLAIM, pair_of(3, 1)) == 0  # too few
    assert words.hear(Word.CLAIM, pair_of(3, 2)) == 1 and words.left == 2
    words.begin()
    assert words.left is None and words.hear(Word.CLAIM, pair_of(2, 2)) == 1


def test_ranks_may_go_on_any_number_of_times() -> None:
    words = RankWords(1, 10.0, 5.0)
    assert all(words.hear(Word.CLAIM, pair_of(generation, 1)) for generation in range(2, 1200))


def test_ranks_that_were_killed_are_not_through() -> None:
    words = RankWords(1, 10.0, 5.0)
    assert not words.is_at_work and not words.is_over
    words.hear(Word.AT_WORK, 1)
    assert words.is_at_work and not words.is_over
    words.hear(Word.AT_WORK, 0)
    assert words.is_over and not words.is_at_work
    words.begin()
    assert not words.is_over


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hvdlite.cli.rank_words.time, "monotonic", lambda: clock.now_s)
    return clock


class Clock:
    now_s = 100.0


def test_ranks_that_end_to_begin_anew_have_time_to_notice_who_does_not_come(clock: Clock) -> None:
    words = RankWords(1, 10.0, 5.0)
    clock.now_s += 1000
    assert not words.are_late
    words.hear(Word.ANEW, 0)
    clock.now_s += 17.9
    words.hear(Word.ANEW, 0)  # of another host
    assert not words.are_late
    clock.now_s += 0.2
    assert words.are_late
    words.begin()
    assert not words.are_late


def test_ranks_that_cannot_go_on_after_a_failure_are_late_after_the_grace(clock: Clock) -> None:
    words = RankWords(1, 10.0, 5.0)
    words.hear(Word.FAILED, 1)
    clock.now_s += 8.1
    assert words.are_late
    assert words.hear(Word.CLAIM, pair_of(2, 3)) == 1  # others can
    assert not words.are_late
    words.hear(Word.FAILED, 1)  # from whom they have left behind
    clock.now_s += 100
    assert not words.are_late
    words.hear(Word.FAILED, 2)
    clock.now_s += 8.1
    assert words.are_late


def test_ranks_that_go_on_are_left_alone_for_longer_each_time(clock: Clock) -> None:
    words = RankWords(1, 10.0, 5.0)
    assert not words.may_be_joined
    words.hear(Word.CLAIM, pair_of(2, 3))
    clock.now_s += 9.9
    assert not words.may_be_joined
    clock.now_s += 0.2
    assert words.may_be_joined
    words.begin()
    words.hear(Word.CLAIM, pair_of(2, 3))
    clock.now_s += 19.9
    assert not words.may_be_joined
    clock.now_s += 0.2
    assert words.may_be_joined


def test_who_ends_while_others_wait_for_it_in_init_is_named(clock: Clock) -> None:
    words = RankWords(1, 10.0, 5.0)
    words.begin()
    words.begin()
    words.hear(Word.GONE, pair_of(1, 3))  # of the start before
    words.hear(Word.GONE, pair_of(2, 1))
    clock.now_s += 100
    assert not words.lost  # perhaps no rank comes to hvd.init()
    words.hear(Word.STARTING, pair_of(2, 0))
    words.hear(Word.GONE, pair_of(2, 0))  # which waits no longer
    assert words.are_starting and not words.lost
    clock.now_s += 2.1
    assert words.lost.startswith("rank 1 has ended before it was through hvd.init() or init_process_group(), where ")
    words.begin()
    words.hear(Word.STARTING, pair_of(3, 0))
    words.hear(Word.GONE, pair_of(3, UNSEEN))
    clock.now_s += 2.1
    assert words.lost.startswith("a rank has ended before")


@pytest.mark.parametrize("word", [Word.STARTED, Word.CLAIM])
def test_who_ends_once_ranks_are_through_init_is_theirs_to_miss(word: Word, clock: Clock) -> None:
    words = RankWords(1, 10.0, 5.0)
    words.begin()
    words.hear(Word.STARTING, pair_of(1, 0))
    words.hear(Word.GONE, pair_of(1, 2))
    words.hear(word, pair_of(2, 2) if word == Word.CLAIM else pair_of(1, 0))
    clock.now_s += 100
    assert not words.lost and not words.are_starting
