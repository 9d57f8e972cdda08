"""NVTX ranges, by a stand-in for torch.cuda.nvtx: which there are, that all end, and when there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, threading
import torch

pushed, open_ranges = [], {}

class Nvtx:
    def range_push(name):
        pushed.append(name)
        open_ranges.setdefault(threading.get_ident(), []).append(name)
    def range_pop():
        open_ranges[threading.get_ident()].pop()

torch.cuda.is_available = lambda: True
torch.cuda.nvtx = Nvtx
import hvdlite
import hvdlite.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(3), name="loss")
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
try:
    hvd.allreduce(torch.ones(3), op="no such")
except Exception:
    pass
with torch.profiler.profile() as profile:
    hvd.allreduce(torch.ones(3), name="profiled")
held = hvdlite.runtime().recorder.held
hvd.shutdown()
in_profile = [event.name for event in profile.events() if event.name.startswith("hvdlite ")]
print(json.dumps([pushed, sum(open_ranges.values(), []), in_profile, held]))
"""


def run(**variables: str) -> Any:
    environ = {name: value for name, value in os.environ.items() if name != "NVTX_INJECTION64_PATH"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=environ | variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nsight_sees_the_spans_of_the_timeline() -> None:
    pushed, left_open, in_profile, held = run(NVTX_INJECTION64_PATH="/opt/nsight/libToolsInjection64.so")
    assert {"hvdlite wait: allreduce 'loss'", "hvdlite optimizer: step"} <= set(pushed)
    assert left_open == []
    assert "hvdlite wait: allreduce 'profiled'" in in_profile
    assert "hvdlite wait: allreduce 'profiled'" not in pushed  # torch's profiler has it
    assert held == 0  # no timeline was started


@pytest.mark.parametrize(
    "variables",
    [{}, {"NVTX_INJECTION64_PATH": "/opt/x.so", "HOROVOD_DISABLE_NVTX_RANGES": "1"}],
    ids=["without Nsight", "disabled"],
)
def test_otherwise_nothing_is_pushed(variables: dict[str, str]) -> None:
    pushed, _, in_profile, _ = run(**variables)
    assert pushed == []
    assert "hvdlite wait: allreduce 'profiled'" in in_profile
