"""An elastic job trains on whatever happens: python tests/chaos.py [--one-machine] [--minutes 20] [--seed 7]

On three emulated hosts with two ranks each, under mpirun (hosts/chaos_on_hosts.py): ranks are killed and stopped, links
and hosts are lost and come back, hosts leave and join. With --one-machine, and where hosts cannot be emulated, four
ranks of this machine: every few seconds one is killed, or stopped, or raises, or two are killed at once, or a process
that is still starting. One rank is spared there at any time, another one each time, as somebody has to have the state.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos_job import SETTINGS, Job, report

PAUSE_S = (1.0, 5.0)  # between two mishaps


def processes(job: Job) -> list[int]:
    """All that the launcher has started, ranks or not yet."""
    pid = job.process.pid
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def strike(job: Job, stopped: set[int], chance: random.Random, spared: int) -> str:
    """Bring one mishap about; says which, or nothing where nobody can be struck."""
    living = processes(job)
    victims = [pid for pid in living if pid in job.members and pid != spared]
    starting = [pid for pid in living if pid not in job.members]
    kind = chance.choice(["killed"] * 4 + ["stopped", "raises", "two killed", "killed while it starts"])
    if kind == "killed while it starts":
        victims = starting if len(job.members) > 1 or spared in job.members else []
    if not victims or spared not in living:
        return ""
    chance.shuffle(victims)
    number = {"stopped": signal.SIGSTOP, "raises": signal.SIGUSR2}.get(kind, signal.SIGKILL)
    for pid in victims[: 2 if kind == "two killed" else 1]:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return ""
        if number == signal.SIGSTOP:
            stopped.add(pid)
    return kind


def run(minutes: float, ranks: int, seed: int, log: Path | None = None) -> list[str]:
    """What was wrong, of a job on this machine.

    Args:
        log: where to write what the job prints, and when.
    """
    chance = random.Random(seed)
    mishaps: Counter[str] = Counter()
    struck: list[float] = []
    stopped: set[int] = set()
    command = [sys.executable, "-m", "hvdlite", "run", "--elastic", "-np", str(ranks), "--restarts", "1000000"]
    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as directory:
        job = Job(Path(directory), command, {**os.environ, **SETTINGS}, log)
        ends = time.monotonic() + 60 * minutes
        while time.monotonic() < ends and job.process.poll() is None:
            time.sleep(chance.uniform(*PAUSE_S))
            members = sorted(job.members - stopped)  # a stopped one cannot keep the state for the others
            if len(members) > 1 and (kind := strike(job, stopped, chance, chance.choice(members))):
                mishaps[kind] += 1
                job.note(f"chaos: {kind}\n")
                if kind in ("killed", "two killed"):
                    struck.append(time.time())
        problems = job.end()
    report(job, f"seed {seed}, {minutes:g} minutes, {ranks} ranks", mishaps, struck)
    if not mishaps:
        problems.append("there was no mishap")
    if problems:
        print("".join(job.log[-200:]))
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--one-machine", action="store_true", help="on this machine, without MPI")
    where.add_argument("--hosts", action="store_true", help="on emulated hosts, or not at all")
    parser.add_argument("--minutes", type=float, default=20.0, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, help="default: 2 on each host; on one machine 4")
    parser.add_argument(
        "--mpi", default="openmpi", choices=("openmpi", "mpich"), help="between hosts; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--log", type=Path, help="file for the output of the job, with times")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(Path(__file__).with_name("hosts")))
    from chaos_on_hosts import run_on_hosts
    from lab import refusal

    reason = None if options.one_machine else refusal()
    if options.hosts and reason:
        parser.error(reason)
    if reason:
        print(f"chaos: on one machine, as {reason}", flush=True)
    if not options.one_machine and not reason:
        problems = run_on_hosts(options.minutes, options.ranks or 2, options.seed, options.mpi, options.log)
    else:
        problems = run(options.minutes, options.ranks or 4, options.seed, options.log)
    for problem in problems:
        print(f"chaos: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
