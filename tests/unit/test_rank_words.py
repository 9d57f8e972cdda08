"""What ranks say to hvdliterun: whether they are through, and which of them may go on."""

from __future__ import annotations

import pytest

import hvdlite.cli.rank_words
from hvdlite.cli.rank_words import RankWords
from hvdlite.keeper import Word, claim_of


def test_one_group_goes_on_as_each_generation() -> None:
    words = RankWords(least=2)
    assert words.left is None
    assert words.hear(Word.CLAIM, claim_of(2, 3)) == 1 and words.left == 3
    assert words.hear(Word.CLAIM, claim_of(2, 2)) == 0 and words.left == 3  # the other side of a cut network
    assert words.hear(Word.CLAIM, claim_of(3, 1)) == 0  # too few
    assert words.hear(Word.CLAIM, claim_of(3, 2)) == 1 and words.left == 2
    words.begin()
    assert words.left is None and words.hear(Word.CLAIM, claim_of(2, 2)) == 1


def test_ranks_that_were_killed_are_not_through() -> None:
    words = RankWords(least=1)
    assert not words.is_at_work and not words.is_over
    words.hear(Word.AT_WORK, 1)
    assert words.is_at_work and not words.is_over
    words.hear(Word.AT_WORK, 0)
    assert words.is_over and not words.is_at_work
    words.begin()
    assert not words.is_over


def test_ranks_that_go_on_are_left_alone_for_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(hvdlite.cli.rank_words.time, "monotonic", lambda: now)
    words = RankWords(least=1)
    assert not words.may_be_joined
    words.hear(Word.CLAIM, claim_of(2, 3))
    now += 9.9
    assert not words.may_be_joined
    now += 0.2
    assert words.may_be_joined
    words.begin()
    words.hear(Word.CLAIM, claim_of(2, 3))
    now += 19.9
    assert not words.may_be_joined
    now += 0.2
    assert words.may_be_joined
