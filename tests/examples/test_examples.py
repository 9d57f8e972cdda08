"""The examples run as they are, and do what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hvdlite.timeline.report import build_report
from hvdlite.timeline.trace_file import read_trace
from launching import Result

Launch = Callable[..., Result]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# A step takes milliseconds; with such a warm-up the learning rate does not depend on the number of steps.
TINY_GPT = ("--batch-size=2", "--context=16", "--width=32", "--layers=1", "--heads=2", "--log-every=10")
SMALL_GPT = (*TINY_GPT, "--warmup=1000")


def final_loss(output: str) -> str:
    found = re.search(r"validation loss ([\d.]+)", output)
    assert found, output
    return found[1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_allreduce_prints_what_every_rank_has(launch: Launch, ranks: int) -> None:
    result = launch(ranks, EXAMPLES / "01_allreduce.py").check()
    total = ranks * (ranks + 1) / 2
    for rank in range(ranks):
        said = result.ranks[rank].stdout
        assert f"rank {rank} of {ranks}: I have {[rank + 1.0, 10.0 * (rank + 1), 100.0 * (rank + 1)]}" in said
        assert f"all have {[total, 10 * total, 100 * total]}" in said
        assert "hello from rank 0" in said


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_digits_reaches_its_accuracy_with_any_number_of_ranks(launch: Launch, ranks: int) -> None:
    pytest.importorskip("sklearn")
    result = launch(ranks, EXAMPLES / "02_digits.py", "--epochs=4", timeout=240).check()
    found = re.search(r"test accuracy (\S+)", result.ranks[0].stdout)
    assert found, result
    assert float(found[1]) > 0.95
    assert not any(rank.stdout or "step/s" in rank.stderr for rank in result.ranks[1:])  # only rank 0 talks


def test_gpt_learns(launch: Launch) -> None:
    result = launch(2, EXAMPLES / "03_stdlib_gpt.py", "--steps=60", *TINY_GPT, "--warmup=10", timeout=120).check()
    losses = [float(loss) for loss in re.findall(r"step .* loss (\S+)", result.ranks[0].stdout)]
    assert losses[0] > 5  # ln(256) = 5.5 knows nothing
    assert losses[-1] < 4


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])  # a recipe resumes on two
def test_gpt_resumes_as_if_never_interrupted(launch: Launch, tmp_path: Path, ranks: int) -> None:
    checkpoint = f"--checkpoint={tmp_path / 'gpt.pt'}"
    script = EXAMPLES / "03_stdlib_gpt.py"
    whole = launch(ranks, script, "--steps=20", *SMALL_GPT).check()
    launch(ranks, script, "--steps=10", checkpoint, *SMALL_GPT).check()
    resumed = launch(ranks, script, "--steps=20", checkpoint, *SMALL_GPT).check()
    assert "resuming" in resumed.ranks[0].stdout and "at step 10" in resumed.ranks[0].stdout
    assert final_loss(resumed.stdout) == final_loss(whole.stdout)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("several", [4, pytest.param(2, marks=pytest.mark.thorough)])
def test_split_gpt_has_the_losses_of_one_process(launch: Launch, tmp_path: Path, several: int) -> None:
    losses, states = [], []
    for ranks, tp_size in ((1, 1), (several, 2)):
        path = tmp_path / f"{ranks}.pt"
        options = ("--steps=12", "--batch-size=2", "--context=16", "--width=32", "--layers=1", "--log-every=4")
        script = EXAMPLES / "04_tensor_parallel_gpt.py"
        said = launch(ranks, script, f"--tp-size={tp_size}", f"--save={path}", *options).check().ranks[0].stdout
        losses.append([float(loss) for loss in re.findall(r"step .* loss (\S+)", said)])
        states.append(torch.load(path, weights_only=True))
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)
    assert states[1].keys() == states[0].keys()
    for name, value in states[1].items():
        torch.testing.assert_close(value, states[0][name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tp-size=1", "--batch-size=3"], "--batch-size 3: must be a multiple of 2 (teams), not 0\n"),
        (["--batch-size=0"], "--batch-size 0: must be a multiple of 1 (teams), not 0\n"),
        (["--heads=1"], "--heads 1: must divide --width 128, and be a multiple of the 2 ranks that share a model\n"),
    ],
    ids=["batch", "no batch", "heads"],
)
def test_split_gpt_refuses_what_cannot_be_shared_evenly(launch: Launch, options: list[str], said: str) -> None:
    result = launch(2, EXAMPLES / "04_tensor_parallel_gpt.py", *options, mpi="none")
    assert (result.returncode, result.leftovers) == (1, ())
    assert said in result.stderr


@pytest.mark.parametrize(
    ("example", "option", "said"),
    [
        ("03_stdlib_gpt.py", "--batch-size=0", "--batch-size 0: must be 1 or more"),
        ("05_fsdp2.py", "--batch-size=0", "--batch-size 0: must be a multiple of 1 (ranks), not 0"),
        ("06_elastic.py", "--kill-at=4", "--kill-at 4: nothing is committed before step 5"),
    ],
)
def test_others_refuse_what_leads_nowhere(launch: Launch, example: str, option: str, said: str) -> None:
    result = launch(1, EXAMPLES / example, option, mpi="none")
    assert result.returncode != 0
    assert said in result.stderr


SHARDED = ("--batch-size=6", "--context=16", "--width=32", "--layers=1", "--heads=2")


def test_a_sharded_gpt_learns(launch: Launch, tmp_path: Path) -> None:
    options = ("--steps=30", "--lr=0.01", "--log-every=0", f"--checkpoints={tmp_path}", *SHARDED)
    said = launch(2, EXAMPLES / "05_fsdp2.py", *options, mpi="none", timeout=240).check().ranks[0].stdout
    assert "29,600 parameters, 14,800 of them on rank 0 of 2" in said
    assert float(final_loss(said)) < 4  # ln(256) = 5.5 knows nothing
    assert sorted(path.name for path in (tmp_path / "30").iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.thorough
def test_a_sharded_gpt_goes_on_with_another_number_of_ranks(launch: Launch, tmp_path: Path) -> None:
    """Under mpirun, under hvdliterun, and under torchrun."""
    script, checkpoints = EXAMPLES / "05_fsdp2.py", f"--checkpoints={tmp_path / 'gpt'}"
    whole = launch(2, script, "--steps=20", *SHARDED, timeout=240).check()
    launch(3, script, "--steps=10", checkpoints, *SHARDED, mpi="none", timeout=240).check()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(script), "--steps=20", checkpoints, *SHARDED]
    resumed = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=True).stdout
    assert "on rank 0 of 2, from step 10" in resumed
    assert float(final_loss(resumed)) == pytest.approx(float(final_loss(whole.stdout)), abs=2e-3)


@pytest.mark.thorough  # mpi/test_timeline.py looks into those of all ranks
def test_gpt_writes_a_timeline_of_all_ranks(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    launch(2, EXAMPLES / "03_stdlib_gpt.py", "--steps=6", f"--timeline={path}", *SMALL_GPT).check()
    report = build_report(read_trace(str(path)))
    assert (report.ranks, len(report.steps)) == (2, 5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_says_that_there_is_none(launch: Launch, ranks: int) -> None:
    said = launch(ranks, EXAMPLES / "07_cuda.py").check().stdout
    assert said == "torch sees no GPU here, so there is nothing to show\n"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_cuda_learns(launch: Launch, ranks: int) -> None:
    said = launch(ranks, EXAMPLES / "07_cuda.py", timeout=120).check().ranks[0].stdout
    found = re.search(r"accuracy (\S+) on images", said)
    assert found, said
    assert float(found[1]) > 0.9


@pytest.mark.parametrize("kill_at", [60, pytest.param(0, marks=pytest.mark.thorough)])
def test_elastic_reaches_its_accuracy_though_a_rank_dies(launch: Launch, kill_at: int) -> None:
    pytest.importorskip("sklearn")
    script = EXAMPLES / "06_elastic.py"
    result = launch(3, script, f"--kill-at={kill_at}", mpi="none", options=["--elastic"], timeout=240).check()
    found = re.search(r"test accuracy (\S+)", result.stdout)
    assert found, result
    assert float(found[1]) > 0.95
    assert ("was killed by signal 9" in result.launcher_output) == (kill_at > 0)
    assert (re.search(r"rank \d of 2 starts at step 60", result.stdout) is not None) == (kill_at > 0)
