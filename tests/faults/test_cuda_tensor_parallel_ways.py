"""How GPUs of several kinds exchange rows: jobs of their own, as a driver is asked once what it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_lab import run

SPLIT = f"""
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch
import hvdlite.torch as hvd, hvdlite.tensor_parallel as tp
from cuda_lab import simulated
from cuda_torch import TorchOnGpu
from hvdlite.collectives.nccl import NcclBackend
from hvdlite.tensor_parallel.device_windows import DeviceWindows
import ctypes, gc, nccl_lab

def counted(name):
    call = getattr(NcclBackend, name)
    def count(self, *arguments, **named):
        by_nccl.append(name)
        return call(self, *arguments, **named)
    setattr(NcclBackend, name, count)

by_nccl = []
for name in ("allgather", "reduce_scatter", "allreduce"):
    counted(name)
way, method = sys.argv[1:]
hvd.init()
if way == "nccl":
    nccl_lab.simulated()
cuda = simulated(hvd.rank())
team = tp.Team(method=method)
gpu = TorchOnGpu(cuda, late=0.0)
with gpu.in_hvdlite():
    x, weight = torch.ones(2 * hvd.size(), 4, device="cuda"), torch.ones(4, 4, device="cuda")
    for step in range(3):
        y = tp.matmul_reduce_scatter(tp.all_gather_matmul(x, weight, team), weight, team)
        assert (y == 16 * hvd.size()).all().item()
        del by_nccl[:-2]
    say("right, the latest two by NCCL:", *by_nccl)
    if way in ("late", "behind") and hvd.rank() == 1:
        meet = DeviceWindows.meet
        def meet_and_be_late(windows):
            meet(windows)
            time.sleep(0.5 if way == "behind" else 0)  # rank 0 has ended hvdlite by then
            gpu.cuda.launch(ctypes.c_void_p(windows.first.handle), lambda: time.sleep(0.4))
        DeviceWindows.meet = meet_and_be_late
    tp.matmul_reduce_scatter(x, weight, team)  # which nobody looks at
    del team
    hvd.shutdown()
    gc.collect()
    time.sleep(1.5 if way in ("late", "behind") else 0)  # in which memory goes
"""


def test_gpus_without_multicast() -> None:
    result = run(SPLIT, "plain", "auto", n=2, env={"GPUSIM_NO_MULTICAST": "1", "HVDLITE_LOG_LEVEL": "info"})
    words = "exchange rows by copies, not by multicast: rank 0: the GPU has no multicast; rank 1"
    assert result.stdout.count("right, the latest two by NCCL:\n") == 2, str(result)
    assert result.stderr.count("exchange rows by") == result.stderr.count(words) == 1, str(result)


def test_gpus_that_reach_one_another_by_nccl_only() -> None:
    result = run(SPLIT, "nccl", "auto", n=2, env={"GPUSIM_NO_PEER": "1"})
    assert result.stdout.count("right, the latest two by NCCL: allgather reduce_scatter\n") == 2, str(result)
    assert result.stderr.count("unfused, which here is by NCCL") == 1, str(result)


# The GPU of rank 1 is late, or its main thread too.
@pytest.mark.parametrize("who", ["late", pytest.param("behind", marks=pytest.mark.thorough)])
def test_the_last_exchange_is_over_before_memory_goes(who: str) -> None:
    """A rank that has gone would take its memory from those that still read it by multicast."""
    result = run(SPLIT, who, "multicast", n=2, env={"HVDLITE_LOG_LEVEL": "info"})
    assert result.returncode == 0, str(result)
    assert result.stdout.count("right") == 2, str(result)
    assert result.stderr.count("exchange rows by multicast or by copies") == 1, str(result)
    assert "is not bound" not in result.stderr, str(result)
