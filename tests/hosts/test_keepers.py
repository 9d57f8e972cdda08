"""`hvdliterun --elastic` over hosts: ranks and hosts die, come back and join, and each sample counts once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import Lab
from launching import on_one_mpi, python_of

Hosts = Callable[..., Lab]

# Gradients are counts of samples, so the weights say how often each sample went into them.
TRAINING = """
import os, pathlib, signal, sys, time
import torch
import hvdlite.torch as hvd

SAMPLES, BATCH = 120, 2
directory = pathlib.Path(sys.argv[1])
hvd.init()
weights = torch.nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), [("weights", weights)], op=hvd.Sum)
sampler = hvd.elastic.ElasticSampler(range(SAMPLES))

class Slow:
    "Takes its time when it is written for the keeper."

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        main = sys.modules["__main__"]  # by name, as a global would be pickled with this class
        time.sleep("kill" in sys.argv and main.state.batch == 3)
        return {"is": "slow"}

slow = Slow()
parameters = torch.nn.ParameterList([weights])
state = hvd.elastic.TorchState(parameters, optimizer, sampler=sampler, batch=0, extra=0, slow=slow)

def happens(name):
    "Once in the life of the job."
    if (directory / name).exists():
        return False
    (directory / name).touch()
    return True

def all_see(name):
    return hvd.allreduce(torch.tensor(int((directory / name).exists())), op=hvd.Min, name="sees").item()

@hvd.elastic.run
def train(state):
    print("starts on rank", hvd.rank(), "of", hvd.size(), "at batch", state.batch, flush=True)
    while True:
        extra = sampler.total_size - len(sampler.remaining_indices)
        for number, batch in enumerate(torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=sampler)):
            while state.batch == 5 and not all_see("go"):
                if hvd.rank() == 0:
                    (directory / "five").touch()
                time.sleep(0.05)
                state.check_host_updates()
            optimizer.zero_grad()
            (-weights[batch].sum()).backward()
            if state.batch == 3 and hvd.rank() == hvd.size() - 1 and "kill" in sys.argv and happens("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            sampler.record_batch(number, BATCH)
            state.batch += 1
            state.commit()
        state.extra += extra
        break

train(state)
if hvd.rank() == 0:
    total = int(weights.sum())
    print("total", total - state.extra, "least", int(weights.min()), "size", hvd.size(), flush=True)
"""


class Job:
    """The training under hvdliterun on host 0.

    Args:
        goes_on: ranks that live go on, where MPI can.
    """

    def __init__(
        self, lab: Lab, mpi: str, directory: Path, *words: str, options: list[str], goes_on: bool = False
    ) -> None:
        self.directory = directory
        script = directory / "train.py"
        script.write_text(TRAINING)
        settings = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "3", "HVDLITE_FAILURE_GRACE_SECONDS": "2"}
        variables = {**lab.launch_environment, **settings, "OMP_NUM_THREADS": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        words_before = ["env", *(f"{name}={value}" for name, value in variables.items())]
        begins_anew = [] if goes_on or mpi != "openmpi" else ["--with-ft", "no"]
        front = [python_of(mpi), "-m", "hvdlite", "run", "--elastic", *begins_anew, *options]
        self.process = subprocess.Popen(
            [*lab.enter(0), *words_before, *front, str(script), str(directory), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 120
        while not (self.directory / name).exists():
            assert time.monotonic() < deadline, f"{name} has not come\n{self.stop()}"
            time.sleep(0.05)

    def stop(self) -> str:
        self.process.kill()
        return str(self.process.communicate()[0])

    def end(self, hear: Callable[[str], object] = lambda line: None, timeout: float = 200) -> str:
        """All output, of a job that has succeeded, which ``hear`` gets line by line."""
        assert self.process.stdout is not None
        killer = threading.Timer(timeout, self.process.kill)
        killer.start()
        lines = []
        with self.process.stdout as output:
            for line in output:
                lines.append(line)
                hear(line)
        self.process.wait()
        killer.cancel()
        text = "".join(lines)
        assert self.process.returncode == 0, text
        return text


def check_counts(text: str, size: int) -> None:
    assert re.findall(r"^total (\d+) least (\d+) size (\d+)$", text, re.MULTILINE) == [("120", "1", str(size))], text


def starts(text: str) -> set[tuple[int, int]]:
    """Sizes, and batches at which they began."""
    return {(int(size), int(batch)) for size, batch in re.findall(r"of (\d+) at batch (\d+)", text)}


@on_one_mpi("mpich")
def test_ranks_begin_anew_from_memory(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    lab = hosts(2)
    (tmp_path / "go").touch()
    job = Job(lab, mpi, tmp_path, "kill", options=["-np", "3", "-H", "node0:2,node1:1"])
    text = job.end()
    check_counts(text, 3)
    # Commit 3 was on its way. Those that live hand it over before they end, if their mpirun lets them.
    assert starts(text) in ([{(3, 0), (3, 3)}] if mpi == "openmpi" else [{(3, 0), (3, 3)}, {(3, 0), (3, 2)}]), text
    assert re.search(r"goes on from commit [23], which is kept in memory \(1 of 10 restarts\)", text), text
    assert lab.pids(0) == lab.pids(1) == []


@pytest.mark.thorough
def test_a_host_that_is_lost_is_left_out_and_comes_back(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    lab = hosts(3)
    job = Job(lab, mpi, tmp_path, options=["-np", "3", "-H", "node0:1,node1:1,node2:1"])
    job.wait_for("five")
    lab.cut(1)
    heard: list[int] = []

    def hear(line: str) -> None:
        if "of 2 at batch 5" in line:
            heard.append(2)
            lab.mend(1)
        if "of 3 at batch 5" in line and heard:
            (tmp_path / "go").touch()

    text = job.end(hear)
    check_counts(text, 3)
    assert "node1 did not answer" in text and starts(text) == {(3, 0), (2, 5), (3, 5)}, text
    assert lab.pids(0) == lab.pids(2) == []


@pytest.mark.thorough
def test_hosts_that_crash_are_waited_for(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    """Two of three at once, those of ranks 0 and 1; the third has the state as well."""
    lab = hosts(3)
    names = "node1:1,node2:1,node0:1"
    job = Job(lab, mpi, tmp_path, options=["-np", "3", "-H", names, "--min-np", "2"])
    job.wait_for("five")
    lab.crash(1)
    lab.crash(2)
    heard: list[str] = []

    def hear(line: str) -> None:
        if "waits for hosts" in line:
            heard.append("waits")
            lab.repair(1)
        if "of 2 at batch 5" in line and "two" not in heard:
            heard.append("two")
            lab.repair(2)
        if "of 3 at batch 5" in line and "two" in heard:
            (tmp_path / "go").touch()

    text = job.end(hear)
    check_counts(text, 3)
    assert "node1, node2 did not answer; goes on from commit 5, which is kept in memory" in text, text
    assert heard == ["waits", "two"] and starts(text) == {(3, 0), (2, 5), (3, 5)}, text
    assert lab.pids(0) == lab.pids(1) == lab.pids(2) == []


@pytest.mark.thorough
def test_interrupted_it_leaves_nothing_behind(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    lab = hosts(2)
    job = Job(lab, mpi, tmp_path, options=["-np", "2", "-H", "node0:1,node1:1"])
    job.wait_for("five")
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does; keepers and ranks elsewhere get none
    text, _ = job.process.communicate(timeout=60)
    assert job.process.returncode == 130, text
    assert "goes on" not in text and "begin anew on" not in text, text
    deadline = time.monotonic() + 10
    while (left := lab.pids(0) + lab.pids(1)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@on_one_mpi("openmpi")
def test_a_host_that_the_script_adds_joins_at_a_commit(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    lab = hosts(2)
    names, script = tmp_path / "names", tmp_path / "discover.sh"
    names.write_text("node0:1\n")
    script.write_text(f"#!/bin/sh\ncat {names}\n")
    script.chmod(0o755)
    options = ["--mpi", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(script)]
    job = Job(lab, mpi, tmp_path, options=options)
    job.wait_for("five")
    new = tmp_path / "new"
    new.write_text("node0:1\nnode1:5\n")
    new.rename(names)
    text = job.end(lambda line: (tmp_path / "go").touch() if "of 3 at batch" in line else None)
    check_counts(text, 3)
    assert starts(text) == {(1, 0), (3, 5)}, text
    assert lab.pids(0) == lab.pids(1) == []


@on_one_mpi("openmpi")
def test_the_only_host_with_ranks_is_lost(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    """hvdliterun is on another host, and has a copy of what was committed a moment before."""
    lab = hosts(3)
    job = Job(lab, mpi, tmp_path, options=["-np", "1", "-H", "node1:1,node2:1"], goes_on=True)
    job.wait_for("five")
    time.sleep(1.0)
    lab.crash(1)
    (tmp_path / "go").touch()
    text = job.end()
    check_counts(text, 1)
    assert starts(text) == {(1, 0), (1, 5)}, text
    assert "ended: no host with ranks answers: node1" in text, text
    assert "node1 did not answer; goes on from commit 5, which is kept in memory" in text, text
    assert lab.pids(0) == lab.pids(2) == []
