"""How a function gets to the ranks of `hvdlite.run`, and its outcomes back.

The calling process listens: on an abstract unix socket where all ranks are on its machine, else on TCP, at the
addresses of the chosen interfaces. Each rank connects, proves that it belongs to the job, gets the call, and leaves its
outcome. Every message carries an HMAC with a key of the connection, since unpickling what a stranger sent would run it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import secrets
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from hvdlite import environment, tracebacks
from hvdlite.config import CALL_ADDRESS, CALL_KEY
from hvdlite.errors import StartupError
from hvdlite.launched import launched_rank
from hvdlite.links.dial import first_that_proves_itself, listed
from hvdlite.links.proof import Secret, new_key, prove
from hvdlite.links.reception import PATIENCE_S, Reception, listen_at
from hvdlite.links.wire import connect_unix, is_ours, read_exactly

_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_CALLER, _HOST = b"caller", b"host"  # who has sent a message
_RANK = struct.Struct("<I")
_OUTCOME = struct.Struct("<?")  # whether the function returned; what it returned or raised follows
_CONNECT_S = 20.0  # with the proof
_BACKLOG = 1024
_LAST_WORDS_S = 5.0  # how long what is on its way may take after the job has ended


@dataclass(frozen=True)
class Outcome:
    """What the function came to on ``rank``.

    Attributes:
        returned: whether the function did; otherwise it raised.
        pickled: the result, or the exception and its traceback.
    """

    rank: int
    returned: bool
    pickled: bytes

    def result(self) -> Any:
        """What the function returned."""
        return pickle.loads(self.pickled)

    def failure(self) -> tuple[Exception | None, str]:
        """What the function raised, None if that cannot be sent or is no Exception, and its traceback."""
        pickled, text = pickle.loads(self.pickled)
        error = None
        with contextlib.suppress(Exception):  # many exceptions pickle, but not back
            error = pickle.loads(pickled)
        return error, text


class CallServer:
    """Hands ``call`` out and keeps the outcomes, in the order in which they come.

    Args:
        call: what `pack` has made.
        addresses: of this machine, for ranks on others; none if all ranks are here.
    """

    def __init__(self, call: bytes, addresses: Sequence[str]) -> None:
        self._call = call
        key = new_key()
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._outcomes: list[Outcome] = []
        if addresses:
            listeners = listen_at(addresses, _BACKLOG)
            places = [one.getsockname()[:2] for one in listeners]
            where = ",".join(f"{port}/{address}" for address, port in places)
        else:
            where = f"@hvdlite-run-{secrets.token_hex(8)}"
            listeners = [socket.socket(socket.AF_UNIX)]
            listeners[0].bind("\0" + where[1:])
            listeners[0].listen(_BACKLOG)
        self.environment = {CALL_KEY: key.hex(), CALL_ADDRESS: where}
        """Variables by which the ranks find this server."""
        self.failed = threading.Event()
        """Set once a rank has come for the call and did not bring a result; and by close()."""
        self._conversations: list[threading.Thread] = []
        self._reception = Reception(listeners, _secret(key), self._admit)

    def seen(self) -> set[int]:
        """The ranks that have come for the call."""
        with self._lock:
            return set(self._seen)

    def close(self) -> list[Outcome]:
        """To be called once the job has ended: the outcomes."""
        self.failed.set()
        self._reception.close()
        for conversation in self._conversations:
            conversation.join(_LAST_WORDS_S)
        with self._lock:
            return list(self._outcomes)

    def _admit(self, link: socket.socket, claim: bytes, session: bytes) -> bool:
        (rank,) = _RANK.unpack(claim)
        with self._lock:
            self._seen.add(rank)
        conversation = threading.Thread(
            target=self._converse, args=(link, rank, _Messages(link, session, _HOST)), daemon=True
        )
        conversation.start()
        self._conversations.append(conversation)
        return True

    def _converse(self, link: socket.socket, rank: int, messages: _Messages) -> None:
        returned = False
        with link, contextlib.suppress(OSError):  # a rank that dies leaves no outcome
            messages.send(self._call)
            body = messages.receive()
            if len(body) < _OUTCOME.size:
                raise ConnectionError("no outcome")
            (returned,) = _OUTCOME.unpack_from(body)
            with self._lock:
                self._outcomes.append(Outcome(rank, returned, body[_OUTCOME.size :]))
        if not returned:
            self.failed.set()


class _Messages:
    """Whole messages over ``link``, each with its number and direction in an HMAC: none can be sent again.

    A length has an HMAC of its own, so that no memory is taken for one that a stranger has made up.

    Args:
        session: the key of this connection.
        end: which one this is.
    """

    def __init__(self, link: socket.socket, session: bytes, end: bytes) -> None:
        self._link = link
        self._session = session
        self._own, self._other = (_HOST, _CALLER) if end == _HOST else (_CALLER, _HOST)
        self._sent = self._received = 0

    def send(self, body: bytes) -> None:
        length = _LENGTH.pack(len(body))
        self._link.sendall(length + self._digest(self._own, self._sent, b"length", length))
        self._link.sendall(body)
        self._link.sendall(self._digest(self._own, self._sent, b"body", body))
        self._sent += 1

    def receive(self) -> bytes:
        """The next message.

        Raises:
            OSError: the connection is lost, or what came is no message of its other end.
        """
        length = self._checked(b"length", _LENGTH.size)
        body = self._checked(b"body", *_LENGTH.unpack(length))
        self._received += 1
        return body

    def _checked(self, kind: bytes, nbytes: int) -> bytes:
        data = read_exactly(self._link, nbytes)
        shown = read_exactly(self._link, _DIGEST_BYTES)
        if not hmac.compare_digest(shown, self._digest(self._other, self._received, kind, data)):
            raise ConnectionError("not a message of this job")
        return data

    def _digest(self, sender: bytes, number: int, kind: bytes, data: bytes) -> bytes:
        digest = hmac.new(self._session, b"%s %d %s " % (sender, number, kind), "sha256")
        digest.update(data)
        return digest.digest()


def _secret(key: bytes) -> Secret:
    return Secret(key, b"call", _RANK.size)


def pack(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], variables: Mapping[str, str]
) -> bytes:
    """The call as bytes, along with this process's search path, so that the ranks find the modules it names."""
    import cloudpickle

    call = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    return pickle.dumps(([os.path.abspath(entry) for entry in sys.path], dict(variables), call))


def main() -> None:
    """What a rank of `hvdlite.run` does."""
    import cloudpickle

    rank = launched_rank()
    key = bytes.fromhex(environment.take(CALL_KEY))
    link, messages = _connect(environment.take(CALL_ADDRESS), key, rank)
    with link:
        path, variables, call = pickle.loads(messages.receive())
        sys.path[:] = path
        environment.add(variables)  # not every launcher carries every variable to other hosts
        told: list[BaseException] = []
        sys.excepthook = partial(_show_unless, told)
        try:
            function, args, kwargs = pickle.loads(call)
            result = function(*args, **kwargs)
            try:
                body = cloudpickle.dumps(result)
            except Exception as error:
                kind = type(result).__name__
                raise TypeError(f"hvdlite.run: the result, a {kind}, cannot be pickled: {error}") from error
        except BaseException as error:
            # At once: all that the other ranks are going to say is that this one has failed.
            messages.send(_OUTCOME.pack(False) + _pack_failure(error))
            told.append(error)
            raise
        messages.send(_OUTCOME.pack(True) + body)


def _show_unless(
    told: Sequence[BaseException], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The hook of uncaught exceptions of a rank: the caller raises, or shows, what it was told."""
    if error not in told or tracebacks.are_full():
        sys.__excepthook__(kind, error, trace)


def _pack_failure(error: BaseException) -> bytes:
    import cloudpickle

    trace = error.__traceback__.tb_next if error.__traceback__ else None  # without main()
    text = "".join(traceback.format_exception(type(error), error, trace))
    pickled = b""
    if isinstance(error, Exception):  # KeyboardInterrupt and SystemExit must not end the caller
        with contextlib.suppress(Exception):
            pickled = cloudpickle.dumps(error)
    return pickle.dumps((pickled, text))


def _connect(where: str, key: bytes, rank: int) -> tuple[socket.socket, _Messages]:
    """A connection to the calling process, at whichever of its addresses it proves itself first."""
    claim = _RANK.pack(rank)
    if where.startswith("@"):
        link = connect_unix(where[1:], PATIENCE_S)
        try:
            if not is_ours(link):
                raise StartupError("hvdlite.run: another user listens where the calling process should")
            session = prove(_secret(key), link, claim)
        except BaseException:
            link.close()
            raise
    else:
        places = [place.partition("/") for place in where.split(",")]
        addresses = [(address, int(port)) for port, _, address in places]
        first = first_that_proves_itself(addresses, _secret(key), claim, time.monotonic() + _CONNECT_S)
        if first is None:
            raise StartupError(
                f"hvdlite.run: the calling process cannot be reached from {socket.gethostname()} at "
                f"{listed(addresses)}; HVDLITE_NETWORK_INTERFACES chooses among its addresses"
            )
        link, session = first
    link.settimeout(None)
    return link, _Messages(link, session, _CALLER)
