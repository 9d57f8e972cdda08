"""Who is alive, and telling everybody when somebody is not.

A thread per rank holds a socket to every neighbour: the node leader, or the leader's local ranks, and, between
leaders, the parent and the children of the tree. It sleeps in the kernel and needs neither MPI nor shared
memory, so it works when those are stuck:

- A process that dies, however, has its sockets closed by the kernel: the neighbours see the end of the stream
  within milliseconds.
- A process that is stopped, or a host that is cut off, misses its heartbeats.
- A rank that raises sends its traceback.

The first failure a sentinel learns of is passed to its other neighbours, so it reaches every rank in as many
hops as the tree is deep, and to ``on_failure`` of its own process, once.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_LENGTH = struct.Struct("<I")
_HEARTBEAT = b""
_NEVER_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_MAX_TEXT = 20_000  # a traceback; the head and the tail of a longer one tell the story
_FLUSH_S = 0.02  # between two tries at a neighbour that did not take everything
_FAREWELL_S = 1.0  # how long close() waits for such a neighbour


@dataclass(slots=True)
class _Neighbour:
    rank: int
    where: str  # 'pid 4242 on node0'
    link: socket.socket
    heard_s: float
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)  # what its kernel buffer did not take yet
    said_goodbye: bool = False


class Sentinel:
    """Watches this rank's neighbours.

    Args:
        links: (rank, where it is, connected socket) of every neighbour.
        on_failure: called once, on the sentinel's thread, with (rank, text) of the first failure.
        timeout_s: a neighbour that is silent for longer counts as failed.
    """

    def __init__(
        self,
        rank: int,
        links: list[tuple[int, str, socket.socket]],
        on_failure: Callable[[int, str], None],
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._on_failure = on_failure
        self._timeout_s = timeout_s
        self._failed = False
        self._lock = threading.Lock()  # one sender at a time per link, and the first failure wins
        now = time.monotonic()
        self._neighbours = [_Neighbour(other, where, link, now) for other, where, link in links]
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name=f"hvdlite-sentinel-{rank}", daemon=True)
        if self._neighbours:
            for neighbour in self._neighbours:
                neighbour.link.setblocking(True)
            self._thread.start()

    def report(self, rank: int, text: str) -> None:
        """Tell every rank that ``rank`` failed, and why. From any thread; the first report wins."""
        self._spread(rank, text, learned_from=None)

    def close(self) -> None:
        """Say goodbye and stop watching: from here on nobody takes this rank's silence for its death."""
        if self._thread.is_alive():
            for neighbour in self._neighbours:
                self._send(neighbour, {"goodbye": self._rank})
            deadline_s = time.monotonic() + _FAREWELL_S
            while self._flush() and time.monotonic() < deadline_s:
                time.sleep(_FLUSH_S)
            self._waker.close()
            self._thread.join()
        self.release()

    def release(self) -> None:
        """Close the sockets without a word; what a forked child does with the ones it inherited."""
        for neighbour in self._neighbours:
            neighbour.link.close()
        self._wake.close()
        self._waker.close()

    def _watch(self) -> None:
        interval_s = min(2.0, self._timeout_s / 4)
        next_beat_s = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for neighbour in self._neighbours:
                selector.register(neighbour.link, selectors.EVENT_READ, neighbour)
            while True:
                wait_s = max(0.0, next_beat_s - time.monotonic())
                for key, _ in selector.select(min(wait_s, _FLUSH_S) if self._flush() else wait_s):
                    if key.data is None:
                        return
                    if not self._hear(key.data):
                        selector.unregister(key.data.link)
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + interval_s
                    self._beat()

    def _hear(self, neighbour: _Neighbour) -> bool:
        """Read what a neighbour said; False once there is nothing more to hear from it."""
        try:
            data = neighbour.link.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            if not neighbour.said_goodbye:
                self._spread(
                    neighbour.rank,
                    f"rank {neighbour.rank} ({neighbour.where}) died without a word: killed, out of memory, or "
                    "crashed in native code. Look at its output and at the kernel log (dmesg).",
                    neighbour,
                )
            return False
        neighbour.heard_s = time.monotonic()
        neighbour.inbox += data
        while len(neighbour.inbox) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(neighbour.inbox)
            if len(neighbour.inbox) < _LENGTH.size + length:
                break
            body = bytes(neighbour.inbox[_LENGTH.size : _LENGTH.size + length])
            del neighbour.inbox[: _LENGTH.size + length]
            if body != _HEARTBEAT:
                self._obey(neighbour, json.loads(body))
        return True

    def _obey(self, neighbour: _Neighbour, message: dict[str, object]) -> None:
        if "goodbye" in message:
            neighbour.said_goodbye = True
        else:
            rank, text = message["failed"], message["text"]
            assert isinstance(rank, int) and isinstance(text, str)
            self._spread(rank, text, neighbour)

    def _beat(self) -> None:
        now = time.monotonic()
        for neighbour in self._neighbours:
            if neighbour.said_goodbye:
                continue
            silent_s = now - neighbour.heard_s
            if silent_s > self._timeout_s:
                self._spread(
                    neighbour.rank,
                    f"rank {neighbour.rank} ({neighbour.where}) has not answered for {silent_s:.0f} s: its process is "
                    "stopped, or its host is unreachable. If it was only busy, raise "
                    "HVDLITE_HEARTBEAT_TIMEOUT_SECONDS.",
                    neighbour,
                )
            self._send(neighbour, None)

    def _spread(self, rank: int, text: str, learned_from: _Neighbour | None) -> None:
        with self._lock:
            if self._failed:
                return
            self._failed = True
        if len(text) > _MAX_TEXT:
            text = f"{text[: _MAX_TEXT // 2]}\n[...]\n{text[-_MAX_TEXT // 2 :]}"
        for neighbour in self._neighbours:
            if neighbour is not learned_from:
                self._send(neighbour, {"failed": rank, "text": text})
        self._on_failure(rank, text)

    def _send(self, neighbour: _Neighbour, message: dict[str, object] | None) -> None:
        """Never waits: a neighbour that does not read must not hold up the others, nor this thread."""
        body = _HEARTBEAT if message is None else json.dumps(message, ensure_ascii=False).encode(errors="replace")
        with self._lock:
            if message is None and neighbour.outbox:
                return  # it has more to read than that
            neighbour.outbox += _LENGTH.pack(len(body)) + body
        self._flush()

    def _flush(self) -> bool:
        """Give the neighbours what their buffers take; whether anything is left."""
        left = False
        with self._lock:
            for neighbour in self._neighbours:
                try:
                    if neighbour.outbox:
                        del neighbour.outbox[: neighbour.link.send(neighbour.outbox, _NEVER_WAIT)]
                except BlockingIOError:
                    pass
                except OSError:
                    neighbour.outbox.clear()  # it is gone, which the thread that reads will find
                left |= bool(neighbour.outbox)
        return left
