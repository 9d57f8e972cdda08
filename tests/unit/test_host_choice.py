"""Which hosts an elastic job uses next, and which it leaves alone, by a clock that the tests turn."""

from __future__ import annotations

import pytest

from hvdlite.cli.host_choice import Avoided, choose
from hvdlite.cli.job import Host

A, B, C = Host("a", 2), Host("b", 2), Host("c", 4)


def test_a_host_that_does_not_answer_is_left_alone_for_longer_from_time_to_time() -> None:
    avoided, now_s, pauses = Avoided(), 1000.0, []
    for _ in range(9):
        pauses.append(avoided.avoid("b", now_s))
        assert avoided.usable([A, B], now_s + pauses[-1] - 0.1) == [A]
        now_s += pauses[-1]
        assert avoided.usable([A, B], now_s) == [A, B]
        assert avoided.trusted([A, B]) == [A]
    assert pauses == [10, 20, 40, 80, 160, 320, 600, 600, 600]


def test_a_host_that_has_done_its_part_is_forgiven() -> None:
    avoided = Avoided()
    avoided.avoid("b", 0.0)
    avoided.avoid("b", 10.0)
    avoided.forgive("b")
    assert avoided.usable([B], 10.0) == avoided.trusted([B]) == [B]
    assert avoided.avoid("b", 20.0) == 10


@pytest.mark.parametrize(
    ("most", "kept", "chosen"),
    [
        (8, {}, [A, B, C]),
        (5, {}, [A, B, Host("c", 1)]),
        (4, {}, [A, B]),
        (100, {"c": 7, "b": 6}, [C, B, A]),  # some states follow rank 0, which shall have the newest
        (3, {"c": 7}, [Host("c", 3)]),
        (0, {}, []),
    ],
)
def test_hosts_with_the_newest_commit_come_first(most: int, kept: dict[str, int], chosen: list[Host]) -> None:
    assert choose([A, B, C], most, kept) == chosen
