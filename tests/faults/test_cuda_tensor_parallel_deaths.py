"""A rank goes wrong while streams of its team wait for its own: they are let go, and the next call says who it was."""

from __future__ import annotations

from pathlib import Path

from fault_lab import check_end, run

SPLIT = f"""
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch
import hvdlite.torch as hvd, hvdlite.tensor_parallel as tp
from cuda_lab import simulated
from cuda_torch import TorchOnGpu

kind, method = sys.argv[1:]
hvd.init()
team = tp.Team(method=method)
gpu = TorchOnGpu(simulated(), late=0.0)
with gpu.in_hvdlite():
    x, weight = torch.ones(2 * hvd.size(), 4, device="cuda"), torch.ones(4, 4, device="cuda")
    tp.matmul_reduce_scatter(tp.all_gather_matmul(x, weight, team), weight, team).tolist()
    if hvd.rank() == 1:
        gpu.cuda.launch(gpu.stream, lambda: time.sleep(60 if kind == "die" else 3))
    y = tp.matmul_reduce_scatter(tp.all_gather_matmul(x, weight, team), weight, team)
    if hvd.rank() == 1 and kind == "die":
        time.sleep(0.5)  # the others' streams have been given all by now, and wait
        say("dying at", time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        gpu.cuda.synchronize(gpu.stream)
        say("the stream came to its end")
        tp.all_gather_matmul(x, weight, team)
    except hvd.HorovodInternalError as error:
        say("said:", str(error).splitlines()[0])
        if kind == "die":
            raise
        time.sleep(4)  # the launcher ends all once one has ended
    else:
        say("went on")
"""


def test_a_killed_rank() -> None:
    result = run(SPLIT, "die", "ring_exchange", n=3, alone=True)
    check_end(result, "rank 1 (pid", "died without a word")
    assert "the stream came to its end" in result.stdout, result


def test_a_gpu_that_does_not_come() -> None:
    """Only who looks after the streams can notice: all threads have met."""
    limits = {"HVDLITE_UB_TIMEOUT_SECONDS": "0.5", "HVDLITE_FAILURE_GRACE_SECONDS": "20"}
    result = run(SPLIT, "late", "pipeline", n=2, env=limits)
    said = [line for line in result.stdout.splitlines() if line.startswith("said:")]
    assert len(said) == 2, str(result)
    for text in said:  # the same, unless both noticed at one time
        assert "all_gather_matmul" in text, text
        assert "has not done it in 0.5 s" in text, text
