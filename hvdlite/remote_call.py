"""How a function gets to the ranks of `hvdlite.run`, and its outcomes back.

The calling process listens: on an abstract unix socket where all ranks are on its machine, else on TCP. Each rank
connects, says who it is, gets the call, and leaves its outcome. Every message carries an HMAC with a key that only this
job's processes know, since unpickling what a stranger sent would run it.
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
from hvdlite.wire import read_exactly

_HEADER = struct.Struct("<Q32s")  # length of the body, its HMAC
_RANK = struct.Struct("<I")
_OUTCOME = struct.Struct("<I?")  # rank, whether the function returned; what it returned or raised follows
_CONNECT_S = 10.0
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
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._outcomes: list[Outcome] = []
        if addresses:
            self._listener = socket.create_server(("", 0), backlog=1024)
            where = f"{self._listener.getsockname()[1]},{','.join(addresses)}"
        else:
            where = f"@hvdlite-run-{secrets.token_hex(8)}"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind("\0" + where[1:])
            self._listener.listen(1024)
        self.environment = {CALL_KEY: self._key.hex(), CALL_ADDRESS: where}
        """Variables by which the ranks find this server."""
        self.failed = threading.Event()
        """Set once a rank has come for the call and did not bring a result; and by close()."""
        self._conversations: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, name="hvdlite-run", daemon=True)
        self._thread.start()

    def seen(self) -> set[int]:
        """The ranks that have come for the call."""
        with self._lock:
            return set(self._seen)

    def close(self) -> list[Outcome]:
        """To be called once the job has ended: the outcomes."""
        self.failed.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close() would not
        self._thread.join()
        self._listener.close()
        for conversation in self._conversations:
            conversation.join(_LAST_WORDS_S)
        with self._lock:
            return list(self._outcomes)

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            # A thread each: a stranger that connects and says nothing holds nobody up.
            conversation = threading.Thread(target=self._converse, args=(link,), daemon=True)
            conversation.start()
            self._conversations.append(conversation)

    def _converse(self, link: socket.socket) -> None:
        with link:
            try:
                (rank,) = _RANK.unpack(_receive(link, self._key, limit=_RANK.size))
            except OSError:  # a stranger
                return
            with self._lock:
                self._seen.add(rank)
            returned = False
            with contextlib.suppress(OSError):  # a rank that dies leaves no outcome
                _send(link, self._key, self._call)
                body = _receive(link, self._key)
                _, returned = _OUTCOME.unpack_from(body)
                with self._lock:
                    self._outcomes.append(Outcome(rank, returned, body[_OUTCOME.size :]))
            if not returned:
                self.failed.set()


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
    with _connect(environment.take(CALL_ADDRESS)) as link:
        _send(link, key, _RANK.pack(rank))
        path, variables, call = pickle.loads(_receive(link, key))
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
            _send(link, key, _OUTCOME.pack(rank, False) + _pack_failure(error))
            told.append(error)
            raise
        _send(link, key, _OUTCOME.pack(rank, True) + body)


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


def _connect(where: str) -> socket.socket:
    if where.startswith("@"):
        link = socket.socket(socket.AF_UNIX)
        link.connect("\0" + where[1:])
        return link
    port, *addresses = where.split(",")
    for address in addresses:
        with contextlib.suppress(OSError):
            link = socket.create_connection((address, int(port)), timeout=_CONNECT_S)
            link.settimeout(None)
            return link
    raise StartupError(
        f"hvdlite.run: the calling process cannot be reached from {socket.gethostname()} at {', '.join(addresses)}, "
        f"port {port}; HVDLITE_NETWORK_INTERFACES chooses among its addresses"
    )


def _send(link: socket.socket, key: bytes, body: bytes) -> None:
    link.sendall(_HEADER.pack(len(body), hmac.digest(key, body, "sha256")))
    link.sendall(body)


def _receive(link: socket.socket, key: bytes, limit: int | None = None) -> bytes:
    length, digest = _HEADER.unpack(read_exactly(link, _HEADER.size))
    if limit is not None and length > limit:
        raise ConnectionError("not a message of this job")
    body = read_exactly(link, length)
    if not hmac.compare_digest(digest, hmac.digest(key, body, "sha256")):
        raise ConnectionError("not a message of this job")
    return body
