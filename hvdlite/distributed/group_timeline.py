"""The timeline of a program that uses process groups and never calls hvd.init(): that of HVDLITE_TIMELINE."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress

from hvdlite.errors import StartupError
from hvdlite.job_timeline import begun_timeline
from hvdlite.naps import Patience
from hvdlite.process_worlds import ProcessWorlds
from hvdlite.start.rendezvous import Place
from hvdlite.world import World


def group_timeline(world: World, worlds: ProcessWorlds, place: Place, patience_s: float) -> GroupTimeline | None:
    """Of all ranks, if the settings want one and hvd.init() does not write it. Collective."""
    if not world.config.timeline or any(world.allgather(worlds.is_recorded)):
        return None
    return GroupTimeline(world, worlds, place, patience_s)


class GroupTimeline:
    """Of the ranks of ``world``; collective to build. hvd.init() begins the file anew.

    Args:
        worlds: in which this process is.
        place: where ranks meet at the end; other ranks may be busy in the group then, or gone.
        patience_s: the longest wait for them.
    """

    def __init__(self, world: World, worlds: ProcessWorlds, place: Place, patience_s: float) -> None:
        self._topology = world.topology
        self._health = world.health
        self._worlds = worlds
        self._place = place
        self._key = f"hvdlite/timeline/{world.allgather(secrets.token_hex(4))[0]}"  # a place may outlive a group
        self._patience_s = patience_s
        self._timeline, _ = begun_timeline(world, worlds)

    def close(self) -> None:
        """Complete the file, if all ranks do; else the file of each node stays."""
        if self._timeline.is_recording:
            self._timeline.flush_and_close()
            self._worlds.stop_recording(self._timeline.close)
            if self._health.failure is None:
                with suppress(StartupError):  # somebody has not come
                    self._gathered("written", self._topology.ranks, b"-")
                    self._timeline.merge(None if len(self._topology.nodes) == 1 else self._from_leaders)
        self._timeline.close()

    def _from_leaders(self, data: bytes) -> list[bytes] | None:
        parts = self._gathered("events", self._topology.leaders, data)
        return parts if self._topology.rank == 0 else None

    def _gathered(self, what: str, ranks: Sequence[int], data: bytes) -> list[bytes]:
        patience = Patience(self._patience_s)
        return self._place.gather(f"{self._key}/{what}", ranks, self._topology.rank, data, patience)
