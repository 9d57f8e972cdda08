"""A commit that one host alone has travels to hvdliterun, and from there to the host on which ranks begin anew.

A job ends with hvdliterun, so no other place for a copy is safer. Keepers call over a connection of its own for that,
as hvdliterun waits for seconds at most for what they say on the other one. A message is the number of a commit and its
bytes, which hvdliterun takes if it has room; number 0 asks for the commit that it has.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hvdlite.errors import StartupError
from hvdlite.links.wire import read_exactly
from hvdlite.memory.memory_file import write_memory_file

_HEAD = struct.Struct("<QQ")
_YES, _NO = b"y", b"n"
_PIECE_BYTES = 1 << 20
_MOST_OF_MEMORY = 0.5  # of what is available
_AGAIN_S = 1.0  # after a connection that was lost


class Courier:
    """A keeper's end: a thread that brings commits to hvdliterun and gets them from there, the newest only.

    Args:
        call: makes a connection to hvdliterun; raises OSError.
        on_copy: is given the number and the file of a commit that was asked for, 0 and -1 where there is none.
    """

    def __init__(self, call: Callable[[], socket.socket], on_copy: Callable[[int, int], object]) -> None:
        self._call = call
        self._on_copy = on_copy
        self._link: socket.socket | None = None  # of the thread alone
        self._changed = threading.Condition()  # guards what follows
        self._asks = False
        self._number, self._file = 0, -1
        threading.Thread(target=self._run, name="hvdlite courier", daemon=True).start()

    def bring(self, number: int, file: int) -> None:
        """Let hvdliterun have commit ``number``, whose file this closes, in place of one that still waits."""
        with self._changed:
            if self._file >= 0:
                os.close(self._file)
            self._number, self._file = number, file
            self._changed.notify()

    def fetch(self) -> None:
        """Ask for the commit that hvdliterun has."""
        with self._changed:
            self._asks = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asks or self._file >= 0)
                asks, self._asks = self._asks, False
                number, file = self._number, self._file
                self._file = -1
            if file >= 0:
                self._offer(number, file)
            if asks:
                self._ask()

    def _offer(self, number: int, file: int) -> None:
        try:
            link = self._connect()
            link.sendall(_HEAD.pack(number, os.fstat(file).st_size))
            if read_exactly(link, 1) == _YES:
                _send(link, file)
        except OSError:
            self._hang_up()
            with self._changed:
                if self._file < 0:
                    self._number, self._file = number, os.dup(file)
            time.sleep(_AGAIN_S)
        os.close(file)

    def _ask(self) -> None:
        number, file = 0, -1
        try:
            link = self._connect()
            link.sendall(_HEAD.pack(0, 0))
            number, file = _receive(link, *_HEAD.unpack(read_exactly(link, _HEAD.size)))
        except (OSError, StartupError):
            self._hang_up()
        self._on_copy(number, file)

    def _connect(self) -> socket.socket:
        if self._link is None:
            self._link = self._call()
        return self._link

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


class SecondCopy:
    """hvdliterun's end: the newest commit that it was given. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._number, self._file = 0, -1

    @property
    def number(self) -> int:
        """Of the commit that is here; 0: none is."""
        return self._number

    def serve(self, link: socket.socket, is_valid: Callable[[], bool], say: Callable[[str], object]) -> None:
        """Take and give commits over ``link`` until it ends.

        Args:
            is_valid: whether a commit that has come may be kept: whoever it is from may have been given up meanwhile.
            say: called with a complaint, once for each connection.
        """
        has_complained = False
        with link, suppress(OSError, StartupError):
            while True:
                number, nbytes = _HEAD.unpack(read_exactly(link, _HEAD.size))
                if number == 0:
                    self._give(link)
                    continue
                has_room = nbytes <= _MOST_OF_MEMORY * _available_bytes()
                link.sendall(_YES if has_room else _NO)
                if has_room:
                    _, file = _receive(link, number, nbytes)
                    self._put(number, file, is_valid)
                elif not has_complained:
                    say(f"no room here for a copy of commit {number}, {nbytes >> 20} MiB, which one host alone has")
                    has_complained = True

    def drop(self) -> None:
        """Nobody needs the commit that is here."""
        with self._lock:
            self._replace(0, -1)

    def _give(self, link: socket.socket) -> None:
        with self._lock:
            number, file = self._number, -1 if self._file < 0 else os.dup(self._file)
        try:
            link.sendall(_HEAD.pack(number, 0 if file < 0 else os.fstat(file).st_size))
            if file >= 0:
                _send(link, file)
        finally:
            if file >= 0:
                os.close(file)

    def _put(self, number: int, file: int, is_valid: Callable[[], bool]) -> None:
        with self._lock:
            if number > self._number and is_valid():
                self._replace(number, file)
            else:
                os.close(file)

    def _replace(self, number: int, file: int) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._number, self._file = number, file


def _send(link: socket.socket, file: int) -> None:
    done, nbytes = 0, os.fstat(file).st_size
    while done < nbytes:
        done += os.sendfile(link.fileno(), file, done, nbytes - done)


def _receive(link: socket.socket, number: int, nbytes: int) -> tuple[int, int]:
    """The number and the file of what follows; the file is -1 where nothing does.

    Raises:
        OSError: the other end is gone.
        StartupError: there is no memory file for it.
    """
    if number == 0:
        return 0, -1

    def write(target: BinaryIO) -> None:
        left = nbytes
        piece = memoryview(bytearray(min(nbytes, _PIECE_BYTES)))
        while left:
            got = link.recv_into(piece[:left])
            if got == 0:
                raise ConnectionError("the other end is gone")
            target.write(piece[:got])
            left -= got

    return number, write_memory_file(write)


def _available_bytes() -> int:
    """Memory that can be had without others being driven out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0
