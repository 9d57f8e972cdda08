"""A process's place among ranks that go on, in the same processes, after others have died under mpirun.

hvdliterun lets one group of them go on: two, on the two sides of a network that is cut, would train apart.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from hvdlite import launched
from hvdlite.agreement import Bootstrap
from hvdlite.config import Config
from hvdlite.errors import HorovodInternalError, StallError, StartupError
from hvdlite.mpi import MpiRanks
from hvdlite.processes import ProcessAddress, has_ended, is_stopped
from hvdlite.recovery.lifeline import Lifeline
from hvdlite.recovery.roster import Generation
from hvdlite.recovery.surviving_ranks import ROOM_FOR_SUBSETS, Medium, SurvivingRanks
from hvdlite.recovery.survivor_meeting import SurvivorMeeting, call_to
from hvdlite.start.rendezvous import RendezvousRanks

_SPREAD_S = 1.0  # how long news of a failure are on their way
_CALL_S = 1.0  # between two calls
_MEETING_SHARE = 0.8  # of the time for the start, as elsewhere

Claim = Callable[[int, int], bool]
"""Asks whether so many ranks may be that generation; raises OSError where nobody can be asked."""


class Survivors:
    """That of this process; has what `hvdlite.recovery.membership.Membership` has. Workers are ranks of COMM_WORLD.

    Attributes:
        generation: the present one; None before the first `join`.
        is_left_out: the others go on without this rank.
        hindrance: why these ranks cannot go on without one of them; empty where they can.
    """

    def __init__(self, claim: Claim) -> None:
        self.generation: Generation | None = None
        self.is_left_out = False
        self.hindrance = ""
        self._claim = claim
        self._lifeline: Lifeline | None = None
        self._medium: Medium | None = None
        self._called = 1  # the number of the generation to which this rank calls the others, or has called them
        self._has_met = threading.Event()  # since then
        self._words = b""  # of the call, see `SurvivorMeeting`
        self._ends: dict[int, tuple[int, int]] = {}  # pids and pidfds of workers on this machine
        self._left_out: list[int] = []  # those of them that are no workers any more

    @property
    def worker(self) -> int:
        process = launched.this_process()
        assert process is not None
        return process.rank

    @property
    def rank(self) -> int:
        assert self.generation is not None
        return self.generation.workers.index(self.worker)

    @property
    def has_lost_some(self) -> bool:
        """Whether this generation goes on without ranks that MPI was started with: MPI cannot end in order."""
        return self.generation is not None and self.generation.number > 1

    def join(self, failed: int | None = None, *, follows_rank_0: bool = True) -> Generation:
        """Become a rank of the next generation: the first has all, the next ones those that live.

        Args:
            failed: the rank whose failure has ended the last generation, if it is known.
            follows_rank_0: any rank has a state, so it does not matter.

        Raises:
            StartupError: there is none; says why.
        """
        if self.generation is None:
            process = launched.this_process()
            assert process is not None
            self.generation = Generation(1, tuple(range(process.size)), are_alike=False)
            return self.generation
        if self.hindrance or self._lifeline is None:
            raise StartupError(self.hindrance or "a rank has failed while MPI was started")
        old = self.generation
        if failed is not None and old.workers[failed] == self.worker:
            self.is_left_out = True
            raise StartupError("the others have given this rank up")
        try:
            members = self._agree(self._lifeline, old, None if failed is None else old.workers[failed])
        finally:
            self._has_met.set()
        self._see_to_end(set(old.workers) - set(members))
        self.generation = Generation(old.number + 1, members, are_alike=False)
        return self.generation

    def ranks(self, everybody: MpiRanks, config: Config) -> Bootstrap:
        """Those of `generation`. Collective.

        Args:
            everybody: COMM_WORLD.
        """
        generation = self.generation
        assert generation is not None
        if self._lifeline is None or self._medium is None:
            self._lifeline, self._medium = Lifeline(everybody.comm), Medium(everybody.comm)
            self._find_neighbours(everybody)
        if generation.number == 1:
            return everybody
        timeout_s = _MEETING_SHARE * config.start_timeout_s
        name = f"generation {generation.number}"
        meeting = RendezvousRanks(self._lifeline, name, generation.workers, everybody.rank, timeout_s)
        return SurvivingRanks(meeting, generation.workers, self._medium, timeout_s, room=ROOM_FOR_SUBSETS)

    def news(self) -> int:
        """None: there are no newcomers."""
        return 0

    def fail(self, reason: HorovodInternalError) -> None:
        """Called by the health of the generation when it ends: say at once that this rank lives."""
        if not isinstance(reason, StallError):
            self._call()

    def leave(self) -> None:
        """This rank has come to its end, with MPI: it calls nobody any more, whatever becomes of others."""
        self._has_met.set()
        if self._lifeline is not None:
            self._lifeline.end()

    def close(self) -> None:
        """This process ends: mpirun waits for who is left out as well, and may be stopped."""
        for end in self._left_out:
            with suppress(OSError):
                signal.pidfd_send_signal(end, signal.SIGKILL)

    def _call(self) -> None:
        """Call the others, until this rank has met them or cannot go on."""
        generation = self.generation
        if self._lifeline is None or self._lifeline.has_ended:
            return
        if generation is None or self._called > generation.number:
            return
        self._called = generation.number + 1
        self._has_met = threading.Event()
        self._words = b""
        self._call_all()
        args = self._call_all, self._has_met
        threading.Thread(target=_go_on_calling, args=args, name="hvdlite call", daemon=True).start()

    def _call_all(self) -> None:
        assert self._lifeline is not None and self.generation is not None
        for worker in self.generation.workers:
            if worker != self.worker and not self._has_ended(worker):
                self._lifeline.send(worker, call_to(self._called), self._words)

    def _has_ended(self, worker: int) -> bool:
        """As seen from this machine. Open MPI 5.0.11 has crashed where it began to send to one that just had."""
        end = self._ends.get(worker)
        return end is not None and has_ended(end[1])

    def _change_call(self, words: bytes) -> None:
        self._words = words
        self._call_all()

    def _agree(self, lifeline: Lifeline, old: Generation, dead: int | None) -> tuple[int, ...]:
        """The workers of the next generation."""
        config = Config.from_env()
        # The neighbours of a silent rank give it up one after the other: each looks, and hears, so often.
        silence_s = _SPREAD_S + 2 * min(2.0, config.heartbeat_timeout_s / 4)
        number = old.number + 1
        self._call()
        meeting = SurvivorMeeting(
            lifeline,
            number,
            self.worker,
            old.workers,
            silence_s=silence_s,
            quiet_s=config.heartbeat_timeout_s,
            patience_s=config.elastic_timeout_s,
            call=self._change_call,
        )
        return meeting.members([] if dead is None else [dead], lambda count: self._refusal(number, count))

    def _refusal(self, number: int, count: int) -> str:
        try:
            if self._claim(number, count):
                return ""
        except OSError as error:
            return f"the keeper of rank {self.worker}'s host cannot be asked whether {count} ranks may go on: {error}"
        return f"hvdliterun does not let {count} ranks go on: they are too few, or others do already"

    def _find_neighbours(self, everybody: MpiRanks) -> None:
        for worker, process in enumerate(everybody.allgather(ProcessAddress.own())):
            end = process.open() if worker != everybody.rank else None
            if end is not None:
                self._ends[worker] = process.pid, end

    def _see_to_end(self, left_out: set[int]) -> None:
        """Kill who is left out: at once who is stopped; who ends by itself has a moment to say why."""
        ends = [self._ends.pop(worker) for worker in left_out if worker in self._ends]
        self._left_out += [end for _, end in ends]
        for pid, end in ends:  # without delay, since nobody would do it if these ranks were killed within that moment
            if is_stopped(pid):
                with suppress(OSError):
                    signal.pidfd_send_signal(end, signal.SIGKILL)
        timer = threading.Timer(Config.from_env().failure_grace_s, self.close)
        timer.daemon = True
        timer.start()


def _go_on_calling(call: Callable[[], None], has_met: threading.Event) -> None:
    while not has_met.wait(_CALL_S):
        call()
