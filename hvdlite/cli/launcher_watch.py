"""Whether a launcher does its work: its ranks start in time, and it ends after them. Evidence, where it does not."""

from __future__ import annotations

import math
import os
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from hvdlite import environment, launched
from hvdlite.cli import lost_frames
from hvdlite.cli.children import children_of, shell_status
from hvdlite.cli.job import Host, is_this_machine
from hvdlite.cli.say import say
from hvdlite.launched import Launched
from hvdlite.links import connections
from hvdlite.links.connections import Connection
from hvdlite.links.interfaces import is_own
from hvdlite.processes import end_of, has_ended, is_stopped, shares_network, state_of, words_of
from hvdlite.start.start_watch import GONE_S, THROUGH

OUTLIVES_S = 3.0  # a launcher its ranks
_LOOK_S = 0.5
_WORDS_S = 1.0  # between two looks at what ranks have said
_PROBE_S = 3.0
_SSH_FAILED = 255  # exit status of ssh where it does not get to a host, and so of every mpirun
_MARKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")  # of ranks, by mpirun of Open MPI, and of MPICH and its kin
_LONGEST_CALL_LOOK_S = 60.0
_MOST_HOSTS = 32  # daemons on more connect to one another, not all to mpirun


class Words(Protocol):
    """What ranks have said to hvdliterun."""

    @property
    def is_over(self) -> bool:
        """That they have come to the end, whatever becomes of others."""

    @property
    def are_late(self) -> bool:
        """That they end, so long ago that all should have."""

    @property
    def lost(self) -> str:
        """Why they cannot come to an end; empty where they can."""

    @property
    def have_started(self) -> bool:
        """Whether some are through their start."""

    @property
    def are_starting(self) -> bool:
        """Whether some wait in their start for others."""


@dataclass(frozen=True)
class Expected:
    """What a launch should come to.

    Attributes:
        hosts: those with ranks; empty where a batch scheduler knows them.
        is_local: whether all ranks are on this machine.
        start_timeout_s: until then ranks have started.
        ssh_port: where other hosts were reached.
        stays_connected: the launcher's ssh, or what it has for that, ends with the ranks of the host.
        words: None where ranks may go on after a failure, and nobody hears of it.
    """

    hosts: tuple[Host, ...]
    is_local: bool
    start_timeout_s: float
    ssh_port: int = 22
    words: Words | None = None
    stays_connected: bool = False

    @property
    def is_over(self) -> bool:
        return self.words is not None and self.words.is_over

    @property
    def have_failed(self) -> bool:
        """Whether ranks cannot come to an end, with whatever status those that have ended did."""
        return self.words is not None and self.words.lost != ""


class LauncherWatch:
    """Looks at the processes below a launcher that has just been started.

    Ranks on other hosts are out of its sight. So where there are other hosts, only evidence against one of them ends
    the launcher: connections that the kernel has not got through, a daemon that has never called, or ranks that
    have said that they end, and yet it does not.

    Args:
        selector: hears of the ends of ranks; each has its process id as data.

    Attributes:
        next_look_s: when to call `look` again; `ranks_ended` changes it.
        statuses: exit statuses of ranks, as far as they were seen.
        suspicion: why no rank has started, if the launcher should give up by itself; empty where nothing is wrong. See
            `explain_end`.
        first_end: the rank that has ended before all others here; None where that was not seen.
    """

    def __init__(self, pid: int, expected: Expected, selector: selectors.BaseSelector) -> None:
        self._pid = pid
        self._expected = expected
        self._selector = selector
        self._began_s = time.monotonic()
        self._ended_s: float | None = None  # when the last rank has
        self._running: dict[int, Launched | None] = {}  # ranks, by process
        self._sees_all = False  # of those here, from their start until one ends
        self._silent_before: list[str] = []
        self._have_called: set[str] = set()  # other hosts whose daemons have been connected to this one
        self._call_look_s = _LOOK_S
        self._ways: dict[str, int] = {}  # to other hosts: a pidfd of the ssh, or the like
        self._emptied_s: dict[str, float] = {}  # since when it has ended
        self.next_look_s = self._began_s + _LOOK_S
        self.statuses: list[int] = []
        self.suspicion = ""
        self.first_end: int | None = None
        self._said_that_it_waits = False

    def look(self) -> str | None:
        """Why the launcher should not be waited for any longer; None where it may still come to its end."""
        now = time.monotonic()
        self.next_look_s = now + _LOOK_S
        words = self._expected.words
        if words is not None and words.lost:
            return words.lost
        # From the beginning, as a way that has ended cannot be found any more; and no longer than it matters.
        if words is not None and not words.have_started and (emptied := self._find_emptied(now)) and words.are_starting:
            return f"all ranks on {', '.join(emptied)} have ended before they were through {THROUGH}"
        if self._are_late:
            return self._explain_lateness()
        if not self._running:
            found = self._find_ranks()
            for pid, rank in found.items():
                if (end := end_of(pid)) is not None:
                    self._running[pid] = rank
                    self.suspicion = ""
                    self._selector.register(end, selectors.EVENT_READ, pid)
            self._sees_all = all(rank is not None and rank.local_size == len(found) for rank in found.values())
        if self._running:
            self.next_look_s = now + min(math.inf if words is None else _WORDS_S, self._look_for_calls())
            return None
        if self._ended_s is not None:
            return self._explain_outliving(now - self._ended_s)
        return self._explain_absence(now - self._began_s)

    def ranks_ended(self, keys: Sequence[selectors.SelectorKey]) -> None:
        """These descriptors in the selector have become readable, at one time."""
        first = self._running[keys[0].data]
        if self._sees_all and len(keys) == 1 and first is not None:
            self.first_end = first.rank
        self._sees_all = False
        for key in keys:
            self._selector.unregister(key.fd)
            os.close(key.fd)
            del self._running[key.data]
            status = _status_of_zombie(key.data)
            if status is not None:
                self.statuses.append(status)
        if not self._running:
            self._ended_s = time.monotonic()
            self.next_look_s = self._ended_s + OUTLIVES_S

    def explain_end(self, status: int) -> str:
        """`suspicion`, once the launcher has ended with ``status``, which may have been too early to have one."""
        has_seen_ranks = self._running or self._ended_s is not None
        if self.suspicion or status != _SSH_FAILED or has_seen_ranks:
            return self.suspicion
        names = [name for name in self._others if name not in self._have_called and _addresses(name) is None]
        return f"no rank has started{_listed(list(map(_unknown, names)))}" if names else ""

    def close(self) -> None:
        """Before the selector goes."""
        for way in self._ways.values():
            os.close(way)
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.data, int):
                self._selector.unregister(key.fd)
                os.close(key.fd)

    @property
    def _are_late(self) -> bool:
        words = self._expected.words
        return words is not None and words.are_late

    def _explain_lateness(self) -> str:
        silent = self._silence() or self._silent_before or self._unanswered(self._others)
        return f"some ranks have not ended, though all were to{_listed(silent) or self._left_here()}"

    def _left_here(self) -> str:
        """The ranks on this machine that have not ended, and what they do."""
        left = []
        for pid, rank in self._running.items():
            name = "a rank" if rank is None else f"rank {rank.rank}"
            left.append(f"{name} (pid {pid}) {'is stopped' if is_stopped(pid) else 'still runs'}")
        if self._others:
            left.append(f"those on {', '.join(self._others)} may be stopped, or stuck")
        return f": {', '.join(left) or 'they are stopped, or stuck'}"

    def _explain_outliving(self, since_s: float) -> str | None:
        if since_s < OUTLIVES_S:
            return None
        if self._expected.is_local or (self._expected.is_over and since_s > self._expected.start_timeout_s):
            return f"mpirun has not ended {since_s:.0f} s after its last rank"
        silent = self._silence() or self._unreachable()
        if not silent and self._are_late:
            return self._explain_lateness()  # to ask takes seconds
        if silent := silent or lost_frames.complaints(self._others):
            return f"mpirun has not ended {since_s:.0f} s after its last rank here{_listed(silent)}"
        if since_s > self._expected.start_timeout_s and not self._said_that_it_waits:
            self._said_that_it_waits = True
            where = f"ranks on {', '.join(self._others)} still" if self._others else "others still"
            say(
                f"the ranks on this machine ended {since_s:.0f} s ago, and mpirun has not: {where} work, "
                "or mpirun does not see their end. Look there (ps, top); Ctrl-C ends the job."
            )
        return None

    def _explain_absence(self, since_s: float) -> str | None:
        if since_s < OUTLIVES_S:
            if not self._all_have_called:
                self._note_calls(self._links())
            return None
        silent = self._silence()
        missing = f"no rank has started here within {since_s:.0f} s (HVDLITE_START_TIMEOUT){_listed(silent)}"
        self.suspicion = missing if silent else ""
        return missing if silent and since_s >= self._expected.start_timeout_s else None

    def _find_emptied(self, now: float) -> list[str]:
        """Other hosts whose ranks have all ended some time ago, as the launcher's way to them has."""
        if not self._expected.stays_connected:
            return []
        if missing := {*self._others} - self._ways.keys():
            self._ways |= self._find_ways(missing)
        for name, way in self._ways.items():
            if has_ended(way):
                self._emptied_s.setdefault(name, now)
        return [name for name, since_s in self._emptied_s.items() if now > since_s + GONE_S]

    def _find_ways(self, names: Collection[str]) -> dict[str, int]:
        """Of those of ``names`` to which the launcher has one now: ssh is told where to go first, then what to do."""
        hosts = {name: host.address for host in self._expected.hosts for name in (host.name, host.address)}
        found: dict[str, int] = {}
        pending = children_of(self._pid)
        while pending:
            pid = pending.pop()
            words = words_of(pid)
            name = next((hosts[word] for word in words if word in hosts), None)
            if name is None or "-hosts" in words:  # one that is of the launcher itself, or a rank
                pending += children_of(pid)
            elif name in names and name not in found and (end := end_of(pid)) is not None:
                found[name] = end
        return found

    @property
    def _others(self) -> list[str]:
        return [host.address for host in self._expected.hosts if not is_this_machine(host)]

    def _look_for_calls(self) -> float:
        """Note which hosts' daemons are connected now; returns after how many seconds to do so again."""
        if self._all_have_called:
            return math.inf
        self._note_calls(self._links())
        self._call_look_s = min(2 * self._call_look_s, _LONGEST_CALL_LOOK_S)
        return self._call_look_s

    @property
    def _all_have_called(self) -> bool:
        return self._have_called.issuperset(self._others)

    def _note_calls(self, links: Sequence[Connection]) -> None:
        others, links = {*self._others}, [link for link in links if link.port != self._expected.ssh_port]
        self._have_called |= others if self._all_came(links) else {name for name in others if _is_open(name, links)}

    def _links(self) -> list[Connection]:
        return connections.of_processes([self._pid, *children_of(self._pid)])

    def _all_came(self, links: Sequence[Connection]) -> bool:
        """Whether all other hosts have called; their connections may come from any of their addresses."""
        peers = {link.peer for link in links if link.is_open and not link.peer.startswith("127.")}
        return len(peers) >= len(self._others) or len(self._others) > _MOST_HOSTS

    def _silence(self) -> list[str]:
        """What is wrong with other hosts, host by host, as far as it shows here."""
        links = self._links()
        others = self._others
        if not others:
            return connections.complaints(links)
        self._note_calls(links)
        found = []
        for name in others:
            addresses = _addresses(name)
            if addresses is None:
                if name not in self._have_called:  # ssh may know names of its own, from ~/.ssh/config
                    found.append(_unknown(name))
                continue
            if any(map(is_own, addresses)):  # another name of this machine
                continue
            own = [link for link in links if link.peer in addresses]
            if any(link.is_stuck for link in own) and (elsewhere := self._explain_stuck(name)):
                found.append(elsewhere)
            elif wrong := connections.complaints(own):
                found.append(f"{name}: {'; '.join(wrong)}")
            elif name not in self._have_called:
                found.append(
                    f"{name}: mpirun's daemon there has not called this machine; check that no firewall drops "
                    "connections between the hosts on any port, that the host has the program at the same path, and "
                    f"that this machine's name, {socket.gethostname()}, leads there to an address of an interface that "
                    "connects them (--network-interfaces chooses one)"
                )
        return found

    def _unreachable(self) -> list[str]:
        """Hosts that were reached by ssh, and that do not even refuse a connection now; asked once in a while."""
        self.next_look_s = time.monotonic() + _PROBE_S
        silent = self._unanswered(self._others)
        again = [text for text in silent if text in self._silent_before]
        self._silent_before = silent
        return again

    def _unanswered(self, names: Sequence[str]) -> list[str]:
        """Complaints about those that do not even refuse a connection now."""
        port = self._expected.ssh_port
        with ThreadPoolExecutor(max_workers=len(names) or 1) as pool:
            answers = pool.map(lambda name: _answers(name, port), names)
        return [
            f"{name} does not answer at port {port} any more: check that it is up, and its network"
            for name, answers_now in zip(names, answers, strict=True)
            if not answers_now
        ]

    def _explain_stuck(self, name: str) -> str:
        """What is wrong with a host to which bytes get lost, unless it is what they look like: too large a frame."""
        if unanswered := self._unanswered([name]):
            return unanswered[0]
        if lost_frames.full_ones_arrive(name):
            return f"{name}: bytes sent to it were lost, and it is there now: its link was down for a while"
        return ""

    def _find_ranks(self) -> dict[int, Launched | None]:
        """Processes below the launcher that are ranks on this machine, not what they have started.

        Returns:
            what the launcher has said of each, as far as it is understood, by process.
        """
        found: dict[int, Launched | None] = {}
        pending = children_of(self._pid)
        while pending:
            pid = pending.pop()
            try:
                environ = environment.of_process(pid)
                if environ.keys() & {*_MARKS}:
                    if shares_network(pid):
                        found[pid] = launched.find(environ)
                    continue
            except OSError:  # it has ended
                continue
            pending += children_of(pid)
        return found


def _addresses(name: str) -> set[str] | None:
    """Of a host; None where its name is not known here."""
    with suppress(OSError):
        return {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    return None


def _unknown(name: str) -> str:
    return f"{name}: this name is not known here; check it, /etc/hosts and DNS"


def _is_open(name: str, links: Sequence[Connection]) -> bool:
    """Whether one of ``links`` is a connection with a host."""
    addresses = _addresses(name) or ()
    return any(link.is_open for link in links if link.peer in addresses)


def _listed(silent: Sequence[str]) -> str:
    if not silent:
        return ""
    return "".join(["; what is wrong, as seen from here:", *(f"\n  {text}" for text in silent)])


def _answers(name: str, port: int) -> bool:
    """Whether a host takes or refuses connections, rather than being silent; so one that only ssh knows by ``name``."""
    try:
        socket.create_connection((name, port), timeout=_PROBE_S).close()
    except (ConnectionRefusedError, socket.gaierror):
        return True
    except OSError:
        return False
    return True


def _status_of_zombie(pid: int) -> int | None:
    """The exit status of a process that its parent has not asked for yet, as a shell reports it."""
    try:
        state, *rest = state_of(pid)
    except OSError:
        return None
    if state != "Z":
        return None
    return shell_status(os.waitstatus_to_exitcode(int(rest[-1])))
