"""Two processes of a job prove to one another that they know its key, which never travels: challenge and response.

The *caller* connects, and the *host* has listened; three messages of fixed sizes:

    caller  nonce, claim                who it is, and whom it wants
    host    nonce, HMAC of "host"       over both nonces, the claim, the purpose and the address that was dialled
    caller  HMAC of "caller"            over the same

Both nonces are new for each connection, so what was recorded of an earlier one proves nothing. The address is in it
since a caller may reach a stranger at one of its host's addresses: if that one passes everything on to the host, the
two ends see different addresses. Who can change packets between them is not kept out (docs/security.md).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from dataclasses import dataclass

from hvdlite.links.wire import read_exactly

KEY_BYTES = 32
_NONCE_BYTES = 16
_PROOF_BYTES = 32  # of SHA-256
_PART = struct.Struct("<I")


def new_key() -> bytes:
    """What the processes of a job are given by a way that strangers cannot read."""
    return secrets.token_bytes(KEY_BYTES)


@dataclass(frozen=True)
class Secret:
    """What both ends know.

    Attributes:
        purpose: of the connection, so that a proof for one serves no other.
        claim_bytes: how long a caller's claim is.
    """

    key: bytes
    purpose: bytes
    claim_bytes: int

    @property
    def hello_bytes(self) -> int:
        return _NONCE_BYTES + self.claim_bytes


class _End:
    """One end of a connection, once both nonces and the claim are known."""

    def __init__(self, secret: Secret, address: object, nonces: tuple[bytes, bytes], claim: bytes) -> None:
        parts = (secret.purpose, _place(address), *nonces, claim)
        self._key = secret.key
        self._said = b"".join(_PART.pack(len(part)) + part for part in parts)

    def prove(self, who: bytes) -> bytes:
        return hmac.digest(self._key, who + self._said, "sha256")

    def check(self, who: bytes, shown: bytes) -> None:
        if not hmac.compare_digest(self.prove(who), shown):
            raise ConnectionError("the other end does not know the job's key")


class Host:
    """The end that has listened; it is fed what came, and reads nothing itself.

    Attributes:
        claim: what the caller says of itself, true once `is_proven`.
        session: a key of this connection alone.
    """

    def __init__(self, secret: Secret, link: socket.socket) -> None:
        self._secret = secret
        self._link = link
        self._inbox = bytearray()
        self._end: _End | None = None
        self.claim = b""
        self.session = b""
        self.is_proven = False

    @property
    def wanted_bytes(self) -> int:
        """How much of this connection is still part of the proof."""
        size = self._secret.hello_bytes if self._end is None else _PROOF_BYTES
        return 0 if self.is_proven else size - len(self._inbox)

    def feed(self, data: bytes) -> bytes:
        """Take up to `wanted_bytes`; what to answer.

        Raises:
            ConnectionError: a stranger.
        """
        self._inbox += data
        if self.wanted_bytes > 0:
            return b""
        message = bytes(self._inbox)
        self._inbox.clear()
        if self._end is None:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            self.claim = message[_NONCE_BYTES:]
            address = self._link.getsockname()
            self._end = _End(self._secret, address, (message[:_NONCE_BYTES], nonce), self.claim)
            return nonce + self._end.prove(b"host")
        self._end.check(b"caller", message)
        self.session = self._end.prove(b"session")
        self.is_proven = True
        return b""


class Caller:
    """The end that has connected, to ``link``'s peer.

    Attributes:
        hello: to be sent first.
        session: a key of this connection alone, once `answer` has returned.
    """

    answer_bytes = _NONCE_BYTES + _PROOF_BYTES

    def __init__(self, secret: Secret, link: socket.socket, claim: bytes) -> None:
        assert len(claim) == secret.claim_bytes, (claim, secret.claim_bytes)
        self._secret = secret
        self._link = link
        self._claim = claim
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.hello = self._nonce + claim
        self.session = b""

    def answer(self, challenge: bytes) -> bytes:
        """What to send after the host's ``answer_bytes``; from then on both ends are known to one another.

        Raises:
            ConnectionError: a stranger.
        """
        nonces = (self._nonce, challenge[:_NONCE_BYTES])
        end = _End(self._secret, self._link.getpeername(), nonces, self._claim)
        end.check(b"host", challenge[_NONCE_BYTES:])
        self.session = end.prove(b"session")
        return end.prove(b"caller")


def prove(secret: Secret, link: socket.socket, claim: bytes) -> bytes:
    """The caller's part on a blocking socket; the session's key.

    Raises:
        OSError: a stranger, or none answers within the socket's time limit.
    """
    caller = Caller(secret, link, claim)
    link.sendall(caller.hello)
    link.sendall(caller.answer(read_exactly(link, caller.answer_bytes)))
    return caller.session


def _place(address: object) -> bytes:
    """An address of either end in one form: a unix socket's name, or an IP address and a port."""
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"{host.partition('%')[0]} {port}".encode()
    return address if isinstance(address, bytes) else str(address).encode()
