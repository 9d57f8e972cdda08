"""How long an elastic job stands still: from `kill -9` of a rank, or the loss of a host, to the next completed step.

    python recovery.py                    # needs root for what is on emulated hosts
    python recovery.py --rounds 5 --json results/recovery.json

With an Open MPI that survives deaths: ranks of one node without MPI and with it, and one of three emulated hosts that
is cut off, by the settings that hvdliterun takes by itself. With MPICH: ranks that begin anew, of two emulated hosts of
which one rank is killed, and of three of which one is cut off. A step is an allreduce and 10 ms of sleep, with a commit
after each. All ranks share this machine's cores, and so do all imports of torch where ranks begin anew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "hosts")]

from hvdlite.cli.mpirun import Mpi, find_mpirun  # noqa: E402 (the line above makes what follows importable)
from lab import Lab, refusal  # noqa: E402

TRAINING = """
import os, sys, time
import torch
import hvdlite.torch as hvd

log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def say(*words):
    os.write(log, (" ".join(map(str, words)) + "\\n").encode())

hvd.init()
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, batch=0)

@hvd.elastic.run
def train(state):
    say("starts", time.time(), hvd.rank(), hvd.size(), os.getpid())
    while not os.path.exists(sys.argv[1] + ".end"):
        optimizer.zero_grad()
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        state.batch += 1
        state.commit()
        if hvd.rank() == 0:
            say("step", time.time())

train(state)
"""
PATIENCE_S = 120.0


class Job:
    """hvdliterun with ``options``, and what its ranks have told; ends with the block."""

    def __init__(self, directory: Path, *options: str, enter: Sequence[str] = (), **environment: str) -> None:
        self._log = directory / "log"
        self._log.touch()
        script = directory / "train.py"
        script.write_text(TRAINING)
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        words = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
        front = [sys.executable, "-m", "hvdlite", "run", "--elastic", "--restarts", "1000", *options]
        variables = [f"{name}={value}" for name, value in words.items()]
        self._process = subprocess.Popen(
            [*enter, "env", *variables, *front, str(script), str(self._log)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait_for_step(self, after_s: float, size: int | None = None) -> tuple[float, dict[int, int]]:
        """When the first step of ranks that have started since ``after_s`` was complete, and these ranks' processes.

        Args:
            size: so many ranks; None: any number.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            ranks: dict[int, int] = {}
            for words in map(str.split, self._log.read_text().splitlines()):
                if words[0] == "starts" and float(words[1]) > after_s and size in (None, int(words[3])):
                    ranks[int(words[2])] = int(words[4])
                elif words[0] == "step" and ranks:
                    return float(words[1]), ranks
            time.sleep(0.02)
        raise RuntimeError(f"nobody trains any more; hvdliterun's status: {self._process.poll()}")

    def end(self) -> None:
        self._log.with_name("log.end").touch()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


@contextmanager
def running(*options: str, enter: Sequence[str] = (), **environment: str) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="hvdlite-recovery-") as directory:
        job = Job(Path(directory), *options, enter=enter, **environment)
        try:
            yield job
        finally:
            job.end()


def stand_still_s(job: Job, strike: Callable[[dict[int, int]], None], size: int) -> float:
    """From ``strike``, once ``size`` ranks train, to the next step of those that go on."""
    _, ranks = job.wait_for_step(0.0, size)
    time.sleep(random.uniform(0.5, 1.0))
    struck_s = time.time()
    strike(ranks)
    stepped_s, _ = job.wait_for_step(struck_s)
    return stepped_s - struck_s


def kill_one(ranks: dict[int, int]) -> None:
    os.kill(random.choice(list(ranks.values())), signal.SIGKILL)


def on_one_node(rounds: int, *options: str) -> list[float]:
    """A rank of four is killed, of each job one."""
    found = []
    for _ in range(rounds):
        with running("-np", "4", *options) as job:
            found.append(stand_still_s(job, kill_one, 4))
    return found


def on_hosts(
    rounds: int, hosts: int, strike: Callable[[Lab, dict[int, int]], None], undo: Callable[[Lab], None]
) -> list[float]:
    """Two ranks on each host, and hvdliterun on the first."""
    found = []
    with Lab(hosts) as lab:
        names = ",".join(f"{name}:2" for name in lab.names)
        for _ in range(rounds):
            with running("-np", str(2 * hosts), "-H", names, enter=lab.enter(0), **lab.launch_environment) as job:
                found.append(stand_still_s(job, lambda ranks: strike(lab, ranks), 2 * hosts))
                undo(lab)
    return found


def measure(rounds: int) -> Iterator[tuple[str, list[float]]]:
    mpirun = find_mpirun()
    has_hosts = refusal() is None
    if mpirun.mpi is Mpi.OPEN_MPI and mpirun.version >= (5,):
        yield "one node, without MPI", on_one_node(rounds)
        yield "one node, Open MPI", on_one_node(rounds, "--mpi")
        if has_hosts:
            yield "a host lost, Open MPI", on_hosts(rounds, 3, lambda lab, ranks: lab.cut(2), lambda lab: lab.mend(2))
    if mpirun.mpi is Mpi.MPICH and has_hosts:
        yield "begins anew, MPICH", on_hosts(rounds, 2, lambda lab, ranks: kill_one(ranks), lambda lab: None)
        yield "a host lost, MPICH", on_hosts(rounds, 3, lambda lab, ranks: lab.cut(2), lambda lab: lab.mend(2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load before: {load:.1f}")
    cases = {}
    for what, found in measure(options.rounds):
        print(f"{what}: median {statistics.median(found):.2f} s, longest {max(found):.2f} s", flush=True)
        cases[what] = found
    if options.json is not None:
        report = {"benchmark": "recovery", "load_before": load, "seconds": cases}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
