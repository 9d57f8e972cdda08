"""`hvdliterun --elastic` by mpirun: ranks begin anew on the hosts that are left, from the commit that is kept there.

A generation is one mpirun. The keepers of the hosts outlive it (`hvdlite.recovery.keeper`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from hvdlite.cli.children import Stops
from hvdlite.cli.discovery import Discovery, IsOver
from hvdlite.cli.host_choice import Avoided, choose
from hvdlite.cli.job import Host
from hvdlite.cli.keepers import LOOK_S, Keepers, OnWord
from hvdlite.cli.rank_words import RankWords
from hvdlite.cli.say import say
from hvdlite.counted import counted
from hvdlite.errors import ConfigError
from hvdlite.naps import growing_pause_s
from hvdlite.recovery.keeper import Word
from hvdlite.recovery.membership import ADDED, REMOVED

_FRESH_S = 3.0  # for hosts that are newer than those that are known
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # after a generation that has not committed
_FROM_THE_BEGINNING = "the beginning, as no host that answers has a commit"

Generation = Callable[[Sequence[Host], Callable[[], list[int]], RankWords, str], int]
"""Runs ranks on these hosts to their end; returns the exit status.

It is also given what says, once the ranks have ended, which children are none of theirs; what ranks have said; and why
they shall not train, but may only save the last commit, empty otherwise.
"""


@dataclass(frozen=True)
class Limits:
    """Of a job.

    Attributes:
        least, most: how many ranks there are.
        restarts: how many generations may follow one that has failed.
        timeout_s: how long to wait for enough hosts.
        silence_s, grace_s: see `RankWords`.
        leaves_time: whether ranks have time to save when another one has failed.
    """

    least: int
    most: int
    restarts: int
    timeout_s: float
    silence_s: float
    grace_s: float
    leaves_time: bool


class KeptJob:
    """Generations of ranks, one after the other.

    Args:
        look: the hosts that the job may use now, given what says that nobody waits for it; raises ConfigError.
        generation: runs one.
        make_keepers: is given what to call with words of ranks, see `Keepers`.
    """

    def __init__(
        self,
        look: Callable[[IsOver], Sequence[Host]],
        generation: Generation,
        make_keepers: Callable[[OnWord], Keepers],
        limits: Limits,
    ) -> None:
        self._look = look
        self._generation = generation
        self._make_keepers = make_keepers
        self._limits = limits
        self._avoided = Avoided()
        self._hosts: Sequence[Host] = ()
        self._unreached: set[str] = set()  # since ranks were started: hosts where a keeper has ended, and none starts
        self._alike: set[str] = set()  # hosts whose ranks have started together
        self._unlike: set[str] = set()  # others, which are left out: ranks there run other versions
        self._said = ""
        self._stops = Stops()
        self._words = RankWords(limits.least, limits.silence_s, limits.grace_s)

    def run(self) -> int:
        """Returns the exit status: that of the last generation, or 128 + n after signal n to this process."""
        with self._stops as stops, closing(self._make_keepers(self._hear)) as keepers:
            failures, idle, committed = 0, 0, 0
            while True:
                chosen = self._gather(keepers, stops)
                if stops:
                    return stops.status
                if not chosen:
                    least, timeout_s = self._limits.least, self._limits.timeout_s
                    self._end(
                        f"fewer than --min-np {least} slots on hosts that answer for {timeout_s:g} s "
                        "(HVDLITE_ELASTIC_TIMEOUT)",
                        keepers,
                    )
                    return 1
                status = self._run_generation(keepers, chosen)
                lost, unlike = self._find_lost(keepers, chosen), self._leave_out_unlike(chosen)
                if stops:
                    return stops.status
                if self._words.anew:
                    say("the ranks have ended at a commit, and begin anew on the hosts that there are now")
                    continue
                if status == 0 and (self._words.is_at_work or self._words.have_failed or self._words.miss_some):
                    status = 1  # mpirun does not mind ranks that were killed
                if status == 0:
                    return status
                failures += 1
                if self._words.are_unlike and not unlike:
                    say("the job ends: its ranks run different versions, which no restart changes")
                    return status
                if failures > self._limits.restarts:
                    times = counted(failures, "time")
                    self._end(f"it has failed {times} (--restarts {self._limits.restarts})", keepers)
                    return status
                newest = keepers.newest
                idle = 0 if newest > committed else idle + 1
                committed = newest
                where = f"commit {newest}, which is kept in memory" if newest else _FROM_THE_BEGINNING
                what = f"{', '.join(lost)} did not answer" if lost else f"ranks have failed (exit status {status})"
                if unlike:
                    what = f"ranks run different versions since {', '.join(unlike)} came, which the job leaves out"
                say(f"{what}; goes on from {where} ({failures} of {self._limits.restarts} restarts)")
                if idle:
                    self._sleep(growing_pause_s(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, idle - 1), stops)

    def _gather(self, keepers: Keepers, stops: Stops) -> list[Host]:
        """The hosts of the next generation, whose keepers live; none if there are not enough in time."""
        least, timeout_s = self._limits.least, self._limits.timeout_s
        deadline_s = time.monotonic() + timeout_s
        waits = False
        # Ranks do not stand still for a script that hangs: the known hosts may be enough.
        self._find_hosts(_FRESH_S if self._hosts else math.inf)
        with closing(Discovery(self._look, self._note_hosts)) as discovery:
            while True:
                chosen = self._choose(keepers)
                slots = sum(host.slots for host in chosen)
                if stops or slots >= least:
                    return chosen
                if time.monotonic() >= deadline_s:
                    return []
                if not waits:
                    say(
                        f"waits for hosts, up to {timeout_s:g} s (HVDLITE_ELASTIC_TIMEOUT): there are {slots} slots "
                        f"on those that answer, and --min-np is {least}"
                    )
                    discovery.start()
                    waits = True
                self._sleep(LOOK_S, stops)
                self._avoid(keepers.ask())

    def _choose(self, keepers: Keepers) -> list[Host]:
        """The hosts that could have ranks now, once they have keepers."""
        usable = self._avoided.usable(self._hosts, time.monotonic())
        trusted = self._avoided.trusted(usable)
        # Others are tried while these train, since one that is still silent costs seconds.
        is_enough = sum(host.slots for host in trusted) >= self._limits.least
        self._avoid(keepers.start(trusted if is_enough else usable))
        while chosen := self._able(keepers, usable):
            if keepers.hand_copy(chosen[0].name, lambda: bool(self._stops)):
                break
            self._avoid([chosen[0].name])
        return chosen

    def _able(self, keepers: Keepers, hosts: Sequence[Host]) -> list[Host]:
        """Those of ``hosts`` that would have ranks now, as their keepers live."""
        kept = keepers.kept
        return choose([host for host in hosts if host.name in kept], self._limits.most, kept)

    def _end(self, why: str, keepers: Keepers) -> None:
        """Say why the job ends; ranks that had no time to save the last commit are started once more to do so."""
        say(f"the job ends: {why}")
        newest = keepers.newest
        had_time = self._limits.leaves_time and self._words.have_failed
        if newest and not had_time and (chosen := self._choose(keepers)):
            say(f"ranks are started once more, only to save commit {newest}, which is kept in memory")
            self._run_generation(keepers, chosen, why)

    def _run_generation(self, keepers: Keepers, chosen: Sequence[Host], to_save: str = "") -> int:
        self._words.begin()
        keepers.tell(Word.BEGIN, self._words.start)
        is_over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(keepers, chosen, is_over), daemon=True)
        discovery = Discovery(self._look, self._note_hosts)
        watch.start()
        discovery.start()

        def end_watch() -> list[int]:
            # What they start meanwhile would pass for something that ranks have left behind.
            is_over.set()
            discovery.close()
            watch.join()
            return keepers.processes

        try:
            return self._generation(chosen, end_watch, self._words, to_save)
        finally:
            end_watch()

    def _hear(self, word: Word, number: int) -> int:
        if word == Word.CLAIM and self._stops:
            return 0
        answer = self._words.hear(word, number)
        if word == Word.CLAIM and answer:
            say(f"ranks have failed; {self._words.left} go on from the last commit")
        return answer

    def _watch(self, keepers: Keepers, chosen: Sequence[Host], is_over: threading.Event) -> None:
        """While ranks run: tell them once that others may come, whose keeper has called, or that some are to leave.

        A keeper that has ended, on a host with ranks, is replaced; if it alone had the newest commit, and hvdliterun
        has a copy, ranks that start find that. Where no keeper can be started on any of the hosts the ranks are lost,
        and where none can on one while they start: nobody else notices, as they have no heartbeats yet or any more.
        """
        self._unreached.clear()
        while not is_over.wait(LOOK_S):
            keepers.kill_stopped()
            names = {host.name for host in chosen}
            has_room = sum(host.slots for host in chosen) < self._limits.most
            welcome = [host for host in self._hosts if has_room or host.name in names]
            keepers.begin_start(self._avoided.usable(welcome, time.monotonic()))
            keepers.review_copy()
            self._note_late(keepers.give_up_late())
            kept = keepers.kept
            if not self._words.have_started and (able := [name for name in names if name in kept]):
                keepers.hand_copy(min(able), is_over.is_set)
            # Not what would be chosen anew: a script may print its hosts in another order each time.
            usable = {host.name: host.slots for host in self._hosts if host.name in names or host.name in kept}
            now = {host.name: host.slots for host in chosen}
            comes = any(slots > now.get(name, 0) for name, slots in usable.items())
            goes = any(usable.get(name, 0) < slots for name, slots in now.items())
            may_be_more = self._can_be_more(keepers)
            comes |= may_be_more
            if may_be_more or (has_room and comes) or goes:
                keepers.tell(Word.NEWS, ADDED * comes | REMOVED * goes)
            self._unreached -= keepers.kept.keys()
            lost = self._unreached & names
            if lost == names or (lost and self._words.are_starting):
                of_all = "no host with ranks answers" if lost == names else "hosts do not answer while ranks start"
                self._words.lose(f"{of_all}: {', '.join(sorted(lost))}")

    def _can_be_more(self, keepers: Keepers) -> bool:
        """Whether there is room for more ranks than go on since others have died."""
        if not self._words.may_be_joined:
            return False
        self._avoid(keepers.ask())
        self._note_late(keepers.start(self._avoided.usable(self._hosts, time.monotonic())))
        return sum(host.slots for host in self._able(keepers, self._hosts)) > (self._words.left or 0)

    def _leave_out_unlike(self, chosen: Sequence[Host]) -> list[str]:
        """Where ranks on ``chosen`` run different versions: the hosts that have come to others, which did not."""
        names = {host.name for host in chosen}
        if self._words.have_started:
            self._alike |= names
        new = names - self._alike if self._words.are_unlike and self._alike else set()
        self._unlike |= new
        return sorted(new)

    def _find_lost(self, keepers: Keepers, chosen: Sequence[Host]) -> list[str]:
        keepers.ask()
        living = keepers.kept
        for name in living:
            self._avoided.forgive(name)
        lost = [host.name for host in chosen if host.name not in living]
        self._avoid(lost)
        return lost

    def _find_hosts(self, within_s: float) -> None:
        """Look which hosts there are; after ``within_s`` those that are known stay."""
        until_s = time.monotonic() + within_s

        def is_over() -> bool:
            return bool(self._stops) or time.monotonic() >= until_s

        try:
            self._note_hosts(self._look(is_over))
        except ConfigError as error:
            if not is_over():
                self._note_hosts(error)

    def _note_hosts(self, found: Sequence[Host] | ConfigError) -> None:
        """What a look at the hosts has come to."""
        if not isinstance(found, ConfigError):
            self._hosts = [host for host in found if host.name not in self._unlike]
            self._said = ""
        elif str(found) != self._said:
            self._said = str(found)
            say(f"{found}; the job goes on with the hosts that it has")

    def _note_late(self, names: Sequence[str]) -> None:
        """No keeper could be started on these hosts."""
        self._unreached |= {*names}
        self._avoid(names)

    def _avoid(self, names: Sequence[str]) -> None:
        now_s = time.monotonic()
        for host in self._avoided.usable([Host(name, 1) for name in names], now_s):  # others have been named already
            pause_s = self._avoided.avoid(host.name, now_s)
            say(f"{host.name} does not answer, and is left alone for {pause_s:g} s")

    def _sleep(self, seconds: float, stops: Stops) -> None:
        end_s = time.monotonic() + seconds
        while not stops and time.monotonic() < end_s:
            time.sleep(min(0.2, seconds))
