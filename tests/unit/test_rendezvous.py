"""Ranks that meet without MPI: what they tell one another, and who is named where one does not come."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from hvdlite import plain
from hvdlite.config import MEETING_POINT
from hvdlite.errors import ConfigError, StartupError
from hvdlite.links.proof import Caller, Secret, prove
from hvdlite.naps import Patience
from hvdlite.recovery import membership
from hvdlite.recovery.roster import Join
from hvdlite.start import meeting_point
from hvdlite.start.meeting_point import AtMeetingPoint, MeetingPoint, Visit, connect
from hvdlite.start.rendezvous import RendezvousRanks
from hvdlite.version import __version__


@pytest.fixture
def point() -> Iterator[MeetingPoint]:
    with closing(MeetingPoint()) as made:
        made.open()
        yield made


def at(point: MeetingPoint) -> AtMeetingPoint:
    return AtMeetingPoint(point.environment[MEETING_POINT], "hvdliterun")


def on_ranks(
    point: MeetingPoint, size: int, work: Callable[[RendezvousRanks], Any], timeout_s: float = 60.0
) -> list[Any]:
    """What ``work`` returned or raised on each of ``size`` ranks, threads that end long before they wait in vain."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(RendezvousRanks(at(point), "", range(size), rank, timeout_s))
        except StartupError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def test_everybody_hears_everybody_again_and_again(point: MeetingPoint) -> None:
    told = on_ranks(point, 4, lambda ranks: [ranks.allgather((ranks.rank, turn)) for turn in range(5)])
    assert told == [[[(rank, turn) for rank in range(4)] for turn in range(5)]] * 4


def test_much_to_tell(point: MeetingPoint) -> None:
    """More than a socket takes at once."""
    told = on_ranks(point, 3, lambda ranks: ranks.allgather(bytes([ranks.rank]) * 3_000_000))
    assert told == [[bytes([rank]) * 3_000_000 for rank in range(3)]] * 3


def test_subsets_of_subsets_meet_alone(point: MeetingPoint) -> None:
    def work(ranks: RendezvousRanks) -> Any:
        if ranks.rank == 0:
            return None
        part = ranks.subset([3, 1, 2])
        pair = part.subset([0, 2]) if part.rank != 1 else None
        return part.allgather((part.rank, part.size)), None if pair is None else pair.allgather(ranks.rank)

    everybody = [(0, 3), (1, 3), (2, 3)]
    assert on_ranks(point, 4, work) == [None, (everybody, None), (everybody, [3, 2]), (everybody, [3, 2])]


def test_the_same_subset_again_is_another_one(point: MeetingPoint) -> None:
    def in_turn(ranks: RendezvousRanks) -> list[int]:
        return [number for turn in range(2) for number in ranks.subset([0, 1]).allgather(10 * turn + ranks.rank)]

    assert on_ranks(point, 2, in_turn) == [[0, 1, 10, 11]] * 2


def test_keys_of_a_subset_are_short_however_many_it_has() -> None:
    """A store is sent the keys of all members by each of them, and may keep them for as long as the job."""
    keys: list[str] = []

    class Place:
        def gather(self, key: str, ranks: Sequence[int], rank: int, data: bytes, patience: Patience) -> list[bytes]:
            keys.append(key)
            return [data] * len(ranks)

    ranks = RendezvousRanks(Place(), "start", range(1024), 12, 1.0)
    for members in (range(1024), [1, 2, 12], [12, 13], [1, 212, 12], [1, 2, 12]):
        ranks.subset(members).allgather(None)
    assert max(map(len, keys)) <= len("start/#1:1") + 16
    assert len(set(keys)) == len(keys)


def test_a_subset_that_makes_no_sense(point: MeetingPoint) -> None:
    ranks = RendezvousRanks(at(point), "", range(3), 1, 1.0)
    for wrong in ([0, 2], [1, 1], [1, 3]):
        with pytest.raises(ConfigError, match="on rank 1 of 3: the list must hold this rank"):
            ranks.subset(wrong)


def test_who_does_not_come_is_named(point: MeetingPoint) -> None:
    said = on_ranks(point, 4, lambda ranks: ranks.allgather(0) if ranks.rank % 2 == 0 else None, timeout_s=0.3)
    late = "but ranks 1, 3 did not come within 0.3 s; if the start is only slow, raise HVDLITE_START_TIMEOUT (seconds)"
    assert said == [f"rank 0 has waited in hvd.init(), {late}", None, f"rank 2 has waited in hvd.init(), {late}", None]


def test_a_wait_that_was_slept_through_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look comes 100 s later than it was to."""
    now_s = 0.0
    waits: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def wait(most_s: float) -> None:
        nonlocal now_s
        waits.append(most_s)
        now_s += most_s + 100.0 * (len(waits) == 2)

    patience = Patience(1.75)
    assert not patience.wait_for(wait)
    assert waits == [0.5, 0.5, 0.5, 0.25, 0.0]
    assert patience.left_s == 0.0


def test_who_has_ended_is_waited_for_no_longer(point: MeetingPoint) -> None:
    def work(ranks: RendezvousRanks) -> Any:
        if ranks.rank == 1:
            time.sleep(0.1)  # some wait already, and one comes later
            point.rank_ended(1, "was killed by signal 9 (SIGKILL)")
            return None
        if ranks.rank == 2:
            time.sleep(0.2)
        return ranks.allgather(0)

    killed = "has waited in hvd.init(), but rank 1 was killed by signal 9 (SIGKILL)"
    assert on_ranks(point, 3, work) == [f"rank 0 {killed}", None, f"rank 2 {killed}"]


def test_who_has_ended_after_it_came_is_missed_next_time(point: MeetingPoint) -> None:
    def work(ranks: RendezvousRanks) -> Any:
        told = ranks.allgather(ranks.rank)
        if ranks.rank == 1:
            point.rank_ended(1, "ended with exit status 0")
            return told
        return told, ranks.allgather(0)

    said = on_ranks(point, 2, work)
    assert said == ["rank 0 has waited in hvd.init(), but rank 1 ended with exit status 0", [0, 1]]


def test_a_rank_that_comes_twice_is_told_so(point: MeetingPoint) -> None:
    gather = at(point).gather
    assert gather("once", [0], 0, b"first", Patience(1.0)) == [b"first"]
    with pytest.raises(StartupError, match="rank 0 has come twice: a program that it has started calls hvd.init"):
        gather("once", [0], 0, b"second", Patience(1.0))


def test_another_user_is_not_heard(point: MeetingPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)  # so both ends belong to another user
    with connected(point) as link:
        assert link.recv(1) == b""
    with pytest.raises(StartupError, match=r"belongs to another user\): this process is user 12345's; call hvd.init"):
        at(point).gather("key", [0], 0, b"", Patience(1.0))


class Trap:
    """What runs a program where it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


def test_nothing_is_unpickled_of_who_does_not_know_the_key(point: MeetingPoint) -> None:
    bomb = pickle.dumps(Trap())
    with connected(point) as link:
        link.sendall(len(bomb).to_bytes(8, "little") + bomb)
        answer = link.recv(1 << 16)
        assert len(answer) == Caller.answer_bytes  # a challenge, which the next bytes do not meet
    name, _, key = point.environment[MEETING_POINT].partition(":")
    with pytest.raises(StartupError, match="does not know the job's key"):
        AtMeetingPoint(f"{name}:{'0' * len(key)}", "hvdliterun").gather("key", [0], 0, b"", Patience(1.0))
    assert at(point).gather("key", [0], 0, b"mine", Patience(1.0)) == [b"mine"]


def connected(point: MeetingPoint) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.connect("\0" + point.environment[MEETING_POINT].partition(":")[0])
    link.settimeout(10)
    return link


def test_who_leaves_while_it_waits_harms_nobody(point: MeetingPoint) -> None:
    with connected(point) as link:
        prove(Secret(bytes.fromhex(point.environment[MEETING_POINT].partition(":")[2]), b"start", 0), link, b"")
        meeting_point.send(link, plain.dumps(Visit("key", (0, 1), 0, 0.2, b"")))
    assert on_ranks(point, 2, lambda ranks: ranks.allgather(ranks.rank)) == [[0, 1]] * 2


def test_a_point_that_is_gone() -> None:
    with closing(MeetingPoint()) as point:
        gone = at(point)
    with pytest.raises(StartupError, match="rank 1 cannot reach the hvdliterun that has started it.*namespace"):
        gone.gather("key", [0, 1], 1, b"", Patience(1.0))


def test_a_rank_of_another_version_says_so(point: MeetingPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says has other parts."""
    send = meeting_point.send
    monkeypatch.setattr(meeting_point, "send", lambda link, data: send(link, plain.dumps(("key", 0, 1.0))))
    with pytest.raises(StartupError, match=rf"another version of hvdlite than this process \({__version__}\)"):
        at(point).gather("key", [0], 0, b"", Patience(1.0))


def test_a_worker_of_another_version_says_so(point: MeetingPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic job's, likewise."""
    send = meeting_point.send
    monkeypatch.setattr(membership, "send", lambda link, data: send(link, plain.dumps(("worker", 0))))
    told = rf"worker 0 cannot reach the hvdliterun .* another version of hvdlite than this process \({__version__}\)"
    worker = membership.Membership(point.environment[MEETING_POINT], 0)
    with closing(worker), pytest.raises(StartupError, match=told):
        worker.join()


def test_a_rank_without_descriptors_says_so(point: MeetingPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(meeting_point, "connect_unix", short)
    with pytest.raises(StartupError, match=r"Too many open files\): raise the limits on open files"):
        at(point).gather("key", [0], 0, b"", Patience(1.0))


def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_who_finds_no_thread_at_the_point_says_so_and_others_are_heard(point: MeetingPoint) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_threads(patch)
        with pytest.raises(StartupError, match=r"no thread can be started: raise the limit .*ulimit -u"):
            at(point).gather("key", [0], 0, b"", Patience(1.0))
        with connect(point.environment[MEETING_POINT]) as link:
            meeting_point.send(link, plain.dumps(Join(0, None)))
            assert "ulimit -u" in plain.loads(meeting_point.receive(link))
    assert at(point).gather("key", [0], 0, b"mine", Patience(1.0)) == [b"mine"]


def test_a_point_that_gets_no_thread_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)
    with closing(MeetingPoint()) as point, pytest.raises(StartupError, match="ulimit -u"):
        point.open()
