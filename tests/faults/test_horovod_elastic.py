"""A script for Horovod's elastic mode, unedited, and its command line: ranks die, come and go."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launching import processes_with

# As Horovod's documentation has it, with a handler for a type of its own. Gradients are counts of samples.
TRAINING = """
import os
import signal
import sys
import time

import torch

import horovod.torch as hvd
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

hvd.init()


class Log(list):
    "Of the batches that have been trained, on all ranks alike."


class LogHandler(StateHandler):
    def __init__(self, log):
        super().__init__(log)
        self.save()

    def save(self):
        self._saved = list(self.value)

    def restore(self):
        self.value[:] = self._saved

    def sync(self):
        self.value[:] = hvd.broadcast_object(list(self.value), root_rank=0)
        self.save()


set_handler_registry([(Log, LogHandler), *get_handler_registry()])
SAMPLES, BATCH = 240, 2
counts = torch.nn.Parameter(torch.zeros(SAMPLES))
model = torch.nn.ParameterList([counts])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("counts", counts)], op=hvd.Sum)
sampler = ElasticSampler(range(SAMPLES), shuffle=False)
loader = torch.utils.data.DataLoader(range(SAMPLES), batch_size=BATCH, sampler=sampler)
directory = sys.argv[1]


def once(name):
    path = os.path.join(directory, name)
    if os.path.exists(path):
        return False
    open(path, "w").close()
    return True


def on_state_reset():
    print("reset on", hvd.size(), flush=True)


@hvd.elastic.run
def train(state):
    print("trains on", hvd.size(), "from", state.batch, flush=True)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        (-counts[batch].sum()).backward()
        if state.batch == 5 and hvd.rank() == hvd.size() - 1 and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        state.sampler.record_batch(number, BATCH)
        state.batch += 1
        state.log.append(state.batch)
        if state.batch == 10 and hvd.rank() == 0:
            with open(os.path.join(directory, "new"), "w") as file:
                file.write("localhost:3")
            os.replace(os.path.join(directory, "new"), os.path.join(directory, "hosts"))
        while state.batch == 12 and hvd.size() < 3:
            time.sleep(0.05)
            state.check_host_updates()
        state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, log=Log(), batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
assert list(state.log) == list(range(1, state.batch + 1)), state.log
print("done on", hvd.size(), "counts", sorted({int(count) for count in counts.tolist()}), flush=True)
"""


@pytest.mark.parametrize("options", [[], pytest.param(["--mpi"], marks=pytest.mark.thorough)], ids=["", "by MPI"])
def test_it_runs_as_it_is(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "hosts").write_text("localhost:2")
    script, discover = tmp_path / "train.py", tmp_path / "discover.sh"
    script.write_text(TRAINING)
    discover.write_text(f"#!/bin/sh\ncat {tmp_path / 'hosts'}\n")
    discover.chmod(0o755)
    elastic = ["-np", "2", "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(discover)]
    program = [sys.executable, "-m", "hvdlite", "horovod", str(script), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "hvdlite", "run", *elastic, *options, *program],
        env={**os.environ, "HVDLITE_TEST_JOB": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.findall(r"done on (\d) counts (\[.*\])", done.stdout) == [("3", "[1]")] * 3, said
    began = {(int(size), int(batch)) for size, batch in re.findall(r"trains on (\d) from (\d+)", done.stdout)}
    assert {(2, 0), (2, 5)} <= began and max(began)[0] == 3, said  # after a death, and with another rank
    assert processes_with(f"HVDLITE_TEST_JOB={tmp_path}") == {}
