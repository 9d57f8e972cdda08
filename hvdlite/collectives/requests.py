"""Messages of raw memory between ranks, and waits for them that leave the core to backward.

An MPI library spins in its blocking waits, and Open MPI moves data only inside MPI calls. So requests are
tested here, with naps in between that grow while nothing happens: short while data moves, since every nap is
time in which nothing is moved, and longer once a peer is plainly not there yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mpi4py import MPI

from hvdlite.counters import Traffic
from hvdlite.errors import CollectiveError

_SPIN_S = 20e-6  # a reply inside a node, or over a fast network, comes within this
_FIRST_NAP_S = 20e-6
_MOVING_S = 0.05  # a wait that lasts longer is for a peer that is late, not for the wire
_IDLE_NAP_S = 2e-3
_CHECK_S = 10e-3  # between two looks at whether the job has failed
_VERDICT_S = 1.0  # how long the sentinel gets to say which rank died after MPI said that something did


class Endpoint:
    """This rank's end of ``comm``, which belongs to one thread.

    Args:
        ranks: what errors call the ranks of ``comm``.
        timeout_s: the longest wait for one message.
        check: raises once the job has failed.
        nap_us: the longest nap while data moves.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        ranks: Sequence[int],
        timeout_s: float,
        check: Callable[[], None],
        nap_us: int = 200,
    ) -> None:
        assert len(ranks) == comm.size, (ranks, comm.size)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank = comm.rank
        self.size = comm.size
        self.traffic = Traffic()
        self._activity = ""
        self._comm = comm
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._check = check
        self._nap_s = nap_us * 1e-6
        self._receives: list[MPI.Request] = []
        self._sends: list[MPI.Request] = []
        self._lost: list[object] = []

    @contextmanager
    def operation(self, activity: str, *memory: object) -> Iterator[None]:
        """The block sends and receives, and waits for all of it; ``activity`` is what errors call it.

        Where it fails, ``memory`` is kept alive, in case that a message still arrives.

        Raises:
            CollectiveError: MPI failed. The reason that ``check`` gives has precedence.
        """
        self._activity = activity
        try:
            yield
        except MPI.Exception as error:
            self._abandon(memory)
            raise self._mpi_failure(error) from error
        except BaseException:
            self._abandon(memory)
            raise
        self._receives.clear()
        self._sends.clear()

    def send(self, address: int, nbytes: int, to: int) -> MPI.Request:
        """Start sending; the memory stays as it is until the request is done. Messages to a rank arrive in order."""
        request = self._comm.Isend([MPI.memory.fromaddress(address, nbytes), nbytes, MPI.BYTE], to)
        self.traffic.sent(nbytes)
        _remember(self._sends, request)
        return request

    def receive(self, address: int, nbytes: int, source: int) -> MPI.Request:
        """Start receiving the next message from ``source``, which has ``nbytes`` bytes."""
        request = self._comm.Irecv([MPI.memory.fromaddress(address, nbytes), nbytes, MPI.BYTE], source)
        self.traffic.received(nbytes)
        _remember(self._receives, request)
        return request

    def wait(self, peer: int, *requests: MPI.Request) -> None:
        """Return once all ``requests``, messages from or to ``peer``, are done. Raises like `until`."""
        for request in requests:
            self.until(request.Test, peer)

    def until(self, done: Callable[[], bool], peer: int) -> None:
        """Return once ``done()``, which tests requests, is true; it waits for ``peer``.

        Raises:
            CollectiveError: ``peer`` did not come in time; or what ``check`` raises.
        """
        if done():
            return
        start = now = time.monotonic()
        next_check = start + _CHECK_S
        nap = _FIRST_NAP_S
        while not done():
            now = time.monotonic()
            if now - start < _SPIN_S:
                os.sched_yield()
                continue
            if now >= next_check:
                self._check()
                next_check = now + _CHECK_S
            if now - start > self._timeout_s:
                raise CollectiveError(
                    f"{self._activity}: rank {self._ranks[peer]} did not send or take its part within "
                    f"{self._timeout_s:g} s; if it is only slow, raise HVDLITE_COLLECTIVE_TIMEOUT_SECONDS"
                )
            time.sleep(nap)
            nap = min(2 * nap, self._nap_s if now - start < _MOVING_S else _IDLE_NAP_S)

    def _mpi_failure(self, error: MPI.Exception) -> CollectiveError:
        """The error to raise after MPI failed: the job's own reason where it is known in time."""
        deadline = time.monotonic() + _VERDICT_S
        while time.monotonic() < deadline:
            self._check()
            time.sleep(_CHECK_S)
        return CollectiveError(f"{self._activity}: MPI failed: {error}")

    def _abandon(self, memory: tuple[object, ...]) -> None:
        for request in self._receives:
            try:
                if request:
                    request.Cancel()
            except MPI.Exception:
                pass  # it failed already, which is as good
        self._lost += [self._receives, self._sends, *memory]
        self._receives, self._sends = [], []


def _remember(requests: list[MPI.Request], request: MPI.Request) -> None:
    if len(requests) > 64:
        requests[:] = [r for r in requests if r]  # a request that is done has become MPI's null request
    requests.append(request)
