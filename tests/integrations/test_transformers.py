"""Trainer and Accelerator: several ranks come to what one process comes to that has the whole batch."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from launching import Result, launch
from small_problem import Rows, flat, loss_of, network
from solve import batches, results_of, sgd, solve

JOB = Path(__file__).with_name("transformers_job.py")


def run(ranks: int, directory: Path, *scenarios: str) -> Result:
    for package in ("accelerate", "transformers"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'hvdlite[transformers]'")
    return launch(ranks, JOB, str(directory), *scenarios, timeout=240).check()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Of one launch with all scenarios of the job: an import of transformers takes longer than all of them."""
    return run(2, tmp_path_factory.mktemp("transformers"))


@pytest.fixture(scope="module")
def results(result: Result) -> list[Any]:
    return [results_of(rank.stdout) for rank in result.ranks]


def close(values: Any, tolerance: float = 1e-12) -> Any:
    return pytest.approx(values, rel=tolerance, abs=tolerance)


def losses(size: int = 8) -> list[float]:
    """Before each step of `sgd`, over the whole batch."""
    model = network()
    optimizer = sgd(model.parameters())
    found = []
    for batch in batches(size, 2, shuffle=False):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def accumulated(optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, last: float, decay: float) -> list[float]:
    """Two epochs of two steps, of two batches and of one, clipped to 0.1; ``last`` is the weight of that one.

    Returns:
        the norms of the gradients.
    """
    norms = []
    for step, batch in enumerate(batches(8, 2, shuffle=False)):
        in_epoch = step % 3
        (loss_of(model, batch) * (last if in_epoch == 2 else 0.5)).backward()
        if in_epoch != 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] -= decay
    return norms


def test_torch_distributed_is_never_started(results: list[Any]) -> None:
    assert [result["torch.distributed"] for result in results] == [False, False]


def test_trainer_with_an_optimizer_of_the_user(results: list[Any]) -> None:
    for result in results:
        assert result["sgd"]["weights"] == close(solve(sgd, shuffle=False))
        assert result["sgd"]["losses"] == close(losses(), 1e-6)  # averages over the ranks, as float32
        assert result["sgd"]["loss"] == close(sum(losses()) / 6, 1e-6)


def test_trainer_on_three_ranks(tmp_path: Path) -> None:
    for rank in run(3, tmp_path, "sgd").ranks:
        assert results_of(rank.stdout)["sgd"]["weights"] == close(solve(sgd, size=12, shuffle=False))


def test_trainer_with_its_own_adamw_clipping_and_accumulation(results: list[Any]) -> None:
    model = network()
    weights = [parameter for name, parameter in model.named_parameters() if "weight" in name]
    biases = [parameter for name, parameter in model.named_parameters() if "bias" in name]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    norms = accumulated(torch.optim.AdamW(groups, lr=0.05), model, last=1.0, decay=0.0125)
    for result in results:
        assert result["adamw"]["weights"] == close(flat(model))
        assert result["adamw"]["norms"] == close(norms)


def test_trainer_counts_labels_on_all_ranks(results: list[Any]) -> None:
    model = network()
    optimizer = sgd(model.parameters())
    for step, (x, y) in enumerate(batches(8, 2, shuffle=False)):
        first = 3 if step % 3 == 0 else 0
        optimizer.zero_grad()
        loss_of(model, (x[first:], y[first:])).backward()
        optimizer.step()
    assert results[0]["tokens"] == results[1]["tokens"] == close(flat(model))


def test_trainer_shuffles_the_same_way_on_all_ranks(results: list[Any]) -> None:
    expected = Counter(Rows().x[:, 0].tolist())
    epochs = [[result["shuffled"][start : start + 12] for result in results] for start in (0, 12)]
    for epoch in epochs:
        assert Counter(epoch[0] + epoch[1]) == expected
    assert epochs[0] != epochs[1]


def test_rank_0_alone_logs_and_saves_and_all_go_on_from_it(result: Result, results: list[Any]) -> None:
    assert [result["checkpoint"]["saves"] for result in results] == [True, False]
    assert [result["checkpoint"]["logs"] for result in results] == [True, False]
    assert ["'loss'" in rank.stdout for rank in result.ranks] == [True, False]
    for found in results:
        assert found["checkpoint"]["weights"] == close(solve(sgd, shuffle=False))


def test_evaluation_counts_each_row_once(results: list[Any]) -> None:
    model, rows = network(), Rows(22)
    for result in results:
        assert result["evaluate"]["rows"] == 22
        assert result["evaluate"]["total"] == close(model(rows.x).sum().item(), 1e-6)


def test_main_process_first(results: list[Any]) -> None:
    assert [result["main_process_first"] for result in results] == [False, True]


def test_accelerate_with_accumulation_and_clipping(results: list[Any]) -> None:
    model = network()
    accumulated(torch.optim.AdamW(model.parameters(), lr=0.05), model, last=0.5, decay=0.0)
    assert results[0]["accelerate"] == results[1]["accelerate"] == close(flat(model))


def test_backward_of_the_loss_itself(results: list[Any]) -> None:
    expected = close(solve(sgd, shuffle=False))
    assert results[0]["accelerate_backward"] == results[1]["accelerate_backward"] == expected


def test_collectives_of_accelerate(results: list[Any]) -> None:
    for rank, result in enumerate(results):
        found = result["accelerate_collectives"]
        assert found["world"] == [rank, 2, rank == 0]
        assert sorted(chain.from_iterable(found["shuffled"])) == list(range(11))
        assert found["shuffled"] == results[0]["accelerate_collectives"]["shuffled"]
        assert list(chain.from_iterable(found["objects"])) == [str(i) for i in range(11)]
        assert found["gathered"] == [0, 1, 1]
        assert (found["sum"], found["mean"]) == ([3.0], [1.5])
        assert found["padded"] == [[[1.0, -1.0], [1.0, 1.0]][rank]] * 2
        assert found["padded_first"] == [[0.0, 1.0], [1.0, 1.0]][rank]


def test_a_subclass_of_trainer_becomes_distributed(results: list[Any]) -> None:
    expected = solve(sgd, shuffle=False)  # twice the loss at half the learning rate
    model = network()
    torch.nn.utils.vector_to_parameters(torch.tensor(expected, dtype=torch.float64), model.parameters())
    for result in results:
        assert result["subclass"]["weights"] == close(expected)
        assert result["subclass"]["predicted"] == close(model(Rows(22).x).flatten().tolist())


def test_save_state(results: list[Any]) -> None:
    assert results[0]["save_state"] and results[1]["save_state"]


def test_misuse(results: list[Any]) -> None:
    for result in results:
        arguments, reduction, ranks = result["misuse"]
        assert arguments == "TypeError: args is a TrainingArguments; pass HvdliteTrainingArguments to HvdliteTrainer"
        assert reduction == "ValueError: reduction is 'median'; pass one of sum, mean, max, none"
        assert ranks.startswith(
            "RuntimeError: accelerate was initialized as MULTI_CPU already; make HvdliteAccelerator"
        )
