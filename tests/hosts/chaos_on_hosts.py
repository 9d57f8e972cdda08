"""Chaos over hosts: ranks, keepers, links and whole hosts are lost at random, hosts leave and join; it trains on.

Called by tests/chaos.py. Host 0, where hvdliterun is, is never lost as a whole, so a commit is always kept.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from chaos_job import SETTINGS, Job, report
from lab import Lab
from launching import python_of

HOSTS = 3
PAUSE_S = (1.0, 5.0)  # from the start of a generation, or the last mishap, to the next mishap
AWAY_S = (2.0, 25.0)  # how long a host is lost; links that come back within the heartbeats' patience harm nobody
START_S = 60.0  # after so long the next mishap comes in any case


class Mishaps:
    """What may happen to a job on the hosts of ``lab``, each by a method that says whether it has."""

    def __init__(self, lab: Lab, job: Job, names: HostList, chance: random.Random) -> None:
        self._lab = lab
        self._job = job
        self._names = names
        self._chance = chance
        self._repairs: list[tuple[float, Callable[[], None]]] = []
        self._away: set[int] = set()

    def strike(self) -> str:
        """Bring one about; its name, or nothing where it was not possible now."""
        kinds: dict[str, tuple[int, Callable[[], bool]]] = {
            "rank killed": (4, lambda: self._signal(signal.SIGKILL)),
            "two ranks killed": (1, lambda: self._signal(signal.SIGKILL, 2)),
            "rank stopped": (2, lambda: self._signal(signal.SIGSTOP)),
            "rank raises": (1, lambda: self._signal(signal.SIGUSR2)),
            "something killed": (2, self._kill_anything),
            "link lost": (3, self._lose_link),
            "host lost": (2, self._lose_host),
            "all of a host killed": (1, self._kill_all_of_a_host),
            "host leaves": (2, self._leave),
        }
        weights = [weight for weight, _ in kinds.values()]
        kind = self._chance.choices(list(kinds), weights)[0]
        return kind if kinds[kind][1]() else ""

    def repair(self, *, all_of_them: bool = False) -> None:
        """Undo what is due."""
        now_s = time.monotonic()
        due = [repair for until_s, repair in self._repairs if all_of_them or until_s <= now_s]
        self._repairs = [(until_s, repair) for until_s, repair in self._repairs if repair not in due]
        for repair in due:
            repair()

    def _signal(self, number: signal.Signals, count: int = 1) -> bool:
        """To ranks."""
        members = sorted(self._job.members)
        victims = self._chance.sample(members, min(count, len(members)))
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(victims)

    def _kill_anything(self) -> bool:
        """A rank, a keeper or a daemon of mpirun's on another host than the first."""
        host = self._choose_host()
        pids = sorted(self._lab.pids(host)) if host else []
        if not pids:
            return False
        with suppress(ProcessLookupError):
            os.kill(self._chance.choice(pids), signal.SIGKILL)
        return True

    def _kill_all_of_a_host(self) -> bool:
        host = self._choose_host()
        if host:
            self._lab.kill_processes(host)
        return bool(host)

    def _lose_link(self) -> bool:
        return self._lose(self._lab.cut, self._lab.mend)

    def _lose_host(self) -> bool:
        return self._lose(self._lab.crash, self._lab.repair)

    def _leave(self) -> bool:
        return self._lose(self._names.remove, self._names.add)

    def _lose(self, lose: Callable[[int], None], undo: Callable[[int], None]) -> bool:
        host = self._choose_host()
        if not host:
            return False
        lose(host)
        self._away.add(host)

        def come_back() -> None:
            undo(host)
            self._away.discard(host)

        self._repairs.append((time.monotonic() + self._chance.uniform(*AWAY_S), come_back))
        return True

    def _choose_host(self) -> int:
        """One that is there; 0: none is."""
        there = [host for host in range(1, len(self._lab)) if host not in self._away]
        return self._chance.choice(there) if there else 0


class HostList:
    """What the discovery script prints."""

    def __init__(self, lab: Lab, directory: Path, ranks: int) -> None:
        self._lab = lab
        self._ranks = ranks
        self._there = set(range(len(lab)))
        self._file = directory / "hosts"
        self._write()
        self.script = directory / "discover.sh"
        self.script.write_text(f"#!/bin/sh\ncat {self._file}\n")
        self.script.chmod(0o755)

    def add(self, host: int) -> None:
        self._there.add(host)
        self._write()

    def remove(self, host: int) -> None:
        self._there.discard(host)
        self._write()

    def _write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{self._lab.names[host]}:{self._ranks}\n" for host in sorted(self._there)))
        new.rename(self._file)


def run_on_hosts(minutes: float, ranks: int, seed: int, mpi: str, log: Path | None = None) -> list[str]:
    """What was wrong.

    Args:
        ranks: on each of `HOSTS` hosts.
        mpi: "openmpi" or "mpich".
        log: where to write what the job prints, and when.
    """
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    struck: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as directory, Lab(HOSTS) as lab:
        names = HostList(lab, Path(directory), ranks)
        job = Job(Path(directory), _front(lab, mpi, names), os.environ, log)
        mishaps = Mishaps(lab, job, names, chance)
        ends_s = time.monotonic() + 60 * minutes
        while time.monotonic() < ends_s and job.process.poll() is None:
            _wait_for_training(job, mishaps, chance)
            if kind := mishaps.strike():
                counts[kind] += 1
                struck.append(time.time())
                job.note(f"chaos: {kind}\n")
        mishaps.repair(all_of_them=True)
        problems = job.end()
        left = {lab.names[host]: pids for host in range(HOSTS) if (pids := _what_is_left(lab, host))}
    report(job, f"seed {seed}, {minutes:g} minutes, {HOSTS} hosts, {ranks} ranks on each, {mpi}", counts, struck)
    if not counts:
        problems.append("there was no mishap")
    if left:
        problems.append(f"processes are left: {left}")
    if problems:
        print("".join(job.log[-400:]))
    return problems


def _front(lab: Lab, mpi: str, names: HostList) -> list[str]:
    variables = {**lab.launch_environment, **SETTINGS}
    variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    words = [f"{name}={value}" for name, value in variables.items()]
    hvdliterun = [python_of(mpi), "-m", "hvdlite", "run", "--mpi", "--min-np", "1", "--restarts", "1000000"]
    return [*lab.enter(0), "env", *words, *hvdliterun, "--host-discovery-script", str(names.script)]


def _wait_for_training(job: Job, mishaps: Mishaps, chance: random.Random) -> None:
    """Until there has been a commit since now, mostly, and a while more; things come back meanwhile."""
    patience_s = START_S if chance.random() < 0.8 else chance.uniform(*PAUSE_S)
    before, began_s = len(job.commits), time.monotonic()
    while len(job.commits) == before and time.monotonic() < began_s + patience_s and job.process.poll() is None:
        time.sleep(0.1)
        mishaps.repair()
    until_s = time.monotonic() + chance.uniform(*PAUSE_S)
    while time.monotonic() < until_s:
        time.sleep(0.1)
        mishaps.repair()


def _what_is_left(lab: Lab, host: int) -> list[str]:
    """Processes of the job that are there some seconds after its end."""
    deadline_s = time.monotonic() + 10
    while (pids := lab.pids(host)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200] for pid in pids]
