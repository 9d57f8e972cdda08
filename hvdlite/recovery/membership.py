"""A process's place in an elastic job: it asks hvdliterun to be a rank, and hears when ranks are to meet anew."""

from __future__ import annotations

import socket
from contextlib import suppress

from hvdlite import plain
from hvdlite.errors import StartupError
from hvdlite.recovery.roster import Generation, Join
from hvdlite.start.meeting_point import connect, receive, send, unreachable

REMOVED, ADDED = 1, 2  # bits of what a member is told: workers are to leave, workers want to come


class Membership:
    """That of worker ``worker``, at the meeting point ``where``. The connection stays: news come over it.

    Attributes:
        generation: the present one; None before the first `join`.
    """

    def __init__(self, where: str, worker: int) -> None:
        self.worker = worker
        self.generation: Generation | None = None
        self._where = where
        self._link: socket.socket | None = None

    @property
    def rank(self) -> int:
        assert self.generation is not None
        return self.generation.workers.index(self.worker)

    def join(self, failed: int | None = None, *, follows_rank_0: bool = True) -> Generation:
        """Become a rank of the next generation; waits for as long as hvdliterun does.

        Args:
            failed, follows_rank_0: see `Join`.

        Raises:
            StartupError: there is no next generation; says why.
        """
        self.close()
        try:
            self._link = connect(self._where)
            self._link.settimeout(None)
            send(self._link, plain.dumps(Join(self.worker, failed, follows_rank_0)))
            answer = receive(self._link)
        except OSError as error:
            raise StartupError(unreachable(error, f"worker {self.worker}", "hvdliterun")) from error
        self.generation = self._read(answer)
        return self.generation

    def _read(self, answer: bytes) -> Generation:
        """Raises StartupError where there is no next generation, or ``answer`` makes no sense."""
        with suppress(ValueError):
            match plain.loads(answer):
                case str() as reason:
                    raise StartupError(reason)
                case Generation(number=int(), workers=tuple() as workers) as generation if self.worker in workers:
                    return generation
        raise StartupError(f"hvdliterun has answered worker {self.worker} what makes no sense: {answer[:100]!r}")

    def news(self) -> int:
        """Bits of what has been told since the last call; never waits."""
        told = 0
        if self._link is not None:
            with suppress(OSError):
                for byte in self._link.recv(64, socket.MSG_DONTWAIT):
                    told |= byte
        return told

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
