"""Autotuning across hosts: settings of what travels between them change while a job trains, and results do not."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from lab import Lab

Hosts = Callable[..., Lab]

TRAIN = """
import torch
import hvdlite
import hvdlite.torch as hvd
from hvdlite.config import Tunable

hvd.init()
torch.set_num_threads(1)
parameters = [torch.nn.Parameter(torch.zeros(100, 100)) for _ in range(20)]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
total = hvd.size() * (hvd.size() + 1) // 2
for step in range(100):
    optimizer.zero_grad()
    sum((i + 1) * (hvd.rank() + 1) * parameter.sum() for i, parameter in enumerate(parameters)).backward()
    optimizer.step()
    for i, parameter in enumerate(parameters):
        assert (parameter.grad == (i + 1) * total).all(), (step, i)
        assert (parameter == -(step + 1) * (i + 1) * total).all(), (step, i)
assert optimizer._hvd_reducer._tuner is None
settings = Tunable.of(hvdlite.runtime().group.config)
assert set(hvd.allgather_object(settings)) == {settings}
"""


def test_settings_change_between_steps(hosts: Hosts, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    env = {"HVDLITE_AUTOTUNE": "1", "HVDLITE_AUTOTUNE_LOG": str(log), "HVDLITE_BUCKET_BYTES": "100000"}
    hosts(2).launch(TRAIN, ranks_per_host=[1, 1], env=env).check()
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert rows[-1]["decision"] == "chosen" and int(rows[-1]["step"]) < 100
    for name in ("bucket_bytes", "segment_bytes"):
        assert len({row[name] for row in rows}) > 2, name
