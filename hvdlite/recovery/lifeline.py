"""Messages between ranks of which some may be dead: point-to-point MPI alone, in calls that never wait.

Under ULFM, Open MPI goes on to carry messages between the living after others have died. Its collectives do not, and
new communicators are not always made (5.0.11 hangs or crashes in some when a rank dies meanwhile). So this one is made
while all live, and none later.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdlite.naps import Patience
from hvdlite.start.rendezvous import MissingError

if TYPE_CHECKING:
    from mpi4py import MPI

_NAP_S = 0.5e-3
_ARRIVAL_S = 5.0  # of a message of which the beginning is there
_ANSWER_S = 1.0  # for the first rank to say who has not come


class GoneError(Exception):
    """MPI has noticed that a rank has died."""


class Lifeline:
    """Between all ranks of ``comm``, which is duplicated; a `hvdlite.start.rendezvous.Place` as well.

    A message has a key. Messages of other keys are kept for who asks for them, so nothing that is left over from an
    earlier meeting is taken for something else. Any thread may send; one receives.

    Attributes:
        has_ended: nothing is sent any more.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._error = MPI.Exception
        self._byte = MPI.BYTE
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._lock = threading.Lock()  # guards what is on its way
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._lost: list[object] = []  # memory into which something may still arrive
        self._kept: dict[tuple[int, str], bytes] = {}
        self.has_ended = False

    def end(self) -> None:
        """MPI is about to end: nothing is sent from here on, by whichever thread."""
        with self._lock:
            self.has_ended = True

    def send(self, to: int, key: str, data: bytes) -> None:
        """Start to send; nobody is told where ``to`` has died."""
        message = pickle.dumps((key, data))
        with self._lock:
            if self.has_ended:
                return
            self._sends = [(request, sent) for request, sent in self._sends if not self._is_done(request)]
            try:
                self._sends.append((self._comm.Isend([message, self._byte], to), message))
            except self._error:
                return

    def receive(self, source: int, key: str) -> bytes | None:
        """What ``source`` has sent as ``key``; None as long as it has not come.

        Raises:
            GoneError: it will not come.
        """
        while (source, key) not in self._kept:
            message = self._next(source)
            if message is None:
                return None
            found, data = pickle.loads(message)
            self._kept[source, found] = data
        return self._kept.pop((source, key))

    def gather(self, key: str, ranks: Sequence[int], rank: int, data: bytes, patience: Patience) -> list[bytes]:
        """See `hvdlite.start.rendezvous.Place`; the first of ``ranks`` collects, and tells the others."""
        if rank != ranks[0]:
            self.send(ranks[0], key, data)
            return self._collected(ranks[0], key, patience)
        timeout_s = patience.left_s
        found, gone = self._collect(ranks, key, data, patience)
        error: MissingError | None = None
        if gone:
            error = MissingError.of(gone, "ended meanwhile")
        elif missing := [other for other in ranks if other not in found]:
            error = MissingError.late(missing, timeout_s)
        answer: Any = [found[other] for other in ranks] if error is None else str(error)
        for other in ranks[1:]:
            self.send(other, key, pickle.dumps(answer))
        if error is not None:
            raise error
        return [found[other] for other in ranks]

    def _collect(
        self, ranks: Sequence[int], key: str, data: bytes, patience: Patience
    ) -> tuple[dict[int, bytes], list[int]]:
        """What the ranks have sent in time, and those that have died."""
        found = {ranks[0]: data}
        gone: list[int] = []

        def is_over(most_s: float) -> bool:
            for other in ranks[1:]:
                if other in found:
                    continue
                try:
                    arrived = self.receive(other, key)
                except GoneError:
                    gone.append(other)
                    continue
                if arrived is not None:
                    found[other] = arrived
            if gone or len(found) == len(ranks):
                return True
            time.sleep(min(most_s, _NAP_S))
            return False

        patience.wait_for(is_over)
        return found, gone

    def _collected(self, first: int, key: str, patience: Patience) -> list[bytes]:
        answer: bytes | None = None

        def has_come(most_s: float) -> bool:
            nonlocal answer
            try:
                answer = self.receive(first, key)
            except GoneError:
                raise MissingError.of([first], "ended meanwhile") from None
            if answer is None:
                time.sleep(min(most_s, _NAP_S))
            return answer is not None

        timeout_s = patience.left_s
        # The first rank says who is late; it is waited for a little longer than the others.
        if not patience.wait_for(has_come) and not Patience(_ANSWER_S).wait_for(has_come):
            raise MissingError.late([first], timeout_s)
        assert answer is not None
        told = pickle.loads(answer)
        if isinstance(told, str):
            raise MissingError(told)
        found: list[bytes] = told
        return found

    def _next(self, source: int) -> bytes | None:
        """The next message of ``source`` that has arrived."""
        from mpi4py import MPI

        status = MPI.Status()
        try:
            message = self._comm.Improbe(source, MPI.ANY_TAG, status)
            if message is None:
                return None
            data = bytearray(status.Get_count(MPI.BYTE))
            request = message.Irecv([data, MPI.BYTE])
            until_s = time.monotonic() + _ARRIVAL_S
            while not request.Test():
                if time.monotonic() > until_s:
                    self._lost.append((request, data))
                    raise GoneError
                time.sleep(_NAP_S)
        except MPI.Exception:
            raise GoneError from None
        return bytes(data)

    def _is_done(self, request: MPI.Request) -> bool:
        try:
            return request.Test()
        except self._error:
            return True
