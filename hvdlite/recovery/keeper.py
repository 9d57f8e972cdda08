"""A process on each host of an elastic job that outlives its ranks, and has their last commit in memory.

hvdliterun starts it as mpirun starts its daemons, with what it has to know on its stdin, and it calls back over TCP: so
a host that does not answer any more is known as such. Ranks reach it over an abstract unix socket, and hand over a
commit as a memory file that nobody can change any more. It changes hands as a whole, so one is enough: a rank or a host
that dies meanwhile leaves the commit before. A commit that one host alone has goes to hvdliterun as well, if that is on
another machine (`hvdlite.recovery.second_copy`). Nothing that comes in is unpickled; the keeper never looks into a
commit.

Messages are a word and a number on both connections. The keeper ends with its stdin, or its link to hvdliterun.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from enum import IntEnum
from functools import partial

from hvdlite.config import KEEPER, START
from hvdlite.links.dial import first_that_proves_itself, listed
from hvdlite.links.proof import Secret, prove
from hvdlite.links.reception import PATIENCE_S, Reception
from hvdlite.links.wire import connect_unix, is_ours, process_of, read_exactly
from hvdlite.memory.memory_file import is_final
from hvdlite.processes import end_if_stopped
from hvdlite.recovery.second_copy import Courier
from hvdlite.start.start_watch import StartWatch

MESSAGE = struct.Struct("<BQ")
CALL = struct.Struct("<I?")  # what a keeper claims to hvdliterun: its number, and whether it calls for a second copy
TO_HEAD, TO_RANKS = b"keeper", b"kept"  # purposes of the connections


class Word(IntEnum):
    """What a message is about, and its number."""

    PING = 1  # hvdliterun: answered with HOLDS
    HOLDS = 2  # the number of the commit that the keeper has, 0: none
    NEWS = 3  # hvdliterun: what ranks shall hear, bits of `hvdlite.recovery.membership`; a rank: asks for that
    BEGIN = 4  # hvdliterun: ranks are started, so many times by now; for them there are no news
    DEPOSIT = 5  # a rank: the number of the commit whose file comes with it
    DEPOSIT_ALONE = 11  # likewise, and no other host has ranks
    FETCH = 6  # a rank: asks for the commit, answered with HOLDS and its file
    ANEW = 7  # a rank, and on to hvdliterun: the ranks end in order, to be started on other hosts
    AT_WORK = 8  # likewise: the ranks train, 1, or have trained to the end, 0
    CLAIM = 9  # likewise: ranks want to go on without others, a generation and how many; answered with 1 or 0
    FAILED = 10  # likewise: the ranks of this generation end after a failure, to be started anew
    ENDED = 17  # likewise: a rank of this generation, which goes on without others, has come to its end
    STARTING = 13  # likewise: it comes to hvd.init(); the start, see BEGIN, and the rank
    STARTED = 14  # likewise: it is through
    UNLIKE = 16  # likewise: it comes to none, since ranks run different versions
    GONE = 15  # to hvdliterun: it has ended before that
    TAKE = 12  # hvdliterun: the keeper shall have the second copy; answered with what it has then, as by HOLDS


_FOR_HEAD = (Word.ANEW, Word.AT_WORK, Word.CLAIM, Word.FAILED, Word.ENDED, Word.STARTING, Word.STARTED, Word.UNLIKE)
OF_RANKS = (*_FOR_HEAD, Word.GONE)
"""What hvdliterun hears of ranks."""

_ANOTHER = "another one of this job is here: it has not ended yet, or this host has two names among those of the job"


def pair_of(first: int, second: int) -> int:
    """The number of a message that has two."""
    return first << 32 | second


def pair_in(number: int) -> tuple[int, int]:
    """The two numbers in one."""
    return number >> 32, number & 0xFFFFFFFF


class Keeper:
    """What is kept, and the threads that serve ranks.

    Attributes:
        last_start: the last one through which a rank of this host has come.

    Args:
        name: of the abstract unix socket.
        head: the connection to hvdliterun.
        call: makes another one, for second copies.
        is_elsewhere: whether hvdliterun is on another machine, and needs copies.
    """

    def __init__(
        self, name: str, key: bytes, head: socket.socket, call: Callable[[], socket.socket], *, is_elsewhere: bool
    ) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._number, self._file = 0, -1
        self._news = 0
        self.last_start = 0
        self._head = head
        self._courier = Courier(call, self._take)
        self._is_elsewhere = is_elsewhere
        self._granted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._reception = Reception([_listen(name)], Secret(key, TO_RANKS, 0), self._admit)

    def close(self) -> None:
        self._reception.close()
        with self._lock:
            self._put(0, -1)

    def hear(self, word: int, number: int) -> None:
        """Something that hvdliterun has said."""
        with self._lock:
            if word == Word.PING:
                self._head.sendall(MESSAGE.pack(Word.HOLDS, self._number))
            elif word == Word.NEWS:
                self._news |= number
            elif word == Word.BEGIN:
                self._news = 0
            elif word == Word.CLAIM:
                self._granted.put(number)
        if word == Word.TAKE:
            self._courier.fetch()

    def say_gone(self, start: int, rank: int) -> None:
        """Tell hvdliterun of a rank that has ended, unless its start was over."""
        if start > self.last_start:
            with self._lock:
                self._head.sendall(MESSAGE.pack(Word.GONE, pair_of(start, rank)))

    def _admit(self, link: socket.socket, claim: bytes, session: bytes) -> bool:
        threading.Thread(target=self._serve, args=(link,), daemon=True).start()
        return True

    def _serve(self, link: socket.socket) -> None:
        starting = 0
        with link, suppress(OSError):  # a rank ends
            while True:
                word, number = self._answer(link)
                if word == Word.STARTING:
                    starting = number
                elif word == Word.STARTED:
                    starting = 0
        if starting:
            with suppress(OSError):  # hvdliterun has ended
                self.say_gone(*pair_in(starting))

    def _answer(self, link: socket.socket) -> tuple[int, int]:
        """One request, which is returned. Raises OSError where there is none that makes sense."""
        data, files, _, _ = socket.recv_fds(link, MESSAGE.size, 8)
        with ExitStack() as unused:
            for file in files:
                unused.callback(os.close, file)
            if not data:
                raise ConnectionError("the rank has ended")
            word, number = request = MESSAGE.unpack(data + read_exactly(link, MESSAGE.size - len(data)))
            if word in (Word.DEPOSIT, Word.DEPOSIT_ALONE) and len(files) == 1 and is_final(files[0]):
                with self._lock:
                    self._put(number, os.dup(files[0]))
                if word == Word.DEPOSIT_ALONE and self._is_elsewhere:
                    self._courier.bring(number, os.dup(files[0]))
                link.sendall(MESSAGE.pack(Word.HOLDS, number))
            elif word == Word.FETCH:
                with self._lock:
                    number, kept = self._number, [] if self._file < 0 else [os.dup(self._file)]
                for file in kept:
                    unused.callback(os.close, file)
                socket.send_fds(link, [MESSAGE.pack(Word.HOLDS, number)], kept)
            elif word == Word.NEWS:
                link.sendall(MESSAGE.pack(Word.NEWS, self._news))
            elif word in _FOR_HEAD:
                if word == Word.STARTED:
                    self.last_start, _ = pair_in(number)
                with self._lock:
                    self._head.sendall(MESSAGE.pack(word, number))
                link.sendall(MESSAGE.pack(word, self._granted.get() if word == Word.CLAIM else 0))
            else:
                raise ConnectionError("no request")
        return request

    def _take(self, number: int, file: int) -> None:
        """Have what hvdliterun has given, unless what is here is newer; -1: nothing."""
        with self._lock:
            if number > self._number:
                self._put(number, file)
            elif file >= 0:
                os.close(file)
            with suppress(OSError):  # hvdliterun has ended
                self._head.sendall(MESSAGE.pack(Word.TAKE, self._number))

    def _put(self, number: int, file: int) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._number, self._file = number, file


def _listen(name: str) -> socket.socket:
    """At the abstract unix socket ``name``, also where one that is stopped does: that one is ended.

    Raises:
        OSError: another one is there, or this process cannot have sockets.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _end_stopped(name):
            raise
        listener.bind("\0" + name)
    listener.listen(1024)
    return listener


def _end_stopped(name: str) -> bool:
    """Whether the keeper before this one was stopped, and has been ended."""
    with connect_unix(name, PATIENCE_S) as link:
        return is_ours(link) and end_if_stopped(process_of(link))


def _call(where: Sequence[tuple[str, int]], key: bytes, claim: bytes, patience_s: float) -> socket.socket:
    """A connection to hvdliterun, at whichever of its addresses it proves itself first.

    Args:
        claim: see `CALL`.
    """
    secret = Secret(key, TO_HEAD, CALL.size)
    name, port = where[0]
    if not port:
        link = connect_unix(name, PATIENCE_S)
        prove(secret, link, claim)
        link.settimeout(None)
        return link
    first = first_that_proves_itself(where, secret, claim, time.monotonic() + PATIENCE_S)
    if first is None:
        raise ConnectionError(f"hvdliterun does not answer at any of its addresses ({listed(where)})")
    first.link.settimeout(None)
    notice_silence(first.link, patience_s)
    return first.link


def notice_silence(link: socket.socket, patience_s: float) -> None:
    """Let the kernel end a TCP connection whose other end has not answered for about so long."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        link.setsockopt(socket.IPPROTO_TCP, option, max(1, round(patience_s / 3)))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * patience_s))


def main() -> None:
    """The keeper's process. Its stdin begins with a line of JSON, which hvdliterun writes (`hvdlite.cli.keepers`)."""
    try:
        _keep()
    except OSError as error:
        why = _ANOTHER if error.errno == errno.EADDRINUSE else error
        sys.exit(f"hvdlite keeper on {socket.gethostname()}: {why}")


def _keep() -> None:
    # By os.read alone, as a buffer would hide what follows from the selector.
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return
        line += piece
    told = json.loads(line)
    where = [(address, port) for address, port in told["where"]]

    def call(*, for_copy: bool) -> socket.socket:
        return _call(where, bytes.fromhex(told["key"]), CALL.pack(told["number"], for_copy), told["patience_s"])

    with ExitStack() as on_end:
        head = on_end.enter_context(call(for_copy=False))
        ranks_key, call_for_copy = bytes.fromhex(told["ranks_key"]), partial(call, for_copy=True)
        keeper = Keeper(told["name"], ranks_key, head, call_for_copy, is_elsewhere=told["is_elsewhere"])
        on_end.enter_context(closing(keeper))
        head.sendall(MESSAGE.pack(Word.HOLDS, 0))
        with selectors.DefaultSelector() as selector, suppress(OSError):
            selector.register(0, selectors.EVENT_READ)
            selector.register(head, selectors.EVENT_READ)
            watch = StartWatch({}, 0, selector)
            while True:
                for key, _ in selector.select(watch.sleep_s):
                    if key.fd == 0:
                        if not os.read(0, 1 << 16):
                            return
                    elif key.fileobj is head:
                        word, number = MESSAGE.unpack(read_exactly(head, MESSAGE.size))
                        keeper.hear(word, number)
                        if word == Word.BEGIN:
                            watch.close()
                            marks = {KEEPER: f"{told['name']}:{told['ranks_key']}", START: str(number)}
                            watch = StartWatch(marks, number, selector)
                            break  # what else is ready may have been the last watch's
                    else:
                        watch.rank_ended(key)
                        keeper.say_gone(watch.start, key.data)
                if (missed := watch.missed()) is not None:
                    keeper.say_gone(watch.start, missed)
