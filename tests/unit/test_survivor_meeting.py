"""Ranks that agree on who of them lives, as threads; the messages between them are of this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from hvdlite.errors import StartupError
from hvdlite.lifeline import GoneError
from hvdlite.survivor_meeting import SurvivorMeeting, call_to

NUMBER = 2
SILENCE_S, QUIET_S, PATIENCE_S = 0.3, 2.0, 20.0


class Network:
    """Messages by (source, target, key)."""

    def __init__(self, known_dead: Sequence[int] = ()) -> None:
        self.posted: dict[tuple[int, int, str], bytes] = {}
        self.known_dead = known_dead


class End:
    """Rank ``own``'s."""

    def __init__(self, network: Network, own: int) -> None:
        self._network = network
        self._own = own

    def send(self, to: int, key: str, data: bytes) -> None:
        self._network.posted[self._own, to, key] = data

    def receive(self, source: int, key: str) -> bytes | None:
        if source in self._network.known_dead:
            raise GoneError
        return self._network.posted.pop((source, self._own, key), None)


def refusal(counts: list[int], text: str, count: int) -> str:
    counts.append(count)
    return text


def meet(
    network: Network, views: dict[int, list[int]], counts: list[int], text: str = ""
) -> dict[int, tuple[int, ...] | str]:
    """What each rank that comes, a key of ``views``, learns; it believes that those in its view may live."""

    def come(own: int) -> tuple[int, ...] | str:
        end = End(network, own)
        for other in views[own]:
            end.send(other, call_to(NUMBER), b"")
        meeting = SurvivorMeeting(end, NUMBER, SILENCE_S, QUIET_S, PATIENCE_S)
        try:
            return meeting.members(own, views[own], partial(refusal, counts, text))
        except StartupError as error:
            return str(error)

    with ThreadPoolExecutor(len(views)) as pool:
        return dict(zip(views, pool.map(come, views), strict=True))


def test_all_that_come_are_in() -> None:
    counts: list[int] = []
    living = [1, 2, 3]  # rank 0 has died, as all know
    assert meet(Network(), dict.fromkeys(living, living), counts) == dict.fromkeys(living, (1, 2, 3))
    assert counts == [3]  # one asks whether they may


def test_who_is_silent_is_left_out() -> None:
    """Two have died, and only one of them is known."""
    counts: list[int] = []
    assert meet(Network(), {1: [1, 2, 3], 3: [1, 2, 3]}, counts) == dict.fromkeys([1, 3], (1, 3))
    assert counts == [2]


@pytest.mark.parametrize("known_dead", [(), (0,)])
def test_the_next_one_decides_where_the_first_is_dead(known_dead: tuple[int, ...]) -> None:
    """As MPI says, or since nothing is heard of it."""
    counts: list[int] = []
    result = meet(Network(known_dead), {1: [0, 1, 3], 3: [0, 1, 3]}, counts)
    assert result == dict.fromkeys([1, 3], (1, 3)) and counts == [2]


def test_ranks_may_have_heard_of_different_deaths() -> None:
    """0 and 1 have died at once; some have heard of the one, some of the other."""
    counts: list[int] = []
    result = meet(Network(), {2: [1, 2, 3], 3: [0, 2, 3]}, counts)
    assert result == dict.fromkeys([2, 3], (2, 3)) and counts == [2]


def test_all_hear_that_they_may_not_go_on() -> None:
    result = meet(Network(), {0: [0, 2], 2: [0, 2]}, [], "they are too few")
    assert result == dict.fromkeys([0, 2], "they are too few")


def test_who_has_called_is_waited_for() -> None:
    """Longer than who is silent: it is busy."""
    network = Network()
    End(network, 2).send(1, call_to(NUMBER), b"")

    class Busy(End):
        looks = 0

        def receive(self, source: int, key: str) -> bytes | None:
            Busy.looks += 1
            if Busy.looks == round(3 * SILENCE_S / 0.5e-3):
                network.posted[2, 1, f"join {NUMBER}"] = b""
            return super().receive(source, key)

    meeting = SurvivorMeeting(Busy(network, 1), NUMBER, SILENCE_S, QUIET_S, PATIENCE_S)
    assert meeting.members(1, [1, 2], lambda count: "") == (1, 2)


def test_who_has_called_and_does_so_no_more_is_left_out() -> None:
    """It is stopped; the other one calls again and again while it is busy."""
    quiet_s, began_s = 0.4, time.monotonic()
    network = Network()
    for other in (2, 3):
        End(network, other).send(1, call_to(NUMBER), b"")

    class Listening(End):
        def receive(self, source: int, key: str) -> bytes | None:
            waited_s = time.monotonic() - began_s
            if source == 3 and waited_s < 3 * quiet_s:
                self._network.posted[3, 1, call_to(NUMBER)] = b""
            elif source == 3:
                self._network.posted[3, 1, f"join {NUMBER}"] = b""
            return super().receive(source, key)

    meeting = SurvivorMeeting(Listening(network, 1), NUMBER, SILENCE_S, quiet_s, PATIENCE_S)
    assert meeting.members(1, [1, 2, 3], lambda count: "") == (1, 3)
