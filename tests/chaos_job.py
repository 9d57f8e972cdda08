"""The job that tests/chaos.py disturbs, what its output tells, and whether it came to the right end.

Weights count how often each sample went into them, so at the end of every epoch they show whether one was lost or
counted twice. One more weight gives each step a loss that is known in advance, whatever has happened to ranks, and
however many there are; each of them looks at it.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
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
height = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
named = [("counts", counts), ("height", height)]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([counts, height], lr=1.0), named, op=hvd.Sum)
sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
weights = torch.nn.ParameterList([counts, height])
state = hvd.elastic.TorchState(weights, optimizer, sampler=sampler, epoch=0, extra=0, batch=0)

wrong = []

def slope(step):
    return -1 - step % 7

def height_before(step):
    "Of which each step takes its slope."
    weeks, days = divmod(step, 7)
    return 28 * weeks + days * (days + 1) // 2

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

@hvd.elastic.run
def train(state):
    say("starts", hvd.rank(), hvd.size(), os.getpid(), state.batch)
    while True:
        # Samples that come twice, since those that are left do not divide by the ranks: in the last batch of the pass.
        extra = sampler.total_size - len(sampler.remaining_indices)
        for number, batch in enumerate(torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=sampler)):
            optimizer.zero_grad()
            loss = slope(state.batch) * height
            known = slope(state.batch) * height_before(state.batch)
            if loss.item() != known and not wrong:  # as most that follow are wrong then
                wrong.append(state.batch)
                say("loss of step", state.batch, "is", loss.item(), "and not", known)
            has_turn = state.batch % hvd.size() == hvd.rank()  # one rank, so the sum is the same for any number of them
            (has_turn * loss - counts[batch].sum()).backward()
            optimizer.step()
            time.sleep(0.01)
            sampler.record_batch(number, BATCH)
            if (number + 1) * BATCH >= sampler.num_samples:
                state.extra += extra  # before the commit: it may be the last one of this pass
            state.batch += 1
            if state.batch % 3 == 0:
                state.commit()
                if hvd.rank() == 0:
                    say("commit", time.time(), state.batch)
        state.epoch += 1
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
# Short enough for a stopped process to be found between two mishaps.
SETTINGS = {
    "HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "6",
    "HVDLITE_FAILURE_GRACE_SECONDS": "3",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
KEPT_S = 10.0  # a commit that was reported so long before the last one is never lost
END_S = 120.0  # for the last epoch, on a busy machine
_ENDS = ("goes on with", "goes on from", "begin anew on")  # of generations


class Job:
    """The training under hvdliterun, and what its output has told so far.

    Args:
        front: the words before the script: hvdliterun and its options.
        log: where to write each line of the output as it comes, and when it came.
    """

    def __init__(
        self, directory: Path, front: Sequence[str], environ: Mapping[str, str], log: Path | None = None
    ) -> None:
        self._log_file = log
        if log is not None:
            log.write_text("")
        self._began_s = time.monotonic()
        self._stop = directory / "stop"
        script = directory / "train.py"
        script.write_text(TRAINING)
        self.process = subprocess.Popen(
            [*front, str(script), str(self._stop)],
            env=dict(environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.members: set[int] = set()  # of the last generation that has said so
        self.sizes: Counter[int] = Counter()
        self.epochs = 0
        self.commits: list[float] = []
        self._kept: list[
            tuple[float, int]
        ] = []  # when commits were heard of, by the monotonic clock, and their batches
        self.log: list[str] = []  # lines, each with the time since the start
        self._wrong: list[str] = []
        self._surplus = 0  # samples that have counted twice
        self._ends: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def end(self) -> list[str]:
        """Let it come to its end after this epoch; what was wrong."""
        self._stop.touch()
        status = self._wait()
        problems = [f"wrong: {line}" for line in self._wrong]
        if status != 0:
            problems.append("it did not end" if status is None else f"exit status {status}")
        if not self.epochs:
            problems.append("nothing has happened")
        if len(set(self._ends)) != 1:
            problems.append(f"ranks end with {len(set(self._ends))} different weights")
        return problems

    def note(self, line: str) -> None:
        """A line for the log."""
        timed = f"{time.monotonic() - self._began_s:.2f} {line}"
        self.log.append(timed)
        if self._log_file is not None:
            with self._log_file.open("a") as file:
                file.write(timed)

    def recoveries(self, struck: Sequence[float]) -> list[float]:
        """Seconds from each of these times (of time.time) to the next commit, the shortest first."""
        commits = list(self.commits)
        waits = (next((commit - time_s for commit in commits if commit > time_s + 0.2), None) for time_s in struck)
        return sorted(wait for wait in waits if wait is not None)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.note(line)
            words = line.split()
            if any(text in line for text in _ENDS):
                self.members = set()
                self._ends.clear()  # of ranks that had come to the end before another one failed there
            elif words[:1] == ["starts"]:
                self.members = self.members | {int(words[3])}
                self.sizes[int(words[2])] += words[1] == "0"
                self._check_start(int(words[4]))
            elif words[:1] == ["commit"]:
                self.commits.append(float(words[1]))
                self._kept.append((time.monotonic(), int(words[2])))
            elif words[:1] == ["counts"]:
                self._ends.append(line)
            elif words[:1] == ["loss"]:
                self._wrong.append(line.rstrip())
            elif found := re.match(r"epoch (\d+) total (\d+) least (\d+) wanted (\d+)", line):
                epoch, total, least, wanted = map(int, found.groups())
                if total - wanted != self._surplus or least < epoch or epoch < self.epochs:
                    self._wrong.append(line.rstrip())
                self._surplus = total - wanted  # which stays, and is told once
                self.epochs = epoch

    def _check_start(self, batch: int) -> None:
        """A rank starts, or goes on, from the commit after ``batch``; others before it have been heard of."""
        lost = [(heard_s, number) for heard_s, number in self._kept if number > batch]
        for heard_s, number in lost:
            if (age_s := self._kept[-1][0] - heard_s) > KEPT_S:
                self._wrong.append(
                    f"starts at batch {batch}: commit {number} is lost, {age_s:.1f} s before the last one"
                )
                break
        self._kept = [one for one in self._kept if one not in lost]

    def _wait(self) -> int | None:
        """The exit status; None where it had to be ended."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
            return None
        finally:
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


def report(job: Job, what: str, mishaps: Mapping[str, int], struck: Sequence[float]) -> None:
    """Print figures.

    Args:
        what: the run, in words.
        mishaps: how many of each kind.
        struck: when those were that end ranks.
    """
    print(f"chaos: {what}: {sum(mishaps.values())} mishaps, {dict(mishaps)}")
    print(f"chaos: {job.epochs} epochs, {len(job.commits)} commits, starts with so many ranks: {dict(job.sizes)}")
    if waits := job.recoveries(struck):
        median_s = statistics.median(waits)
        print(f"chaos: from a mishap to the next commit: median {median_s:.2f} s, longest {waits[-1]:.2f} s")
