"""The ranks that run the tests, as the harness needs them: those of COMM_WORLD under mpirun, else hvdliterun's."""

from __future__ import annotations

import array
import time
from typing import Any

from hvdlite import launched
from hvdlite.config import MEETING_POINT, other_variable
from hvdlite.launched import Meeting
from hvdlite.naps import Patience
from hvdlite.start.meeting_point import AtMeetingPoint
from hvdlite.start.rendezvous import MissingError, RendezvousRanks

FOR_EVER_S = 1e6


class OverMpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size

    def allgather(self, value: Any) -> list[Any]:
        return self._comm.allgather(value)

    def exchange(self, value: int, patience_s: float) -> list[int]:
        """Everybody's ``value``; raises TimeoutError."""
        mpi = self._mpi
        mine, all_values = array.array("q", [value]), array.array("q", bytes(8 * self.size))
        request = self._comm.Iallgather([mine, mpi.INT64_T], [all_values, mpi.INT64_T])
        deadline = time.monotonic() + patience_s
        pause = 0.0
        while not request.Test():
            # Sleeping, not spinning: with more ranks than cores, others need this core to come here at all.
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)
            if time.monotonic() > deadline:
                raise TimeoutError
        return list(all_values)

    def abort(self) -> None:
        self._mpi.COMM_WORLD.Abort(1)


class WithoutMpi:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._place = AtMeetingPoint(other_variable(MEETING_POINT), "hvdliterun")
        self._ranks = RendezvousRanks(self._place, "tests", range(size), rank, FOR_EVER_S)
        self._exchanged = 0

    def allgather(self, value: Any) -> list[Any]:
        return self._ranks.allgather(value)

    def exchange(self, value: int, patience_s: float) -> list[int]:
        """Everybody's ``value``; raises TimeoutError."""
        self._exchanged += 1
        key, data = f"exchange {self._exchanged}", str(value).encode()
        try:
            told = self._place.gather(key, range(self.size), self.rank, data, Patience(min(patience_s, FOR_EVER_S)))
        except MissingError as error:
            raise TimeoutError from error
        return [int(text) for text in told]

    def abort(self) -> None:
        raise SystemExit(1)


def are_without_mpi() -> bool:
    process = launched.this_process()
    return process is not None and process.launcher.meeting is Meeting.POINT


def harness_ranks() -> OverMpi | WithoutMpi:
    process = launched.this_process()
    return WithoutMpi(process.rank, process.size) if process is not None and are_without_mpi() else OverMpi()
