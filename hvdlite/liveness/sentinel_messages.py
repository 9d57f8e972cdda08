"""What sentinels tell one another, as bytes: frames of a length and JSON. An empty frame is a heartbeat."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from hvdlite.processes import ProcessAddress

HEARTBEAT = b""
MAX_TEXT = 20_000  # a traceback; the head and the tail of a longer one tell the story
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 6 * MAX_TEXT + 1000  # of a message: JSON writes a control character as \u0000


class Goodbye(NamedTuple):
    """``rank`` has ended in order."""

    rank: int


class Finished(NamedTuple):
    """``rank`` has done its work, as all have, and ends MPI, from which it may not come back."""

    rank: int


class Failed(NamedTuple):
    """``rank`` has failed, for the reason ``text``.

    Attributes:
        for_lack: it ends since another rank has shut hvdlite down, whose end is to be seen first.
        leaver: the process of that one; None where it goes on.
    """

    rank: int
    text: str
    for_lack: bool = False
    leaver: ProcessAddress | None = None


class DamagedError(ValueError):
    """A stream that makes no sense from here on."""


class Inbox:
    """Bytes of one neighbour, as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete now, heartbeats too.

        Raises:
            DamagedError: a length that no message has.
        """
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > _MAX_BYTES:
                raise DamagedError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield body


def read(body: bytes) -> Goodbye | Finished | Failed | None:
    """The message of a body that is no heartbeat; None where it is none."""
    try:
        message = json.loads(body)
        if not isinstance(message, dict):
            return None
        if "goodbye" in message:
            return Goodbye(int(message["goodbye"]))
        if "finished" in message:
            return Finished(int(message["finished"]))
        return Failed(
            int(message["failed"]), str(message["text"]), "leaver" in message, _process(message.get("leaver"))
        )
    # Infinity is no int, and 100,000 brackets are too deep for the parser.
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _process(told: Any) -> ProcessAddress | None:
    """Raises ValueError or TypeError where it is none."""
    if told is None:
        return None
    machine, namespace, pid = told
    return ProcessAddress(str(machine), int(namespace), int(pid))


def written(message: Goodbye | Finished | Failed) -> bytes:
    """The frame of ``message``."""
    if isinstance(message, Goodbye):
        told: dict[str, object] = {"goodbye": message.rank}
    elif isinstance(message, Finished):
        told = {"finished": message.rank}
    else:
        told = {"failed": message.rank, "text": message.text}
        if message.for_lack:
            told["leaver"] = message.leaver
    return frame(json.dumps(told, ensure_ascii=False).encode(errors="replace"))  # a leaver as a neighbour told it


def tellable(text: str) -> str:
    """``text`` as a message may have it: names of files that are no UTF-8 with escapes, of a long one head and tail."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n[...]\n{text[-MAX_TEXT // 2 :]}"


def frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body
