"""Who is alive, and telling everybody when somebody is not.

Each rank holds a socket to every neighbour: the node leader, or the leader's local ranks, and, between
leaders, the parent and the children of the tree. Two threads sleep in the kernel and need neither MPI nor shared
memory, so they work when those are stuck: a native one speaks, which needs no GIL either, and one of Python listens.

- A process that dies, however, has its sockets closed by the kernel: the neighbours see the end of the stream
  within milliseconds.
- A process that is stopped, or a host that is cut off, misses its heartbeats.
- A rank that raises sends its traceback.
- A launcher that is killed leaves its ranks alone, which then end.

The first failure a sentinel learns of is passed to its neighbours, so it reaches every rank in as many
hops as the tree is deep, and to ``on_failure`` of its own process, once.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from hvdlite import _native
from hvdlite.errors import StartupError
from hvdlite.launched import LauncherProcess
from hvdlite.liveness.sentinel_messages import (
    HEARTBEAT,
    DamagedError,
    Failed,
    Finished,
    Goodbye,
    Inbox,
    frame,
    read,
    tellable,
    written,
)
from hvdlite.naps import RunClock
from hvdlite.processes import end_of
from hvdlite.thread_shortage import thread_shortage_told

_LOG = logging.getLogger("hvdlite")
_FAREWELL_S = 1.0  # how long close() waits for a neighbour that does not take everything


@dataclass(slots=True)
class _Neighbour:
    index: int
    rank: int
    where: str  # 'pid 4242 on node0'
    link: socket.socket
    heard_s: float
    inbox: Inbox = field(default_factory=Inbox)
    has_finished: bool = False
    said_goodbye: bool = False


class Sentinel:
    """Watches this rank's neighbours.

    Args:
        links: (rank, where it is, connected socket) of every neighbour.
        on_failure: called once, on the sentinel's thread, with the first failure.
        timeout_s: a neighbour that is silent for longer counts as failed. Time in which this process itself did not
            run does not count.
        launcher: what has started this rank, without which it shall not go on.
    """

    def __init__(
        self,
        rank: int,
        links: list[tuple[int, str, socket.socket]],
        on_failure: Callable[[Failed], None],
        timeout_s: float,
        launcher: LauncherProcess | None,
    ) -> None:
        self._rank = rank
        self._on_failure = on_failure
        self._timeout_s = timeout_s
        self._interval_s = min(2.0, timeout_s / 4)
        self._failed = False
        self._lock = threading.Lock()  # the first failure wins
        self._launcher = launcher
        self._launcher_end = None if launcher is None else end_of(launcher.pid)
        self._clock = RunClock(self._interval_s)  # what this process sleeps through is no neighbour's silence
        now = self._clock.now_s()
        self._neighbours = [_Neighbour(index, *link, now) for index, link in enumerate(links)]
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name=f"hvdlite-sentinel-{rank}", daemon=True)
        for neighbour in self._neighbours:
            neighbour.link.setblocking(True)
        sockets = [neighbour.link.fileno() for neighbour in self._neighbours]
        self._voice: _native.Heartbeat | None = None
        try:
            with thread_shortage_told():
                if sockets:
                    self._voice = _native.Heartbeat(sockets, self._interval_s, frame(HEARTBEAT))
                if self._neighbours or self._launcher_end is not None:
                    self._thread.start()
        except StartupError as error:
            self._say_farewell(Failed(rank, f"rank {rank} could not start: {error}"))
            self.release()
            raise

    def report(self, failed: Failed) -> None:
        """Tell every rank. From any thread; the first report wins."""
        self._spread(failed, learned_from=None)

    def say_finished(self) -> None:
        """What this rank does from here on is to end MPI, where it may hang or die: it had done its work then."""
        for neighbour in self._neighbours:
            self._send(neighbour, Finished(self._rank))

    def close(self) -> None:
        """Say goodbye and stop watching: from here on nobody takes this rank's silence for its death."""
        if self._thread.is_alive():
            for neighbour in self._neighbours:
                self._send(neighbour, Goodbye(self._rank))
            if self._voice is not None:
                self._voice.close(_FAREWELL_S)
            self._waker.shutdown(socket.SHUT_WR)  # a child that C code has forked may have a copy, and keep it open
            self._thread.join()
        self.release()

    def release(self) -> None:
        """Close the sockets without a word; what a forked child does with the ones it inherited."""
        if self._voice is not None:
            self._voice.close()
        for neighbour in self._neighbours:
            neighbour.link.close()
        self._wake.close()
        self._waker.close()
        if self._launcher_end is not None:
            os.close(self._launcher_end)
            self._launcher_end = None

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, self._wake)
            if self._launcher_end is not None:
                selector.register(self._launcher_end, selectors.EVENT_READ, self._launcher)
            for neighbour in self._neighbours:
                selector.register(neighbour.link, selectors.EVENT_READ, neighbour)
            while True:
                events = selector.select(self._interval_s)
                for key, _ in events:
                    if key.data is self._wake:
                        return
                    if key.data is self._launcher:
                        selector.unregister(key.fd)
                        self._lose_launcher()
                    elif not self._hear(key.data):
                        selector.unregister(key.data.link)
                self._look_for_silence()

    def _hear(self, neighbour: _Neighbour) -> bool:
        """Read what a neighbour said; False once there is nothing more to hear from it."""
        neighbour.heard_s = self._clock.now_s()
        try:
            data = neighbour.link.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            if not neighbour.said_goodbye:
                self._spread(self._death_of(neighbour), neighbour)
            return False
        try:
            for body in neighbour.inbox.feed(data):
                if body != HEARTBEAT:
                    self._obey(neighbour, body)
        except DamagedError:
            damage = (
                f"rank {neighbour.rank} ({neighbour.where}) sends what is no message of hvdlite, so whether it "
                "lives cannot be told any more: its memory, or the network, is damaged."
            )
            self._spread(Failed(neighbour.rank, damage), neighbour)
            return False
        return True

    def _death_of(self, neighbour: _Neighbour) -> Failed:
        if self._clock.slept_s > self._timeout_s:  # they have given this rank up, and ended
            return Failed(
                self._rank,
                f"rank {self._rank} (pid {os.getpid()}) did not run for {self._clock.slept_s:.0f} s, stopped or "
                "suspended, which is longer than HVDLITE_HEARTBEAT_TIMEOUT_SECONDS; the others have ended meanwhile.",
            )
        if neighbour.has_finished:
            return Failed(
                neighbour.rank,
                f"rank {neighbour.rank} ({neighbour.where}) had finished; its process ended inside MPI_Finalize, which "
                "did not come back.",
            )
        return Failed(
            neighbour.rank,
            f"rank {neighbour.rank} ({neighbour.where}) died without a word: killed, out of memory, or "
            "crashed in native code. Look at its output and at the kernel log (dmesg).",
        )

    def _obey(self, neighbour: _Neighbour, body: bytes) -> None:
        message = read(body)
        if message is None:
            _LOG.warning("rank %d has sent %d bytes that are no message; they are ignored", neighbour.rank, len(body))
        elif isinstance(message, Goodbye):
            neighbour.said_goodbye = True
        elif isinstance(message, Finished):
            neighbour.has_finished = True
        else:
            self._spread(message, neighbour)

    def _look_for_silence(self) -> None:
        now = self._clock.now_s()
        for neighbour in self._neighbours:
            silent_s = now - neighbour.heard_s
            if silent_s > self._timeout_s and not neighbour.said_goodbye:
                # It is told as well: should it have been stopped, it shall wake to blame nobody else.
                silence = (
                    f"rank {neighbour.rank} ({neighbour.where}) has not answered for {silent_s:.0f} s: its process is "
                    f"stopped, or its host is unreachable from that of rank {self._rank}. If it was only busy, raise "
                    "HVDLITE_HEARTBEAT_TIMEOUT_SECONDS."
                )
                self.report(Failed(neighbour.rank, silence))

    def _lose_launcher(self) -> None:
        assert self._launcher is not None
        loss = (
            f"{self._launcher.name} (pid {self._launcher.pid}), which has started rank {self._rank}, ended before it: "
            "killed, perhaps. Its ranks end too."
        )
        self.report(Failed(self._rank, loss))

    def _spread(self, failed: Failed, learned_from: _Neighbour | None) -> None:
        with self._lock:
            if self._failed:
                return
            self._failed = True
        failed = failed._replace(text=tellable(failed.text))
        for neighbour in self._neighbours:
            if neighbour is not learned_from:
                self._send(neighbour, failed)
        self._on_failure(failed)

    def _say_farewell(self, failed: Failed) -> None:
        """Without a thread: neighbours would take the end of the connection for a death without a word."""
        if self._voice is not None:
            self._voice.close(_FAREWELL_S)
        for neighbour in self._neighbours:
            with suppress(OSError):
                neighbour.link.sendall(written(failed))  # the first that it gets but for heartbeats, so there is room

    def _send(self, neighbour: _Neighbour, message: Goodbye | Finished | Failed) -> None:
        """Never waits: a neighbour that does not read must not hold up the others, nor this thread."""
        assert self._voice is not None
        self._voice.send(neighbour.index, written(message))
        if isinstance(message, Goodbye):
            self._voice.rest(neighbour.index)
