"""Ranks of an elastic job die and stop at random, and it trains on: python tests/chaos.py [--minutes 20] [--seed 7]

Every few seconds a rank is killed, or stopped, or raises, or two are killed at once, or a process that is still
starting. Weights count how often each sample went into them, so at the end of every epoch they show whether one was
lost or counted twice. One rank is spared at any time, another one each time, since somebody has to have the state.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

TRAINING = """
import os, signal, sys, time
import torch
import hvdlite.torch as hvd

SAMPLES, BATCH = 120, 2

class Asked(Exception):
    "By a signal, as if a sample could not be read."

def on_signal(number, frame):
    raise Asked

signal.signal(signal.SIGUSR2, on_signal)
hvd.init()
torch.set_num_threads(1)
counts = torch.nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([counts], lr=1.0), [("counts", counts)], op=hvd.Sum)
sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
state = hvd.elastic.TorchState(torch.nn.ParameterList([counts]), optimizer, sampler=sampler, epoch=0, extra=0, batch=0)

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

@hvd.elastic.run
def train(state):
    say("starts", hvd.rank(), hvd.size(), os.getpid())
    while True:
        # Samples that come twice, since those that are left do not divide by the ranks: in the last batch of the pass.
        extra = sampler.total_size - len(sampler.remaining_indices)
        for number, batch in enumerate(torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=sampler)):
            optimizer.zero_grad()
            (-counts[batch].sum()).backward()
            optimizer.step()
            time.sleep(0.01)
            sampler.record_batch(number, BATCH)
            state.batch += 1
            if state.batch % 3 == 0:
                state.commit()
                if hvd.rank() == 0:
                    say("commit", time.time())
        state.epoch += 1
        state.extra += extra
        sampler.set_epoch(state.epoch)
        total, least = int(counts.sum().item()), int(counts.min().item())
        ends = hvd.allreduce(torch.tensor(int(os.path.exists(sys.argv[1]))), op=hvd.Max, name="ends").item()
        if hvd.rank() == 0:
            say("epoch", state.epoch, "total", total, "least", least, "wanted", state.epoch * SAMPLES + state.extra)
        state.commit()
        if ends:
            return

train(state)
say("counts", *map(int, counts.tolist()))
"""
PAUSE_S = (1.0, 5.0)  # between two mishaps
END_S = 120.0  # for the last epoch, on a busy machine


class Job:
    """What the output of the job has told so far."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.stop = directory / "stop"
        script = directory / "train.py"
        script.write_text(TRAINING)
        command = [sys.executable, "-m", "hvdlite", "run", "--elastic", "-np", str(ranks), "--restarts", "1000000"]
        environ = {**os.environ, "HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "6", "HVDLITE_FAILURE_GRACE_SECONDS": "3"}
        self.process = subprocess.Popen(
            [*command, str(script), str(self.stop)],
            env={**environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.members: set[int] = set()  # of the last generation that has said so
        self.stopped: set[int] = set()
        self.sizes: Counter[int] = Counter()
        self.epochs = 0
        self.wrong: list[str] = []
        self.ends: list[str] = []
        self.commits: list[float] = []
        self.log: list[str] = []
        self._generation = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            words = line.split()
            if "goes on with" in line:
                self.members = set()
            elif words[:1] == ["starts"]:
                self.members = self.members | {int(words[3])}
                self.sizes[int(words[2])] += words[1] == "0"
            elif words[:1] == ["commit"]:
                self.commits.append(float(words[1]))
            elif words[:1] == ["counts"]:
                self.ends.append(line)
            elif found := re.match(r"epoch (\d+) total (\d+) least (\d+) wanted (\d+)", line):
                epoch, total, least, wanted = map(int, found.groups())
                self.epochs = epoch
                if total != wanted or least < epoch:
                    self.wrong.append(line)

    def processes(self) -> list[int]:
        """All that the launcher has started, ranks or not yet."""
        pid = self.process.pid
        try:
            return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def close(self) -> int:
        """Returns the exit status."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
            return -1
        finally:
            self._reader.join()


def strike(job: Job, chance: random.Random, spared: int) -> str:
    """Bring one mishap about; says which, or nothing where nobody can be struck."""
    living = job.processes()
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
            job.stopped.add(pid)
    return kind


def run(minutes: float, ranks: int, seed: int) -> list[str]:
    """What was wrong."""
    chance = random.Random(seed)
    mishaps: Counter[str] = Counter()
    struck: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as directory:
        job = Job(Path(directory), ranks)
        ends = time.monotonic() + 60 * minutes
        while time.monotonic() < ends and job.process.poll() is None:
            time.sleep(chance.uniform(*PAUSE_S))
            members = sorted(job.members - job.stopped)  # a stopped one cannot keep the state for the others
            if len(members) > 1 and (kind := strike(job, chance, chance.choice(members))):
                mishaps[kind] += 1
                if kind in ("killed", "two killed"):
                    struck.append(time.time())
        job.stop.touch()
        status = job.close()
    waits = [next((c - s for c in job.commits if c > s + 0.2), None) for s in struck]
    known = sorted(wait for wait in waits if wait is not None)
    print(f"chaos: seed {seed}, {minutes:g} minutes, {ranks} ranks: {sum(mishaps.values())} mishaps, {dict(mishaps)}")
    print(f"chaos: {job.epochs} epochs, {len(job.commits)} commits, starts with so many ranks: {dict(job.sizes)}")
    if known:
        print(
            f"chaos: from a kill to the next commit: median {statistics.median(known):.2f} s, longest {known[-1]:.2f} s"
        )
    problems = [f"wrong: {line}" for line in job.wrong]
    if status != 0:
        problems.append(f"exit status {status}")
    if not job.epochs or not mishaps:
        problems.append("nothing has happened")
    if len(set(job.ends)) != 1:
        problems.append(f"ranks end with {len(set(job.ends))} different weights")
    if problems:
        print("".join(job.log[-200:]))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=7, help="default: %(default)s")
    options = parser.parse_args()
    problems = run(options.minutes, options.ranks, options.seed)
    print(*(f"chaos: {problem}" for problem in problems), sep="\n", end="" if not problems else "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
