"""Which hosts an elastic job uses next, and which it avoids for a while. Pure: times come from the caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from hvdlite.cli.job import Host
from hvdlite.naps import growing_pause_s

_FIRST_S, _LONGEST_S = 10.0, 600.0  # how long a host is avoided


class Avoided:
    """Hosts that did not answer: each is left alone for longer from time to time, until it answers again."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()
        self._until_s: dict[str, float] = {}

    def avoid(self, name: str, now_s: float) -> float:
        """It did not answer; returns for how many seconds it is left alone."""
        pause_s = growing_pause_s(_FIRST_S, _LONGEST_S, self._times[name])
        self._times[name] += 1
        self._until_s[name] = now_s + pause_s
        return pause_s

    def forgive(self, name: str) -> None:
        """It has done its part."""
        self._times.pop(name, None)
        self._until_s.pop(name, None)

    def usable(self, hosts: Iterable[Host], now_s: float) -> list[Host]:
        """Those that may be tried now."""
        return [host for host in hosts if self._until_s.get(host.name, now_s) <= now_s]

    def trusted(self, hosts: Iterable[Host]) -> list[Host]:
        """Those that have not failed to answer since they were forgiven."""
        return [host for host in hosts if host.name not in self._times]


def choose(hosts: Iterable[Host], most: int, kept: Mapping[str, int]) -> list[Host]:
    """The hosts of the next ranks, with their slots, ``most`` in all.

    Who has the newest commit comes first, as some states follow rank 0.

    Args:
        kept: the number of the commit that each host has.
    """
    chosen: list[Host] = []
    for host in sorted(hosts, key=lambda host: -kept.get(host.name, 0)):
        slots = min(host.slots, most - sum(other.slots for other in chosen))
        if slots > 0:
            chosen.append(replace(host, slots=slots))
    return chosen
