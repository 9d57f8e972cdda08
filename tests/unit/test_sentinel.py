"""The sentinel without MPI: several of them in one process, joined by socket pairs as neighbours are."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from hvdlite import _native
from hvdlite.errors import StartupError
from hvdlite.launched import LauncherProcess
from hvdlite.liveness.sentinel import Sentinel
from hvdlite.liveness.sentinel_messages import Failed, Finished, written
from hvdlite.processes import ProcessAddress

PATIENCE_S = 10.0


class Watched:
    """A sentinel and what it has reported."""

    def __init__(
        self,
        rank: int,
        links: list[tuple[int, str, socket.socket]],
        timeout_s: float = 30.0,
        launcher: LauncherProcess | None = None,
    ) -> None:
        self.failures: list[Failed] = []
        self.known = threading.Event()
        self.sentinel = Sentinel(rank, links, self._learn, timeout_s, launcher)

    def _learn(self, failed: Failed) -> None:
        self.failures.append(failed)
        self.known.set()

    def failure(self) -> Failed:
        assert self.known.wait(PATIENCE_S), "no failure was reported"
        (failure,) = self.failures
        return failure


def chain(size: int, timeout_s: float = 30.0) -> list[Watched]:
    """Ranks 0 - 1 - ... - size-1, each a neighbour of the next."""
    pairs = [socket.socketpair() for _ in range(size - 1)]
    watched = []
    for rank in range(size):
        links = []
        if rank > 0:
            links.append((rank - 1, f"pid {rank - 1}", pairs[rank - 1][1]))
        if rank < size - 1:
            links.append((rank + 1, f"pid {rank + 1}", pairs[rank][0]))
        watched.append(Watched(rank, links, timeout_s))
    return watched


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def test_the_end_of_a_stream_names_the_rank_that_died() -> None:
    mine, theirs = socket.socketpair()
    watched = Watched(0, [(5, "pid 42 on node1", mine)])
    theirs.close()
    rank, text, *_ = watched.failure()
    assert rank == 5
    assert "rank 5 (pid 42 on node1) died" in text
    watched.sentinel.close()


def test_a_rank_that_does_not_come_back_from_the_end_of_mpi_had_finished() -> None:
    mine, theirs = socket.socketpair()
    watched = Watched(0, [(5, "pid 42 on node1", mine)])
    theirs.sendall(written(Finished(5)))
    assert not within(0.1, watched.known.is_set)
    theirs.close()
    assert watched.failure().text == (
        "rank 5 (pid 42 on node1) had finished; its process ended inside MPI_Finalize, which did not come back."
    )
    watched.sentinel.close()


def test_what_a_rank_has_finished_its_goodbye_follows() -> None:
    left, right = chain(2)
    right.sentinel.say_finished()
    right.sentinel.close()
    assert not within(0.3, left.known.is_set)
    left.sentinel.close()
    assert left.failures == []


def test_a_goodbye_is_not_a_death() -> None:
    left, right = chain(2)
    right.sentinel.close()
    assert not within(0.3, left.known.is_set)
    left.sentinel.close()
    assert left.failures == right.failures == []


def test_a_report_reaches_everybody_once_with_its_text() -> None:
    watched = chain(4)
    text = "rank 1 raised ValueError: größer als ∞ 🙂\nTraceback (most recent call last): ..."
    failed = Failed(1, text)
    watched[1].sentinel.report(failed)
    assert [item.failure() for item in watched] == [failed] * 4
    watched[3].sentinel.report(Failed(3, "too late"))
    for item in watched:
        item.sentinel.close()
    assert [item.failures for item in watched] == [[failed]] * 4


@pytest.mark.parametrize("leaver", [None, ProcessAddress.own()])
def test_everybody_hears_whose_end_comes_first(leaver: ProcessAddress | None) -> None:
    watched = chain(3)
    failed = Failed(0, "rank 2 has shut down hvdlite", for_lack=True, leaver=leaver)
    watched[0].sentinel.report(failed)
    assert [item.failure() for item in watched] == [failed] * 3
    for item in watched:
        item.sentinel.close()


def test_a_report_that_names_a_file_whose_name_is_no_utf_8_reaches_everybody_with_escapes() -> None:
    """Its own rank too, which hands the text to native code."""
    watched = chain(2)
    watched[1].sentinel.report(Failed(1, "rank 1 raised ValueError: größe\udce4.jpg"))
    assert [item.failure() for item in watched] == [Failed(1, r"rank 1 raised ValueError: größe\udce4.jpg")] * 2
    for item in watched:
        item.sentinel.close()


def test_a_death_passes_through_ranks_that_are_not_its_neighbours() -> None:
    stranger, link = socket.socketpair()
    a, b = socket.socketpair()
    first = Watched(0, [(1, "pid 1", a)])
    second = Watched(1, [(0, "pid 0", b), (2, "pid 2", link)])
    stranger.close()
    assert first.failure() == second.failure()
    assert first.failure().rank == 2
    first.sentinel.close()
    second.sentinel.close()


def test_silence_counts_as_death_and_heartbeats_do_not() -> None:
    mine, theirs = socket.socketpair()
    started = time.monotonic()
    watched = Watched(0, [(3, "pid 7 on node2", mine)], timeout_s=0.6)
    for _ in range(10):  # well beyond the limit
        theirs.sendall(frame(b""))
        time.sleep(0.1)
    assert watched.failures == []
    silent_since = time.monotonic()
    rank, text, *_ = watched.failure()
    assert time.monotonic() - silent_since < 2
    assert time.monotonic() - started > 1.5
    assert rank == 3
    assert "rank 3 (pid 7 on node2) has not answered" in text and "unreachable from that of rank 0." in text
    assert "HVDLITE_HEARTBEAT_TIMEOUT_SECONDS" in text
    watched.sentinel.close()
    theirs.close()


def test_sentinels_keep_one_another_quiet() -> None:
    """Each hears the others' heartbeats, so nobody takes a quiet job for a dead one."""
    watched = chain(3, timeout_s=0.4)
    time.sleep(1.5)
    assert [item.failures for item in watched] == [[], [], []]
    for item in watched:
        item.sentinel.close()


def test_messages_may_arrive_in_pieces() -> None:
    mine, theirs = socket.socketpair()
    watched = Watched(0, [(1, "pid 1", mine)])
    for byte in frame(b"") + frame(b'{"failed": 9, "text": "rank 9 raised"}'):
        theirs.send(bytes([byte]))
        time.sleep(0.001)
    assert watched.failure() == Failed(9, "rank 9 raised")
    watched.sentinel.close()
    theirs.close()


@pytest.mark.parametrize("letter", ["x", "ü", "🙂"])
def test_a_long_traceback_keeps_its_head_and_tail(letter: str) -> None:
    left, right = chain(2)
    left.sentinel.report(Failed(0, f"the head {letter * 500_000} the tail"))
    text = right.failure().text
    assert text.startswith("the head")
    assert text.endswith("the tail")
    assert 1000 < len(text) < 50_000
    for item in (left, right):
        item.sentinel.close()


@pytest.mark.parametrize("letter", ["x", "🙂"])
def test_a_neighbour_that_does_not_read_holds_nobody_up(letter: str) -> None:
    """A stopped process reads nothing, and its kernel's buffers are full. The others must hear of a failure."""
    mine, full = socket.socketpair()
    a, b = socket.socketpair()
    mine.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            mine.send(b"\0" * 64)
    full.recv(16_384)  # a little room: less than the report takes
    watched = Watched(0, [(1, "pid 1", mine), (2, "pid 2", a)])
    other = Watched(2, [(0, "pid 0", b)])
    reporter = threading.Thread(target=watched.sentinel.report, args=(Failed(0, letter * 100_000),), daemon=True)
    reporter.start()
    assert other.failure().rank == 0
    assert watched.failure().rank == 0
    reporter.join(PATIENCE_S)
    assert not reporter.is_alive()
    closer = threading.Thread(target=watched.sentinel.close, daemon=True)
    closer.start()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    other.sentinel.close()
    full.close()


def test_of_many_reports_at_once_one_wins_everywhere() -> None:
    for _ in range(20):
        watched = chain(3)
        start = threading.Barrier(3)

        def shout(rank: int, item: Watched, start: threading.Barrier = start) -> None:
            start.wait()
            item.sentinel.report(Failed(rank, f"rank {rank} raised"))

        threads = [threading.Thread(target=shout, args=(rank, item)) for rank, item in enumerate(watched)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for item in watched:
            rank, text, *_ = item.failure()
            assert text == f"rank {rank} raised"
        for item in watched:
            item.sentinel.close()
            assert len(item.failures) == 1


def test_a_rank_alone_learns_of_its_own_failure() -> None:
    alone = Watched(0, [])
    alone.sentinel.report(Failed(0, "rank 0 raised"))
    assert alone.failure() == Failed(0, "rank 0 raised")
    alone.sentinel.close()


def test_nothing_is_left_after_close() -> None:
    before = threading.active_count()
    watched = chain(3)
    assert threading.active_count() == before + 3
    for item in watched:
        item.sentinel.close()
        item.sentinel.close()  # the end of a process may come after an explicit shutdown
    assert threading.active_count() == before


def test_a_copy_of_its_descriptors_holds_nobody_up() -> None:
    """As of a child that was forked by C code, which closes nothing."""
    one, other = chain(2)
    copies = [os.dup(one.sentinel._waker.fileno()), os.dup(other.sentinel._waker.fileno())]
    closing = [threading.Thread(target=watched.sentinel.close, daemon=True) for watched in (one, other)]
    for thread in closing:
        thread.start()
    have_ended = within(PATIENCE_S, lambda: not any(thread.is_alive() for thread in closing))
    for copy in copies:
        os.close(copy)
    assert have_ended and one.failures == other.failures == []


@pytest.mark.parametrize(
    "junk", [b"\xff\xfe{", b"[]", b"7", b"null", b'{"failed": "who", "text": 1}', b'{"failed": 1}']
)
def test_junk_is_ignored_and_the_watch_goes_on(junk: bytes) -> None:
    mine, theirs = socket.socketpair()
    watched = Watched(0, [(1, "pid 1", mine)])
    theirs.sendall(frame(junk) + frame(b'{"failed": 9, "text": "rank 9 raised"}'))
    assert watched.failure() == Failed(9, "rank 9 raised")
    watched.sentinel.close()
    theirs.close()


def test_a_stream_that_is_no_stream_of_messages_is_a_failure() -> None:
    mine, theirs = socket.socketpair()
    watched = Watched(0, [(1, "pid 1", mine)])
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    rank, text, *_ = watched.failure()
    assert rank == 1
    assert "rank 1 (pid 1) sends what is no message of hvdlite" in text
    watched.sentinel.close()
    theirs.close()


def test_who_is_given_up_is_told_so() -> None:
    """It may have been stopped, and shall not take the end of the others for their death when it wakes."""
    mine, theirs = socket.socketpair()
    watched = Watched(0, [(1, "pid 1", mine)], timeout_s=0.4)
    assert watched.failure().rank == 1
    watched.sentinel.close()
    theirs.settimeout(PATIENCE_S)
    said = b""
    while piece := theirs.recv(1 << 16):
        said += piece
    assert b'"failed": 1' in said
    theirs.close()


def test_heartbeats_go_on_while_messages_wait_for_a_neighbour() -> None:
    """A message that is sent in parts is not torn by heartbeats."""
    mine, theirs = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    heart = _native.Heartbeat([mine.fileno()], 0.01, frame(b""))
    body = bytes(range(1, 251)) * 400
    heart.send(0, frame(body))
    time.sleep(0.1)
    received = b""
    while len(received) < len(frame(body)) + 40:
        received += theirs.recv(1 << 12)
    while received.startswith(frame(b"")):  # those before the message
        received = received[len(frame(b"")) :]
    assert received.startswith(frame(body))
    rest = received[len(frame(body)) :]
    assert rest == (frame(b"") * len(rest))[: len(rest)]
    heart.close(1.0)
    heart.send(0, b"too late")  # the number may be another file's by now
    mine.close()
    received = b""
    while piece := theirs.recv(1 << 16):
        received += piece
    assert b"too late" not in received
    theirs.close()


def test_ranks_do_not_outlive_their_launcher() -> None:
    launcher = subprocess.Popen(["sleep", "60"])
    alone = Watched(5, [], launcher=LauncherProcess("prterun", launcher.pid))
    launcher.kill()
    launcher.wait()
    rank, text, *_ = alone.failure()
    assert rank == 5
    assert text.startswith(f"prterun (pid {launcher.pid}), which has started rank 5, ended before it")
    alone.sentinel.close()


def test_who_finds_no_thread_does_not_die_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    near, far = socket.socketpair()
    watching = Watched(0, [(1, "pid 1", near)])
    with monkeypatch.context() as short, far:
        short.setattr(threading.Thread, "start", start)
        with pytest.raises(StartupError):
            Watched(1, [(0, "pid 0", far)])
    failure = watching.failure()
    assert failure.rank == 1 and failure.text.startswith("rank 1 could not start: no thread can be started")
    watching.sentinel.close()
