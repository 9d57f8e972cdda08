"""The timeline of all ranks: one rank says start or stop, and all do so at the same place of the log."""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import suppress
from typing import Any

from hvdlite.errors import ShutDownError
from hvdlite.process_worlds import ProcessWorlds
from hvdlite.timeline.clock import measure_offset
from hvdlite.timeline.timeline import Timeline
from hvdlite.world import World

_LAST_STEP_S = 2.0  # what an optimizer does once its gradients are there, at most
_LOOK_S = 0.001


def begun_timeline(world: World, worlds: ProcessWorlds) -> tuple[Timeline, int]:
    """A timeline of the ranks of ``world``, which records already if the job's settings say so; nanoseconds to add to
    this node's monotonic clock for the root's. Collective, before the coordinators of ``world`` run.
    """
    topology, config = world.topology, world.config
    if config.timeline:
        worlds.take_over()  # on all ranks before one of them begins the file anew
    path = os.path.abspath(config.timeline) if config.timeline and topology.rank == 0 else ""
    told = world.allgather((measure_offset(world.leaders, topology, config.tree_fanout), time.monotonic_ns(), path))
    offset_ns = told[topology.local_ranks[0]][0]
    timeline = Timeline(topology.rank, topology.node_index, topology.is_leader, world.recorder, offset_ns)
    if config.timeline:
        worlds.record(timeline.close)
        _, origin_ns, path = told[0]  # the same file, wherever each rank works
        timeline.start(path, config.timeline_mark_cycles, origin_ns)
    return timeline, offset_ns


class JobTimeline:
    """Collective to build, before the coordinators of ``world`` run.

    Args:
        worlds: in which this process is.
    """

    def __init__(self, world: World, worlds: ProcessWorlds) -> None:
        self._world = world
        self._worlds = worlds
        self._numbers = itertools.count()  # of switches
        self._switches: dict[int, threading.Event] = {}  # that threads of rank 0 wait for
        self._is_over = threading.Event()  # nothing will be written any more
        self._timeline, self._offset_ns = begun_timeline(world, worlds)

    def start(self, path: str | os.PathLike[str], mark_cycles: bool) -> None:
        """See `hvdlite.job_runtime.Runtime.start_timeline`."""
        whole = _absolute(path) if self._world.topology.rank == 0 else ""
        origin_ns = time.monotonic_ns() + self._offset_ns
        content = {"kind": "timeline_start", "path": whole, "mark_cycles": bool(mark_cycles), "origin_ns": origin_ns}
        self._switch(content)

    def stop(self) -> None:
        """See `hvdlite.job_runtime.Runtime.stop_timeline`."""
        try:
            self._switch({"kind": "timeline_stop"})
        except ShutDownError:  # on another rank perhaps, and a moment ago: it completes the file
            self._is_over.wait()

    def fail(self, _: BaseException) -> None:
        """The job has failed: nobody shall wait for a switch any more."""
        self._end_switches()
        self._is_over.set()

    def close(self) -> None:
        """Once the coordinator has ended."""
        self._timeline.close()
        self._worlds.stop_recording(self._timeline.close)
        self._is_over.set()

    def _switch(self, content: dict[str, Any]) -> None:
        if self._world.topology.rank != 0:
            self._world.check()
            return
        number, is_done = next(self._numbers), threading.Event()
        self._switches[number] = is_done
        try:
            self._world.coordinator.announce({**content, "switch": number})  # raises where nobody would hear it
            is_done.wait()
        finally:
            del self._switches[number]
        self._world.check()

    def _end_switches(self) -> None:
        for is_done in list(self._switches.values()):
            is_done.set()

    # On the coordinator thread.

    def take_notice(self, content: dict[str, Any]) -> None:
        kind = content["kind"]
        if kind == "timeline_start":
            if not self._timeline.is_recording:  # rank 0 may have called twice
                self._worlds.record(self._timeline.close)
                self._timeline.start(content["path"], content["mark_cycles"], content["origin_ns"])
        elif kind in ("timeline_stop", "shutdown") and self._timeline.is_recording:
            if kind == "shutdown":
                self._let_step_end()
            self._timeline.flush_and_close()
            self._world.engine.backend.barrier()  # every rank of a node has written before its leader reads
            self._timeline.merge(None if self._world.leaders is None else self._world.gather_from_leaders)
            self._worlds.stop_recording(self._timeline.close)
        if kind == "shutdown":
            self._end_switches()
            self._is_over.set()
        elif (is_done := self._switches.get(content["switch"])) is not None:
            is_done.set()

    def _let_step_end(self) -> None:
        """Another rank has ended: this one may be slower, and in the rest of its last step, which waits for nobody."""
        recorder, deadline_s = self._world.recorder, time.monotonic() + _LAST_STEP_S
        while recorder.stepping_thread not in (0, threading.get_ident()) and time.monotonic() < deadline_s:
            if self._world.coordinator.has_in_flight(""):
                return  # that will fail
            time.sleep(_LOOK_S)


def _absolute(path: str | os.PathLike[str]) -> str:
    """``path`` for ranks that work in other directories. Raises TypeError or ValueError for what can be no file's."""
    absolute = os.path.abspath(os.fsdecode(path))
    with suppress(OSError):
        os.lstat(absolute)  # raises ValueError
    return absolute
