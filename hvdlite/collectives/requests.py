"""Messages of raw memory between ranks, and waits for them that leave the core to backward.

An MPI library spins in its blocking waits, and Open MPI moves data only inside MPI calls. So requests are tested here:
again and again at first, as long as nobody else needs the core, then with naps in between. These grow while nothing
happens: they are short while data moves, since every nap is time in which nothing is moved, and longer once a peer is
plainly not there yet.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from types import TracebackType
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from hvdlite.collectives import mpi_functions
from hvdlite.collectives.mpi_functions import MpiFunctions
from hvdlite.collectives.polite import polite_look
from hvdlite.counters import Traffic
from hvdlite.errors import CollectiveError
from hvdlite.links import connections
from hvdlite.naps import FIRST_NAP_S, nap_until, wait_for_verdict

VERDICT_S = 1.0  # how long others get to say what has failed, after something did here


class Channel(IntEnum):
    """What messages are about, as MPI's tag: those of different channels do not meet, whatever became of the others."""

    HOST = 0
    TRIAL = 1
    DEVICE = 2


class Endpoint:
    """This rank's end of a channel of ``comm``, which belongs to one thread.

    Args:
        ranks: what errors call the ranks of ``comm``.
        timeout_s: the longest wait for one message.
        check: raises once the job has failed.
        functions: of MPI, for native code; None: Python calls MPI.

    Attributes:
        polite_look: for messages, from Python and from native code.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        ranks: Sequence[int],
        timeout_s: float,
        check: Callable[[], None],
        channel: Channel = Channel.HOST,
        functions: MpiFunctions | None = None,
    ) -> None:
        assert len(ranks) == comm.size, (ranks, comm.size)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank = comm.rank
        self.size = comm.size
        self.traffic = Traffic()
        self.functions = functions
        self.polite_look = polite_look()
        self._name = self._label = ""
        self._comm = comm
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._check = check
        self._channel = channel
        self._receives: list[MPI.Request] = []
        self._sends: list[MPI.Request] = []
        self._lost: list[object] = []

    def beside(self, channel: Channel, timeout_s: float | None = None) -> Endpoint:
        """Another end between the same ranks; what it counts, and what its failures leave behind, is this one's.

        Args:
            timeout_s: that of this one, if None.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        other = Endpoint(self._comm, ranks=self._ranks, timeout_s=limit_s, check=self._check, channel=channel)
        other.traffic = self.traffic
        other._lost = self._lost
        return other

    def operation(self, name: str, label: str, *memory: object) -> AbstractContextManager[None]:
        """The ``with`` block sends and receives, and waits for all of it; errors call it by ``name`` and ``label``.

        Where it fails, ``memory`` is kept alive, in case that a message still arrives.

        Raises:
            CollectiveError: MPI failed. The reason that ``check`` gives has precedence.
        """
        self.begin(name, label)
        return _Operation(self, memory)

    def begin(self, name: str, label: str) -> None:
        """An operation begins, which `fail` ends if it fails."""
        self._name, self._label = name, label

    @property
    def _activity(self) -> str:
        return f"{self._name} '{self._label}'" if self._label else self._name

    def send(self, address: int, nbytes: int, to: int) -> MPI.Request:
        """Start sending; the memory stays as it is until the request is done. Messages to a rank arrive in order."""
        request = self._comm.Isend([MPI.memory.fromaddress(address, nbytes), nbytes, MPI.BYTE], to, self._channel)
        self.traffic.sent(nbytes)
        _remember(self._sends, request)
        return request

    def receive(self, address: int, nbytes: int, source: int) -> MPI.Request:
        """Start receiving the next message from ``source``, which has ``nbytes`` bytes."""
        request = self._comm.Irecv([MPI.memory.fromaddress(address, nbytes), nbytes, MPI.BYTE], source, self._channel)
        self.traffic.received(nbytes)
        _remember(self._receives, request)
        return request

    def bind_send(self, address: int, nbytes: int, to: int) -> MPI.Prequest:
        """A message like that of `send`, to be started again and again."""
        return self._comm.Send_init([MPI.memory.fromaddress(address, nbytes), nbytes, MPI.BYTE], to, self._channel)

    def bind_receive(self, address: int, nbytes: int, source: int) -> MPI.Prequest:
        """A message like that of `receive`, to be started again and again."""
        return self._comm.Recv_init([MPI.memory.fromaddress(address, nbytes), nbytes, MPI.BYTE], source, self._channel)

    @staticmethod
    def address_of(request: MPI.Request) -> int:
        """Of MPI's own request, for native code; ``request`` has to live as long."""
        return mpi_functions.address_of(request)

    def wait(self, peer: int, *requests: MPI.Request) -> None:
        """Return once all ``requests``, messages from or to ``peer``, are done. Raises like `until`."""
        for request in requests:
            self.until(request.Test, peer)

    def until(self, done: Callable[[], bool], peer: int, nap_s: float = 0.0) -> None:
        """Return once ``done()``, which tests requests, is true; it waits for ``peer``.

        Args:
            nap_s: between two looks while data moves, where it is known how fast; 0: look again and again at first.

        Raises:
            CollectiveError: ``peer`` did not come in time; or what ``check`` raises.
        """
        start = time.monotonic()
        if done() if nap_s else self.polite_look.until(done):
            return
        late = f"rank {self._ranks[peer]} did not send to rank {self._ranks[self.rank]}, or receive from it,"
        try:
            self._nap_until(done, late, start, nap_s or FIRST_NAP_S)
        except CollectiveError:
            self._check()
            if stuck := connections.complaints(connections.of_processes([os.getpid()])):
                raise CollectiveError(
                    f"{self._activity} was not through within {self._timeout_s:g} s; rank {self._ranks[self.rank]} on "
                    f"{socket.gethostname()} finds: {'; '.join(stuck)}"
                ) from None
            wait_for_verdict(self._check, VERDICT_S)  # of who finds that: this rank may wait for one that waits
            raise

    def doze(self, done: Callable[[], bool], late: str) -> None:
        """Return once ``done()`` is true, of something that takes no message and no time of this core.

        Raises:
            CollectiveError: ``late``, in time; or what ``check`` raises.
        """
        self._nap_until(done, late, time.monotonic(), FIRST_NAP_S)

    def _nap_until(self, done: Callable[[], bool], late: str, start: float, nap: float) -> None:
        nap_until(
            done,
            f"{self._activity}: {late}",
            timeout_s=self._timeout_s,
            check=self._check,
            since_s=start,
            nap_s=nap,
        )

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's ``data``, of at least a byte, by rank, on rank 0; None on others. Raises like `until`."""
        with self.operation("gather", ""):
            if self.rank != 0:
                for part in (struct.pack("<Q", len(data)), data):
                    own = np.frombuffer(part, np.uint8)
                    self.wait(0, self.send(own.ctypes.data, len(part), 0))
                return None
            parts = [data]
            for rank in range(1, self.size):
                length = np.zeros(1, np.uint64)
                self.wait(rank, self.receive(length.ctypes.data, length.nbytes, rank))
                arrived = np.zeros(int(length[0]), np.uint8)
                self.wait(rank, self.receive(arrived.ctypes.data, arrived.nbytes, rank))
                parts.append(arrived.tobytes())
            return parts

    def done(self) -> None:
        """An operation is over."""
        self._receives.clear()
        self._sends.clear()

    def fail(self, error: BaseException, receives: Iterable[MPI.Request] = (), *memory: object) -> NoReturn:
        """An operation has failed: await nothing any more, keep ``memory``, raise ``error`` or what is behind it."""
        receives = [*self._receives, *receives]
        for request in receives:
            try:
                if request and not request.Get_status():
                    request.Cancel()
            except MPI.Exception:
                pass  # it failed already, which is as good
        self._lost += [receives, self._sends, *memory]
        self._receives, self._sends = [], []
        if isinstance(error, MPI.Exception):
            raise self._mpi_failure(error) from error
        raise error

    def _mpi_failure(self, error: MPI.Exception) -> CollectiveError:
        """The error to raise after MPI failed: the job's own reason where it is known in time."""
        wait_for_verdict(self._check, VERDICT_S)
        return CollectiveError(f"{self._activity}: MPI failed: {error}")


class _Operation:
    __slots__ = ("_endpoint", "_memory")

    def __init__(self, endpoint: Endpoint, memory: tuple[object, ...]) -> None:
        self._endpoint = endpoint
        self._memory = memory

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._endpoint.fail(error, (), *self._memory)
        self._endpoint.done()


def _remember(requests: list[MPI.Request], request: MPI.Request) -> None:
    if len(requests) > 64:
        requests[:] = [r for r in requests if r]  # a request that is done has become MPI's null request
    requests.append(request)
