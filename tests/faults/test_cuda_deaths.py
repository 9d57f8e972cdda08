"""A rank is killed while the streams of others wait for its own: they are released, and the others say who it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_lab import check_end, run
from one_gpu import IS_SIMULATED

DEATH = f"""
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch
import hvdlite.torch as hvd
from one_gpu import one_gpu

victim = int(sys.argv[1])
hvd.init()
with one_gpu(hvd.rank()) as gpu:
    tensor = torch.ones(300_000, device="cuda")
    hvd.allreduce_(tensor, op=hvd.Sum)
    gpu.synchronize()
    if hvd.rank() == victim:
        gpu.hold(60)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    if hvd.rank() == victim:
        time.sleep(0.5)  # the others' streams have been given all by now, and wait
        say("dying at", time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        hvd.synchronize(handle)
        tensor.tolist()
    finally:
        gpu.settle()
        say("the stream came to its end")
    hvd.allreduce_(tensor)
    say("went on")
"""


@pytest.mark.parametrize(
    ("victim", "machines", "mpi"),
    [
        pytest.param(0, "", "auto", marks=pytest.mark.thorough),
        (2, "", "auto"),
        (1, "001", "pinned"),
        pytest.param(1, "001", "direct", marks=pytest.mark.skipif(not IS_SIMULATED, reason="MPI must take its memory")),
    ],
)
def test_streams_that_wait_for_a_killed_rank(victim: int, machines: str, mpi: str) -> None:
    result = run(DEATH, str(victim), n=3, machines=machines, env={"HVDLITE_GPU_MPI": mpi}, alone=True)
    check_end(result, f"rank {victim} (pid", "died without a word")
    assert "the stream came to its end" in result.stdout, result


DEATH_IN_A_GROUP = f"""
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch, torch.distributed as dist
import hvdlite.distributed.creation
from one_gpu import one_gpu

victim = int(sys.argv[1])
if "1" in machines:
    from mpi4py import MPI
    hvdlite.distributed.creation.machine = lambda: (machines[MPI.COMM_WORLD.rank], "", 0)
dist.init_process_group("hvdlite")
rank = dist.get_rank()
with one_gpu(rank, everywhere=True) as gpu:
    tensor = torch.ones(300_000)
    dist.all_reduce(tensor)
    gpu.synchronize()
    if rank == victim:
        gpu.hold(60)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == victim:
        time.sleep(0.5)  # the others' streams have been given all by now, and wait
        say("dying at", time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        work.get_future().wait()  # the GPU has not done it
        tensor.tolist()
        work.wait()
    finally:
        gpu.settle()
        say("the stream came to its end")
    say("went on")
"""


@pytest.mark.parametrize(
    ("victim", "machines", "mpi"), [(0, "", "none"), pytest.param(1, "001", "current", marks=pytest.mark.thorough)]
)
def test_streams_of_a_process_group_that_wait_for_a_killed_rank(victim: int, machines: str, mpi: str) -> None:
    result = run(DEATH_IN_A_GROUP, str(victim), n=3, machines=machines, alone=True, mpi=mpi)
    check_end(result, f"rank {victim} (pid", "died without a word")
    assert "the stream came to its end" in result.stdout, result
    assert "went on" not in result.stdout
