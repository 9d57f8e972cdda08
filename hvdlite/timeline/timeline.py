"""The timeline of a job: what this rank recorded goes to the file of its node, and at the end into one file."""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections.abc import Callable

from hvdlite.recorder import Recorder
from hvdlite.timeline.chrome_trace import TraceWriter
from hvdlite.timeline.trace_file import TraceError, TraceFile, node_path

_LOG = logging.getLogger("hvdlite")
# Each system call of a write gives the GIL back, which costs training 1.5 ms per write, however many events it has. So
# while more events come they gather; but programs look into the file 0.1 s after their last operation.
_LOOK_S = 0.04
_WRITE_S = 0.25
_SLICE_EVENTS = 32

Gather = Callable[[bytes], "list[bytes] | None"]
"""A collective call among node leaders: everyone's bytes on the root, in any order, and None elsewhere."""


class Timeline:
    """Writes what the recorder of one rank holds, some times a second, from a thread that exists while it records.

    A job does not fail for its timeline: what goes wrong with the file is logged, and the recording ends.
    The ranks of a node may call in any order, except that all of them return from `flush_and_close` before one calls
    `merge` or starts again.

    Args:
        is_node_leader: this rank merges the file of its node.
        clock_offset_ns: what to add to `time.monotonic_ns` of this rank for the root's.
    """

    def __init__(
        self, rank: int, node_index: int, is_node_leader: bool, recorder: Recorder, clock_offset_ns: int
    ) -> None:
        self._rank = rank
        self._node_index = node_index
        self._is_node_leader = is_node_leader
        self._recorder = recorder
        self._clock_offset_ns = clock_offset_ns
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: TraceFile | None = None

    @property
    def is_recording(self) -> bool:
        """Between `start` and `flush_and_close`, also if the file cannot be written: all ranks agree on it."""
        return self._thread is not None

    def start(self, path: str, mark_cycles: bool, origin_ns: int) -> None:
        """Record into ``path``, the ranks of other nodes into files beside it until they are merged.

        Args:
            mark_cycles: also record when each cycle of the coordinator thread began.
            origin_ns: the time of the root's clock that is shown as 0, the same on every rank. It also tells the ranks
                of a node that they write into the same recording.
        """
        assert not self.is_recording
        writer = TraceWriter(self._rank, self._node_index, self._clock_offset_ns - origin_ns)
        file = TraceFile(node_path(os.path.abspath(path), self._node_index), origin_ns)
        try:
            file.open(writer.introduction())
        except (OSError, TraceError) as error:
            self._give_up(file, error)
        else:
            self._recorder.start(mark_cycles)
        self._file = file
        self._closing.clear()
        self._thread = threading.Thread(target=self._run, args=(file, writer), name="hvdlite-timeline", daemon=True)
        self._thread.start()

    def flush_and_close(self) -> None:
        """Stop recording; everything is in the file of the node afterwards. May be called again."""
        if self._thread is None:
            return
        self._recorder.stop()
        self._closing.set()
        self._thread.join()
        self._thread = None

    def merge(self, gather: Gather | None) -> None:
        """Put the files of all nodes into the root's, once all ranks of each node have closed.

        Collective among node leaders; on other ranks it does nothing.

        Args:
            gather: None where there is one node.
        """
        assert not self.is_recording
        file, self._file = self._file, None
        if file is None or not self._is_node_leader:
            return
        events: list[bytes] = []
        if self._node_index != 0:
            try:
                events = file.events()
            except (OSError, TraceError) as error:
                _LOG.error("timeline %s of node %d is lost: %s", file.path, self._node_index, error)
        parts: list[bytes] | None = []
        if gather is not None:
            # Traces are text that repeats itself: a tenth of it has to travel.
            parts = gather(zlib.compress(b"\n".join(events), 1))
        try:
            if parts is not None:
                file.complete(line for part in parts for line in zlib.decompress(part).split(b"\n") if line)
            elif events:
                file.remove()
        except (OSError, TraceError) as error:
            _LOG.error("timeline %s is incomplete: %s", file.path, error)

    def close(self) -> None:
        """End where merging is impossible, after a failure: the files of the nodes stay. May be called again."""
        self.flush_and_close()
        self._file = None

    def _run(self, file: TraceFile, writer: TraceWriter) -> None:
        closing = False
        seen, written_s = 0, time.monotonic()
        while not closing:
            closing = self._closing.wait(_LOOK_S)
            before, seen = seen, self._recorder.held
            if seen != before and time.monotonic() - written_s < _WRITE_S and not closing:
                continue
            written_s = time.monotonic()
            seen = 0
            events, dropped = self._recorder.drain()
            lines: list[bytes] = []
            for start in range(0, len(events), _SLICE_EVENTS):
                lines += writer.lines(events[start : start + _SLICE_EVENTS])
                time.sleep(0)  # lets go of the GIL, which other threads would else get only every 5 ms
            if dropped:
                lines.append(writer.dropped(dropped, time.monotonic_ns()))
            if not lines:
                continue
            try:
                file.append(lines)
            except (OSError, TraceError) as error:
                self._give_up(file, error)
                return

    def _give_up(self, file: TraceFile, error: Exception) -> None:
        self._recorder.stop()
        _LOG.error("timeline %s of rank %d ends here: %s", file.path, self._rank, error)
