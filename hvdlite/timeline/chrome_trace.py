"""Events as lines of a Chrome trace, which Perfetto opens: a process per rank, a row per lane."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable

from hvdlite.recorder import INSTANT, Event, Lane

_NAME_CHARACTERS = 150  # up to 12 bytes each, in ASCII
# Unnamed operations are numbered, so names never end; what is escaped once is worth keeping only for a while.
_NAMES_KEPT = 4096
_ROWS_PER_LANE = 10_000
_SPANS_REMEMBERED = 256

_DETAIL = {Lane.PARAMETER: "bucket", Lane.OPTIMIZER: "process set"}
_LANE_NUMBER = {lane: number for number, lane in enumerate(Lane, start=1)}


class _Row:
    """A row as viewers draw it: its spans must follow or enclose one another, never overlap in part."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._outermost: deque[tuple[int, int]] = deque(maxlen=_SPANS_REMEMBERED)

    def take(self, start_ns: int, end_ns: int) -> bool:
        """Add a span, if it has its place here. Spans come in the order of their ends, as they are recorded."""
        enclosed = 0
        for first_ns, last_ns in reversed(self._outermost):
            if last_ns <= start_ns:
                break
            if not (start_ns <= first_ns and last_ns <= end_ns):
                return False
            enclosed += 1
        for _ in range(enclosed):
            self._outermost.pop()
        self._outermost.append((start_ns, end_ns))
        return True


class TraceWriter:
    """Turns the events of one rank into lines, each a JSON object below 4 KiB in ASCII.

    Many tensors are negotiated at the same time, and several threads may wait or communicate: spans of a lane that
    overlap in part go to further rows of that lane, as many as are needed.

    Args:
        offset_ns: what to add to `time.monotonic_ns` of this rank for the time in the trace.
    """

    def __init__(self, rank: int, node_index: int, offset_ns: int) -> None:
        self._rank = rank
        self._node_index = node_index
        self._offset_ns = offset_ns
        self._rows: dict[Lane, list[_Row]] = {}
        self._names: dict[str, str] = {}
        self._parameters: dict[str, int] = {}

    def introduction(self) -> list[bytes]:
        """The first events: the name of the rank, which time of day is 0 here, and its place on the screen."""
        start_us = (time.time_ns() - time.monotonic_ns() - self._offset_ns) // 1000
        name = f"rank {self._rank} (node {self._node_index})"
        return [
            self._metadata("process_name", 0, name=name, start_time_since_epoch_in_micros=start_us),
            self._metadata("process_sort_index", 0, sort_index=self._rank),
        ]

    def lines(self, events: Iterable[Event]) -> list[bytes]:
        """Events in the order in which they were recorded; rows that are new are named first."""
        lines: list[bytes] = []
        for _, lane, name, start_ns, end_ns, nbytes, dtype in events:
            # What began before the recording, or by a clock that is slightly off, begins with it.
            start = max(start_ns + self._offset_ns, 0)
            end = start if end_ns == INSTANT else max(end_ns + self._offset_ns, start)
            thread = (
                self._parameter_thread(name, lines) if lane is Lane.PARAMETER else self._thread(lane, start, end, lines)
            )
            head = f'"cat":"{lane.value}","name":{self._quoted(name)},"pid":{self._rank},"tid":{thread}'
            if end_ns == INSTANT:
                lines.append(f'{{"ph":"i","s":"t",{head},"ts":{_us(start)}}}'.encode("ascii"))
                continue
            args = f'"bytes":{nbytes}' if nbytes else ""
            if dtype:
                args += f'{"," if args else ""}"{_DETAIL.get(lane, "dtype")}":{self._quoted(dtype)}'
            lines.append(
                f'{{"ph":"X",{head},"ts":{_us(start)},"dur":{_us(end - start)},"args":{{{args}}}}}'.encode("ascii")
            )
        return lines

    def dropped(self, count: int, now_ns: int) -> bytes:
        """Say that ``count`` events are missing here."""
        return _line(
            {
                "ph": "i",
                "s": "p",
                "cat": "dropped",
                "name": f"{count} events dropped",
                "pid": self._rank,
                "tid": 0,
                "ts": max(now_ns + self._offset_ns, 0) / 1000,
                "args": {"dropped": count},
            }
        )

    def _thread(self, lane: Lane, start_ns: int, end_ns: int, lines: list[bytes]) -> int:
        rows = self._rows.setdefault(lane, [])
        for row in rows:
            if row.take(start_ns, end_ns):
                return row.thread
        row = _Row(_LANE_NUMBER[lane] * _ROWS_PER_LANE + len(rows))
        row.take(start_ns, end_ns)
        rows.append(row)
        name = lane.value if len(rows) == 1 else f"{lane.value} {len(rows)}"
        lines.append(self._metadata("thread_name", row.thread, name=name))
        lines.append(self._metadata("thread_sort_index", row.thread, sort_index=row.thread))
        return row.thread

    def _parameter_thread(self, name: str, lines: list[bytes]) -> int:
        """A row for each parameter, whatever overlaps."""
        thread = self._parameters.get(name)
        if thread is None:
            thread = self._parameters[name] = _LANE_NUMBER[Lane.PARAMETER] * _ROWS_PER_LANE + len(self._parameters)
            lines.append(self._metadata("thread_name", thread, name=name[:_NAME_CHARACTERS]))
            lines.append(self._metadata("thread_sort_index", thread, sort_index=thread))
        return thread

    def _metadata(self, kind: str, thread: int, **args: str | int) -> bytes:
        return _line({"ph": "M", "name": kind, "pid": self._rank, "tid": thread, "args": args})

    def _quoted(self, name: str) -> str:
        quoted = self._names.get(name)
        if quoted is None:
            if len(self._names) >= _NAMES_KEPT:
                self._names.clear()
            quoted = self._names[name] = json.dumps(name[:_NAME_CHARACTERS])
        return quoted


def _us(time_ns: int) -> str:
    """Microseconds, the unit of the format, with all nanoseconds kept."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _line(event: dict[str, object]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode("ascii")
