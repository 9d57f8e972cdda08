"""A rank's end of the keeper on its host: hands over commits, and asks for the last one and for news."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import BinaryIO

from hvdlite.config import Config
from hvdlite.links.wire import process_of, read_exactly
from hvdlite.memory.memory_file import write_memory_file
from hvdlite.naps import growing_pause_s
from hvdlite.processes import end_if_stopped
from hvdlite.recovery.keeper import MESSAGE, TO_RANKS, Word, pair_of
from hvdlite.start.meeting_point import connect

_LOG = logging.getLogger("hvdlite")

_OF_EACH_COMMIT = (Word.DEPOSIT, Word.DEPOSIT_ALONE, Word.NEWS)
# Without these hvdliterun takes ranks that have succeeded, or could go on, for ranks that have failed; or does not see
# that others wait in hvd.init() for a rank that ends.
_NOT_TO_BE_LOST = (Word.AT_WORK, Word.ENDED, Word.CLAIM, Word.ANEW, Word.STARTING)
_AGAIN_S = 0.2  # between two looks for the keeper that takes the place of one that has ended
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0  # in which commits do not wait for a keeper that has been silent
_SILENT = "the keeper of this host, a process of hvdliterun's, does not answer: it is stopped, or the host is very busy"


class Safekeeping:
    """At the keeper ``where`` (HVDLITE_KEEPER). Methods that ask it raise OSError where it is gone, or stopped.

    One that stays stopped is ended, so that hvdliterun starts another: from another host it cannot see that. For one
    that does not answer otherwise a commit waits once, and then again after pauses that grow: the keepers of other
    hosts have the commit as well.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._deposit: threading.Thread | None = None
        self._has_warned = False  # since a commit was kept
        self._asking = threading.Lock()  # guards what follows
        self._link: socket.socket | None = None
        self._silences = 0  # in a row
        self._silent_until_s = 0.0  # by the monotonic clock

    def hand_over(self, number: int, write: Callable[[BinaryIO], object], *, is_alone: bool = False) -> None:
        """Let the keeper have commit ``number``, as ``write`` writes it on another thread.

        Waits for the commit that was handed over before: only one is on its way. The first failure in a row is a
        warning.

        Args:
            is_alone: see `deposit`.
        """
        self.settle()
        # No daemon: a process that ends, unless it is killed, leaves its last commit behind.
        self._deposit = threading.Thread(target=self._write, args=(number, write, is_alone), name="hvdlite deposit")
        self._deposit.start()

    def settle(self) -> None:
        """Wait until the keeper has what was handed over, or never will."""
        if self._deposit is not None:
            self._deposit.join()
            self._deposit = None

    def deposit(self, number: int, file: int, *, is_alone: bool = False) -> None:
        """Let the keeper have commit ``number``, a memory file (`write_memory_file`); returns once it has.

        Args:
            is_alone: no other host has ranks, so hvdliterun is to get a copy in time.
        """
        self._ask(Word.DEPOSIT_ALONE if is_alone else Word.DEPOSIT, number, [file])

    def fetch(self) -> tuple[int, int | None]:
        """The number of the commit that is kept, 0 for none, and its file, which the caller closes."""
        return self._ask(Word.FETCH)

    def news(self) -> int:
        """What the ranks are to hear, bits of `hvdlite.recovery.membership`."""
        return self._ask(Word.NEWS)[0]

    def say_starting(self, start: int, rank: int) -> None:
        """Tell hvdliterun that this rank comes to hvd.init(), of the ranks that were started so many times."""
        self._ask(Word.STARTING, pair_of(start, rank))

    def say_started(self, start: int, rank: int) -> None:
        """Tell hvdliterun that it is through; a rank that ends before, others may wait for."""
        self._ask(Word.STARTED, pair_of(start, rank))

    def say_unlike(self, start: int, rank: int) -> None:
        """Tell hvdliterun that this rank has not started, since ranks run different versions."""
        self._ask(Word.UNLIKE, pair_of(start, rank))

    def begin_anew(self) -> None:
        """Tell hvdliterun that the ranks end in order now, to be started on other hosts."""
        self._ask(Word.ANEW)

    def say_failed(self, generation: int) -> None:
        """Tell hvdliterun that the ranks of ``generation`` end now, as one has failed and they cannot go on."""
        self._ask(Word.FAILED, generation)

    def say_ended(self, generation: int) -> None:
        """Tell hvdliterun that a rank of ``generation``, which goes on without others, has come to its end."""
        self._ask(Word.ENDED, generation)

    def claim(self, number: int, count: int) -> bool:
        """Whether hvdliterun lets ``count`` ranks go on as generation ``number``, after others have died."""
        return bool(self._ask(Word.CLAIM, pair_of(number, count))[0])

    def say_at_work(self, is_at_work: bool) -> None:
        """Tell hvdliterun that these ranks train, or have trained to the end."""
        self._ask(Word.AT_WORK, is_at_work)

    def close(self) -> None:
        self.settle()
        with self._asking:
            self._hang_up()

    def _write(self, number: int, write: Callable[[BinaryIO], object], is_alone: bool) -> None:
        try:
            file = write_memory_file(write)
            try:
                self.deposit(number, file, is_alone=is_alone)
            finally:
                os.close(file)
            self._has_warned = False
        except Exception as error:  # whatever the program's own values raise when they are pickled
            if not self._has_warned:
                _LOG.warning("commit %d is not kept outside of this process: %s", number, error)
            self._has_warned = True

    def _ask(self, word: Word, number: int = 0, files: list[int] | None = None) -> tuple[int, int | None]:
        request, is_needed = MESSAGE.pack(word, number), word in _NOT_TO_BE_LOST
        with self._asking:
            if word in _OF_EACH_COMMIT and time.monotonic() < self._silent_until_s:
                raise TimeoutError(_SILENT)
            try:
                answer = self._ask_until_answered(request) if is_needed else self._ask_twice(request, files or [])
            except TimeoutError as error:
                pause_s = growing_pause_s(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, self._silences)
                self._silences += 1
                self._silent_until_s = time.monotonic() + pause_s
                raise TimeoutError(_SILENT) from error
            self._silences, self._silent_until_s = 0, 0.0
            return answer

    def _ask_twice(self, request: bytes, files: list[int]) -> tuple[int, int | None]:
        had_link = self._link is not None
        try:
            return self._ask_once(request, files)
        except OSError as error:
            if not had_link or isinstance(error, TimeoutError):
                raise
        return self._ask_once(request, files)  # that keeper has ended; perhaps another one is in its place

    def _ask_until_answered(self, request: bytes) -> tuple[int, int | None]:
        """By the keeper that hvdliterun starts, if the one that was here has ended."""
        until_s = time.monotonic() + Config.from_env().start_timeout_s  # half of which a keeper has to call
        while True:
            try:
                return self._ask_once(request, [])
            except ConnectionError:
                if time.monotonic() >= until_s:
                    raise
            time.sleep(_AGAIN_S)

    def _ask_once(self, request: bytes, files: list[int]) -> tuple[int, int | None]:
        try:
            if self._link is None:
                self._link = connect(self._where, TO_RANKS)
            return _exchange(self._link, request, files)
        except OSError as error:
            is_stopped = isinstance(error, TimeoutError) and self._link is not None and self._end_if_stopped()
            self._hang_up()
            if is_stopped:
                raise ConnectionError("the keeper was stopped") from error
            raise

    def _end_if_stopped(self) -> bool:
        assert self._link is not None
        if not end_if_stopped(process_of(self._link)):
            return False
        _LOG.warning("the keeper of this host, a process of hvdliterun's, was stopped, and is replaced")
        return True

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _exchange(link: socket.socket, request: bytes, files: list[int]) -> tuple[int, int | None]:
    """The number in the answer, and the file that came with it."""
    socket.send_fds(link, [request], files)
    data, got, _, _ = socket.recv_fds(link, MESSAGE.size, 1)
    with ExitStack() as on_failure:
        for file in got:
            on_failure.callback(os.close, file)
        if not data:
            raise ConnectionError("the keeper has ended")
        word, answer = MESSAGE.unpack(data + read_exactly(link, MESSAGE.size - len(data)))
        asked = request[0]
        if word != (Word.HOLDS if asked in (Word.DEPOSIT, Word.DEPOSIT_ALONE, Word.FETCH) else asked):
            raise ConnectionError(f"the keeper has answered word {asked} with {word}")
        if got and asked != Word.FETCH:
            raise ConnectionError(f"the keeper has answered word {asked} with a file")
        on_failure.pop_all()
    return answer, got[0] if got else None
