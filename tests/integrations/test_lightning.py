"""The Lightning strategy: several ranks come to what one process comes to that has the whole batch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from launching import launch
from small_problem import Rows, loss_of, network
from solve import batches, results_of, sgd, solve

JOB = Path(__file__).with_name("lightning_job.py")


def run(library: str, ranks: int, directory: Path, *scenarios: str) -> list[Any]:
    """The results of every rank."""
    if find_spec(library.split(".")[0]) is None:
        pytest.skip(f"{library} is not installed: pip install 'hvdlite[lightning]'")
    result = launch(ranks, JOB, library, str(directory), *scenarios, timeout=240).check()
    return [results_of(rank.stdout) for rank in result.ranks]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of one launch with all scenarios of the job: an import of Lightning takes longer than all of them."""
    return run("lightning.pytorch", 2, tmp_path_factory.mktemp("lightning"))


def close(values: Any, tolerance: float = 1e-12) -> Any:
    return pytest.approx(values, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("scenario", ["sgd", "registered_name"])
def test_sgd(results: list[Any], scenario: str) -> None:
    assert results[0][scenario] == results[1][scenario] == close(solve(sgd))


@pytest.mark.parametrize(("library", "ranks"), [("lightning.pytorch", 3), ("pytorch_lightning", 2)])
def test_sgd_elsewhere(tmp_path: Path, library: str, ranks: int) -> None:
    for result in run(library, ranks, tmp_path, "sgd"):
        assert result["sgd"] == close(solve(sgd, size=4 * ranks))


def test_adamw_with_accumulation_clipping_and_a_scheduler(results: list[Any]) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    norms = []
    for step, batch in enumerate(batches(8, 2)):
        in_epoch = step % 3
        if in_epoch != 1:  # windows of two batches, and what is left of an epoch
            optimizer.zero_grad()
        (loss_of(model, batch) / 2).backward()
        if in_epoch != 0:
            norms.append(model[0].weight.grad.norm().item())  # type: ignore[union-attr, operator]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        if in_epoch == 2:
            scheduler.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    for result in results:
        assert result["adamw"]["weights"] == close(weights)
        assert result["adamw"]["norms"] == close(norms)  # on_after_backward() sees the average


def test_lbfgs_calls_its_closure_alike_everywhere(results: list[Any]) -> None:
    expected = solve(lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4))
    assert results[0]["lbfgs"] == results[1]["lbfgs"] == close(expected, 1e-8)


def test_sync_batchnorm(results: list[Any]) -> None:
    assert results[0]["batch_norm"] == results[1]["batch_norm"] == close(solve(sgd, batch_norm=True))


def test_an_overflow_on_one_rank_skips_the_step_of_all(results: list[Any]) -> None:
    for result in results:
        assert result["overflow"]["scales"] == [1024.0, 512.0, 512.0]
        assert result["overflow"]["weights"] == close(solve(sgd, epochs=1, clip=0.1, skip=1))


def test_manual_optimization_with_two_optimizers(results: list[Any]) -> None:
    model = network()
    first, second = sgd(model[0].parameters()), torch.optim.AdamW(model[2].parameters(), lr=0.05)
    for batch in batches(8, 2):
        first.zero_grad()
        second.zero_grad()
        loss_of(model, batch).backward()
        model(batch[0]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.5)
        first.step()
        second.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    assert results[0]["manual"] == results[1]["manual"] == close(weights)


def test_rank_0_alone_writes_a_checkpoint_from_which_all_go_on(results: list[Any]) -> None:
    assert [result["checkpoint"]["writes"] for result in results] == [1, 0]
    for result in results:
        assert result["checkpoint"]["exists"]
        assert result["checkpoint"]["weights"] == close(solve(sgd))


def test_collectives_of_a_module(results: list[Any]) -> None:
    for rank, result in enumerate(results):
        assert result["collectives"] == {
            "world": [rank, 2, rank == 0],
            "gathered": [[1.0, 0.0], [1.0, 1.0]],
            "gradient": [2.0 * 10**rank] * 2,  # of the sum of what both ranks made of it
            "plain": [0, 1],
            "word": "from 1",
            "sum": 3,
            "mean": 1.5,
            "max": 2.0,
            "all": False,
            "any": True,
            "metric": close(Rows().y.mean().item(), 1e-6),
            "logged": 0.5,
        }


def test_validation_prediction_and_early_stopping(results: list[Any]) -> None:
    model = network()
    torch.nn.utils.vector_to_parameters(torch.tensor(solve(sgd), dtype=torch.float64), model.parameters())
    rows = Rows()
    for rank, result in enumerate(results):
        found = result["evaluation"]
        assert found["epochs"] == 2
        assert found["loss"] == close(loss_of(model, (rows.x, rows.y)).item(), 1e-6)
        assert found["predicted"] == close(model(rows.x[rank::2]).flatten().tolist())


def test_misuse(results: list[Any]) -> None:
    for result in results:
        assert result["misuse"] == [
            "leave out backward_passes_per_step; pass accumulate_grad_batches to the Trainer",
            "reduce_op is 'median'; pass one of mean, avg, sum, min, max, product",
        ]
