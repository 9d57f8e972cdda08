"""The trace file of one node: all its ranks append to it, and it is valid JSON at any moment.

The file is longer than its content: between the last event and the closing brackets there are blanks, and events
replace blanks. The kernel heeds a SIGKILL only between two pages, so a write that stays within a page happens or does
not, and each write is complete in itself: a comma and some events. So a rank that is killed leaves no half of an event.
When the blanks are used up, a longer copy takes the file's place; a rank that is killed while it copies leaves
``<path>.tmp`` behind. (Overwriting the brackets and ending with new ones needs no copies, but such a write crosses
pages: of 310 processes that were killed while they wrote without pause, 8 left half an event.)

Whoever reads in the very moment of a write may see part of it: ext4 keeps neither away from the other (reads of one
page beside writes of it without pause: 57,373 of 3,700,471 were mixed, by lines of the cache). So `read_trace` takes
the lock that writers take; a program that does not finds the file whole when it reads again.

Its name is known beforehand, and its directory may be one where others write, as /tmp is; so neither the file nor its
copy is opened where a symbolic link has taken its place.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

_PAGE_BYTES = 4096  # every machine's pages are this long or a multiple of it
_SEPARATOR = b",\n"
_BLANK = b" "
_TAIL = b"\n]}\n"
_MIN_ROOM_BYTES = 64 << 10
_LOCK_TIMEOUT_S = 10.0
_LOCK_RETRY_S = 0.002
_FORMAT = "timeline 1"
_ANEW = r"(\.start\d+)?(\.generation\d+)?"  # how a stem ends; see `anew_path`


class TraceError(Exception):
    """A file is not a trace of hvdlite, or not the expected one."""


def node_path(path: str, node_index: int) -> str:
    """Where the ranks of a node write: ``trace.json`` on node 0, the root's, ``trace.node1.json`` on the next."""
    return path if node_index == 0 else f"{os.path.splitext(path)[0]}.node{node_index}.json"


def anew_path(path: str, start: int, generation: int) -> str:
    """Where the ranks of one job record, which keeps what they did before: ``trace.json`` at first.

    Args:
        start: how many times the processes have been started; ``trace.start2.json`` the second time.
        generation: how many times those of one start have begun, without others; ``trace.generation2.json``.
    """
    stem, suffix = os.path.splitext(path)
    marks = [f".{name}{number}" for name, number in (("start", start), ("generation", generation)) if number > 1]
    return f"{stem}{''.join(marks)}{suffix}"


class TraceFile:
    """A file that several processes append to; each opens it for as long as it writes, so a forked child holds nothing.

    Events are JSON objects of less than 4 KiB without a newline. Every method raises OSError where the file system
    does, and TraceError where the file was replaced by another job's; the file is valid then as well.

    Args:
        origin_ns: when the recording began, by the root's clock. It tells this recording from any other.
    """

    def __init__(self, path: str, origin_ns: int) -> None:
        self.path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        self._header = (
            f'{{"displayTimeUnit":"ms","otherData":{{"hvdlite":"{_FORMAT}","origin_ns":"{origin_ns}"}},"traceEvents":[\n'
        ).encode("ascii")
        self._end = 0  # what lies before is never written again

    def open(self, introduction: Sequence[bytes]) -> None:
        """Begin the file, or add to what another rank of the node has begun; whatever else was there is lost.

        Args:
            introduction: the first events of this rank.
        """
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with _locked(self.path, os.O_RDWR | os.O_CREAT) as descriptor:
            if not self._is_ours(descriptor):
                self._replace(descriptor, 0, self._header + _SEPARATOR.join(introduction), _MIN_ROOM_BYTES)
                return
        self.append(introduction)

    def append(self, events: Iterable[bytes]) -> None:
        """Add events."""
        with self._ours() as descriptor:
            end = self._find_end(descriptor)
            pages = list(_fill_pages(events, end))
            size = os.fstat(descriptor).st_size
            if end + sum(map(len, pages)) > size - len(_TAIL):
                self._replace(descriptor, end, b"".join(pages), max(size // 2, _MIN_ROOM_BYTES))
                return
            for page in pages:
                _write(descriptor, page, end)
                end += len(page)

    def complete(self, events: Iterable[bytes] = ()) -> None:
        """Add the last events and remove the blanks."""
        with self._ours() as descriptor:
            end = self._find_end(descriptor)
            self._replace(descriptor, end, b"".join(_SEPARATOR + event for event in events), 0)

    def write(self, events: Iterable[bytes]) -> None:
        """Make a file of these events in place of any other."""
        self._replace(-1, 0, self._header + _SEPARATOR.join(events), 0)

    def events(self) -> list[bytes]:
        """All events."""
        with self._ours() as descriptor:
            content = _read(descriptor, len(self._header), self._find_end(descriptor))
        return [event.rstrip(_BLANK) for event in content.split(_SEPARATOR)]

    def remove(self) -> None:
        os.unlink(self.path)

    @contextmanager
    def _ours(self) -> Iterator[int]:
        with _locked(self.path, os.O_RDWR) as descriptor:
            if not self._is_ours(descriptor):
                if os.fstat(descriptor).st_size == 0:
                    raise TraceError(f"{self.path} is empty: no rank could begin it, as where its file system is full")
                raise TraceError(f"{self.path} was replaced, by another job perhaps")
            yield descriptor

    def _is_ours(self, descriptor: int) -> bool:
        return os.pread(descriptor, len(self._header), 0) == self._header

    def _find_end(self, descriptor: int) -> int:
        """Where the last event ends: in the last page that is not blank."""
        limit = os.fstat(descriptor).st_size - len(_TAIL)
        start = self._end // _PAGE_BYTES * _PAGE_BYTES
        while start < limit:
            used = os.pread(descriptor, min(_PAGE_BYTES, limit - start), start).rstrip(_BLANK)
            if not used:
                break
            self._end = start + len(used)
            start += _PAGE_BYTES
        return self._end

    def _replace(self, descriptor: int, end: int, addition: bytes, room_bytes: int) -> None:
        """Put a file in place that holds the first ``end`` bytes of this one, ``addition``, and room for more."""
        _check_regular(self.path)
        unfinished = f"{self.path}.tmp"
        with suppress(FileNotFoundError):
            os.unlink(unfinished)  # of a rank that was killed, or somebody else's, who shall not read along
        try:
            copy = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            error.filename = self.path  # which the user has named
            raise
        try:
            position = 0
            while position < end:
                count = os.sendfile(copy, descriptor, position, end - position)
                assert count > 0, (position, end)
                position += count
            _write(copy, addition, end)
            end += len(addition)
            for start in range(0, room_bytes, _MIN_ROOM_BYTES):  # a long recording has more room than memory is to take
                _write(copy, _BLANK * min(_MIN_ROOM_BYTES, room_bytes - start), end + start)
            _write(copy, _TAIL, end + room_bytes)
            os.replace(unfinished, self.path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(copy)


def read_trace(path: str) -> dict[str, Any]:
    """Read a trace, also while ranks write it.

    Raises:
        OSError: the file cannot be read.
        TraceError: the file is not a trace of hvdlite.
    """
    with open(path, "rb") as file:
        _wait_for_writers(file.fileno())
        content = file.read()
    try:  # which may take longer than ranks wait for the file
        trace = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not JSON, as a timeline would be: {error}") from error
    if not _is_trace(trace):
        raise TraceError(f"{path} is not a timeline of hvdlite, or of another version")
    return trace  # type: ignore[no-any-return]


def _is_trace(content: Any) -> bool:
    """Whether it is all there that every trace of hvdlite has."""
    if not isinstance(content, dict):
        return False
    about, events = content.get("otherData"), content.get("traceEvents")
    if not isinstance(about, dict) or about.get("hvdlite") != _FORMAT or not isinstance(events, list):
        return False
    origin = about.get("origin_ns")
    is_number = isinstance(origin, str) and re.fullmatch("[0-9]{1,20}", origin) is not None
    return is_number and all(isinstance(event, dict) and isinstance(event.get("pid"), int) for event in events)


def missing_parts(path: str, trace: Mapping[str, Any]) -> list[str]:
    """Files of other nodes beside ``path``: of the recording ``trace``, which was read there, and not merged yet."""
    directory, name = os.path.split(path)
    beside = glob.escape(os.path.join(directory, os.path.splitext(name)[0]))
    ranks = {event["pid"] for event in trace["traceEvents"]}
    found = []
    for part in sorted(glob.glob(f"{beside}.node*.json")):
        with suppress(OSError, TraceError):
            other = read_trace(part)
            is_same = other["otherData"] == trace["otherData"]
            if is_same and ranks.isdisjoint(event["pid"] for event in other["traceEvents"]):
                found.append(part)
    return found


def later_recordings(path: str, began_s: float) -> list[str]:
    """Files as `anew_path` names them beside ``path``, which the same job has written since ``began_s``, a time of day.

    What an earlier job has left there is older. Those of other nodes are not among them.
    """
    stem, suffix = os.path.splitext(path)
    first = re.sub(f"{_ANEW}$", "", stem)
    name = re.compile(re.escape(first) + _ANEW + re.escape(suffix))
    beside = glob.glob(f"{glob.escape(first)}.*{glob.escape(suffix)}")
    return sorted(
        other for other in beside if other != path and name.fullmatch(other) and os.path.getmtime(other) > began_s
    )


def merge_traces(out: str, parts: Sequence[str]) -> int:
    """Write the traces of the nodes of one job as one; ``out`` may be one of them. The number of events.

    Raises:
        OSError: a file cannot be read or written.
        TraceError: a file is no trace, or two are not of one job or hold the same rank.
    """
    origins: dict[str, str] = {}
    ranks: dict[int, str] = {}
    lines: list[bytes] = []
    for path in parts:
        trace = read_trace(path)
        origins.setdefault(trace["otherData"]["origin_ns"], path)
        if len(origins) > 1:
            first, second = origins.values()
            raise TraceError(f"{first} and {second} are not of the same recording")
        for rank in {event["pid"] for event in trace["traceEvents"]}:
            if rank in ranks:
                raise TraceError(f"rank {rank} is in both {ranks[rank]} and {path}")
            ranks[rank] = path
        lines += [json.dumps(event, separators=(",", ":")).encode("ascii") for event in trace["traceEvents"]]
    TraceFile(out, int(next(iter(origins)))).write(lines)
    return len(lines)


def _fill_pages(events: Iterable[bytes], end: int) -> Iterator[bytes]:
    """Events behind ``end``, each with a separator in front: one block per page, with blanks up to the next."""
    block = bytearray()
    room = _PAGE_BYTES - end % _PAGE_BYTES
    for event in events:
        length = len(_SEPARATOR) + len(event)
        assert length <= _PAGE_BYTES, event
        if length > room:
            yield bytes(block) + _BLANK * room
            block.clear()
            room = _PAGE_BYTES
        block += _SEPARATOR
        block += event
        room -= length
    if block:
        yield bytes(block)


def _write(descriptor: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:  # one write takes 2 GiB at most
        written = os.pwrite(descriptor, view, position)
        view = view[written:]
        position += written


def _read(descriptor: int, start: int, end: int) -> bytes:
    chunks = []
    while start < end:  # one read returns 2 GiB at most
        chunk = os.pread(descriptor, end - start, start)
        assert chunk, (start, end)
        chunks.append(chunk)
        start += len(chunk)
    return b"".join(chunks)


@contextmanager
def _locked(path: str, flags: int) -> Iterator[int]:
    """Open a file and keep every other rank away from it; a lock ends with its process.

    Raises:
        TimeoutError: another process has kept the lock; one that is stopped, say. Nobody shall wait for a timeline.
    """
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        descriptor = _open_itself(path, flags)
        try:
            _check_regular(path)
            if not _lock(descriptor, fcntl.LOCK_EX, deadline_s):
                raise TimeoutError(errno.ETIMEDOUT, f"locked by another process for {_LOCK_TIMEOUT_S:.0f} s", path)
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):  # else its copy took its place meanwhile
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _open_itself(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a symbolic link, which is not followed; name the file itself", path) from None


def _check_regular(path: str) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):  # /dev/null, say, for everybody on this machine
            raise OSError(errno.EINVAL, "not a regular file, so nothing takes its place", path)


def _wait_for_writers(descriptor: int) -> None:
    """Keep them away while the file is open; not for ever, as one that is stopped would, nor where nobody can lock."""
    with suppress(OSError):
        _lock(descriptor, fcntl.LOCK_SH, time.monotonic() + _LOCK_TIMEOUT_S)


def _lock(descriptor: int, kind: int, deadline_s: float) -> bool:
    """Whether the file is locked now; False where another process keeps it."""
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
        time.sleep(_LOCK_RETRY_S)
