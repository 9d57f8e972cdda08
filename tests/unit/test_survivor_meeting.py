"""Ranks that agree on who of them lives, as threads; the messages between them are of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from hvdlite.errors import StartupError
from hvdlite.recovery import survivor_meeting
from hvdlite.recovery.lifeline import GoneError
from hvdlite.recovery.survivor_meeting import SurvivorMeeting, call_to

NUMBER = 2
SILENCE_S, QUIET_S, PATIENCE_S = 0.3, 1.0, 40.0
CALL_S = 0.05
REFUSED = "others go on"


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


def meeting_of(
    end: End, own: int, workers: Sequence[int], *, quiet_s: float = QUIET_S, call: Callable[[bytes], None] | None = None
) -> SurvivorMeeting:
    limits = {"silence_s": SILENCE_S, "quiet_s": quiet_s, "patience_s": PATIENCE_S}
    return SurvivorMeeting(end, NUMBER, own, workers, **limits, call=call or (lambda words: None))


def refusal(counts: list[int], text: str, count: int) -> str:
    """Only the first that ask may go on, if any."""
    counts.append(count)
    return text or ("" if len(counts) == 1 else REFUSED)


def come(
    network: Network, own: int, workers: Sequence[int], living: Sequence[int], counts: list[int], text: str
) -> tuple[int, ...] | str:
    end = End(network, own)
    has_met = threading.Event()
    words = [b""]

    def call_all() -> None:
        for other in workers:
            if other != own:
                end.send(other, call_to(NUMBER), words[0])

    def call(new: bytes) -> None:
        words[0] = new
        call_all()

    def go_on_calling() -> None:
        while not has_met.wait(CALL_S):
            call_all()

    caller = threading.Thread(target=go_on_calling)
    caller.start()
    try:
        dead = [worker for worker in workers if worker not in living]
        return meeting_of(end, own, workers, call=call).members(dead, partial(refusal, counts, text))
    except StartupError as error:
        return str(error)
    finally:
        has_met.set()
        caller.join()


def meet(
    network: Network, views: dict[int, list[int]], counts: list[int], text: str = ""
) -> dict[int, tuple[int, ...] | str]:
    """What each rank that comes, a key of ``views``, learns; it believes that those in its view may live."""
    workers = sorted({worker for view in views.values() for worker in view})
    with ThreadPoolExecutor(len(views)) as pool:
        coming = {own: pool.submit(come, network, own, workers, view, counts, text) for own, view in views.items()}
        return {own: future.result() for own, future in coming.items()}


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
    comes_s = time.monotonic() + 2 * SILENCE_S

    class Busy(End):
        def receive(self, source: int, key: str) -> bytes | None:
            if time.monotonic() > comes_s:
                network.posted.setdefault((2, 1, f"join {NUMBER}"), b"")
            return super().receive(source, key)

    assert meeting_of(Busy(network, 1), 1, [1, 2]).members([], lambda count: "") == (1, 2)


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

    meeting = meeting_of(Listening(network, 1), 1, [1, 2, 3], quiet_s=quiet_s)
    assert meeting.members([], lambda count: "") == (1, 3)


@pytest.mark.parametrize(
    "given_up",
    [
        {0: 4, 1: 4, 2: 4, 3: 4, 4: 0, 5: 0},
        {0: 2, 1: 2, 2: 0, 3: 0, 4: 0, 5: 0},
        {0: 1, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0},
        {0: 4, 1: 0, 2: 4, 3: 0, 4: 0, 5: 0},
        {0: 5, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0},
    ],
    ids=["the last two", "the first two", "the first", "in turns", "the first, by all that live"],
)
def test_the_larger_side_goes_on_where_both_live(given_up: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side has given up a rank of the other, and hears from it again."""
    monkeypatch.setattr(survivor_meeting, "_PROOF_S", 4 * CALL_S)
    views = {own: [other for other in given_up if other != dead] for own, dead in given_up.items()}
    sides = {dead: tuple(own for own in given_up if given_up[own] == dead) for dead in given_up.values()}
    larger = max(sides.values(), key=len)
    counts: list[int] = []
    began_s = time.monotonic()
    result = meet(Network(), views, counts)
    assert result == {own: larger if own in larger else REFUSED for own in given_up}
    assert counts[0] == len(larger)
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_sides_of_which_none_is_larger_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivor_meeting, "_PROOF_S", 4 * CALL_S)
    views = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3], 4: [4, 5], 5: [4, 5]}
    counts: list[int] = []
    result = meet(Network(), views, counts)
    assert counts == [2, 2, 2]
    going = [own for own, told in result.items() if told != REFUSED]
    assert going in ([0, 1], [2, 3], [4, 5]) and [result[own] for own in going] == [tuple(going)] * 2
