"""A rank's end of the keeper on its host: hands over commits, and asks for the last one and for news."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

from hvdlite.keeper import MESSAGE, TO_RANKS, Word, claim_of
from hvdlite.meeting_point import connect
from hvdlite.wire import read_exactly


class Safekeeping:
    """At the keeper ``where`` (HVDLITE_KEEPER). All methods raise OSError where it is gone."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._link: socket.socket | None = None

    def deposit(self, number: int, file: int) -> None:
        """Let the keeper have commit ``number``, a memory file (`write_memory_file`); returns once it has."""
        self._ask(Word.DEPOSIT, number, [file])

    def fetch(self) -> tuple[int, int | None]:
        """The number of the commit that is kept, 0 for none, and its file, which the caller closes."""
        return self._ask(Word.FETCH)

    def news(self) -> int:
        """What the ranks are to hear, bits of `hvdlite.membership`."""
        return self._ask(Word.NEWS)[0]

    def begin_anew(self) -> None:
        """Tell hvdliterun that the ranks end in order now, to be started on other hosts."""
        self._ask(Word.ANEW)

    def claim(self, number: int, count: int) -> bool:
        """Whether hvdliterun lets ``count`` ranks go on as generation ``number``, after others have died."""
        return bool(self._ask(Word.CLAIM, claim_of(number, count))[0])

    def say_at_work(self, is_at_work: bool) -> None:
        """Tell hvdliterun that these ranks train, or have trained to the end."""
        self._ask(Word.AT_WORK, is_at_work)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _ask(self, word: Word, number: int = 0, files: list[int] | None = None) -> tuple[int, int | None]:
        if self._link is None:
            self._link = connect(self._where, TO_RANKS)
        try:
            socket.send_fds(self._link, [MESSAGE.pack(word, number)], files or [])
            data, got, _, _ = socket.recv_fds(self._link, MESSAGE.size, 1)
            with ExitStack() as on_failure:
                for file in got:
                    on_failure.callback(os.close, file)
                if not data:
                    raise ConnectionError("the keeper has ended")
                _, answer = MESSAGE.unpack(data + read_exactly(self._link, MESSAGE.size - len(data)))
                on_failure.pop_all()
        except OSError:
            self.close()
            raise
        return answer, got[0] if got else None
