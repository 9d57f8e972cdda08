"""Mistakes in tensor parallelism are the same error on every rank, and the team works on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured

import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
from hvdlite.errors import MismatchError, UsageError

pytestmark = [pytest.mark.any_mpi, pytest.mark.usefixtures("running")]


def everywhere_the_same(team: tp.Team, kind: type[Exception], call: Callable[[], object], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    texts = hvd.allgather_object(str(caught.value))
    assert len(set(texts)) == 1, texts
    for word in words:
        assert word in texts[0], texts[0]
    assert torch.equal(tp.gather_rows(torch.ones(1, 1), team), torch.ones(team.size, 1))


def test_ranks_that_contradict_one_another(team: tp.Team) -> None:
    if team.size == 1:
        pytest.skip("one rank agrees with itself")
    last = team.rank == team.size - 1
    x, weight = torch.ones(team.size, 4), torch.ones(4, 4)
    everywhere_the_same(
        team,
        MismatchError,
        lambda: tp.all_gather_matmul(torch.ones(2 + last, 4), weight, team),
        f"rank {team.size - 1}, exchange ",
        ": all_gather_matmul with a weight (4, 4) of (3, 4) float32",
        "(2, 4)",
    )
    everywhere_the_same(
        team,
        MismatchError,
        lambda: tp.matmul_reduce_scatter(*(t.double() if last else t for t in (x, weight)), team),
        "float64",
        "float32",
    )
    everywhere_the_same(
        team,
        MismatchError,
        lambda: tp.matmul_reduce_scatter(x, weight, team) if last else tp.all_gather_matmul(x, weight, team),
        "matmul_reduce_scatter",
        "all_gather_matmul",
    )
    everywhere_the_same(
        team,
        MismatchError,
        lambda: tp.matmul_all_reduce(torch.ones(100_000 if last else 1, 4), weight, team),
        "of (100000, 4) float32",
        "of (1, 4) float32",
    )
    logits = torch.zeros(2, 3)
    everywhere_the_same(
        team,
        MismatchError,
        lambda: tp.vocabulary_parallel_cross_entropy(logits, torch.tensor([0, int(last)]), team),
        "targets that add up to 1",
    )


def test_a_backward_that_fails_half_way_is_forgotten() -> None:
    """Only some ranks had begun to gather: by a measurement, later on, these alone would go on with it."""
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    team = tp.Team(method="auto")
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    tp.all_gather_matmul(x, weight, team).sum().backward()  # so that nothing is left to measure
    product = tp.all_gather_matmul(x, weight, team)

    def call() -> None:
        if team.rank == 0:
            product.sum().backward()
        else:
            tp.matmul_all_reduce(x, weight, team)

    everywhere_the_same(team, MismatchError, call, "backward of all_gather_matmul", ": matmul_all_reduce")
    new = torch.ones(5, 4)
    assert torch.equal(tp.matmul_all_reduce(new, weight, team), 4.0 * team.size * torch.ones(5, 4))


def test_a_rank_that_cannot_take_part(team: tp.Team) -> None:
    wrong = team.rank == team.size - 1
    x, weight = torch.ones(team.size, 4), torch.ones(4, 4)
    who = f"rank {team.size - 1}: "
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: tp.all_gather_matmul(x[:, :3] if wrong else x, weight, team), "do not fit; pass (rows, ..., n)"),
        (lambda: tp.all_gather_matmul(x, weight.double() if wrong else weight, team), "are mixed"),
        (lambda: tp.matmul_all_reduce(x.int() if wrong else x, weight, team), "dtype torch.int32"),
        (lambda: tp.matmul_reduce_scatter(x.to_sparse() if wrong else x, weight, team), "pass dense tensors"),
        (lambda: tp.all_gather_matmul(x, weight, team, torch.ones(3 if wrong else 4)), "bias (3,) does not fit"),
        (lambda: tp.gather_rows([x] if wrong else x, team), "expected a torch.Tensor"),  # type: ignore[arg-type]
    ]
    for call, text in cases:
        everywhere_the_same(team, UsageError, call, who, text)
    embedding = tp.VocabularyParallelEmbedding(12, 2, team)
    words = torch.tensor([0, 12 if wrong else 11])
    everywhere_the_same(team, UsageError, lambda: embedding(words), who, "from 0 to 12 are not of a vocabulary of 12")
    everywhere_the_same(
        team,
        UsageError,
        lambda: tp.vocabulary_parallel_cross_entropy(torch.zeros(2, 3), torch.zeros(2 - wrong).long(), team),
        "do not fit targets (1,)",
    )


def test_what_does_not_divide(team: tp.Team) -> None:
    with pytest.raises(ValueError, match="reduction is 'most'"):
        tp.vocabulary_parallel_cross_entropy(torch.zeros(1, 1), torch.zeros(1).long(), team, reduction="most")
    with pytest.raises(ValueError, match="method is 'ring'"):
        tp.Team(method="ring")
    with pytest.raises(ValueError, match="tp_size is 5, which does not divide"):
        tp.init(5)
    if team.size == 1:
        return
    everywhere_the_same(
        team,
        UsageError,
        lambda: tp.matmul_reduce_scatter(torch.ones(team.size + 1, 2), torch.ones(2, 2), team),
        f"do not divide among {team.size} ranks",
    )
    embedding = tp.VocabularyParallelEmbedding(12, 2, team, sequence_parallel=True)
    everywhere_the_same(team, UsageError, lambda: embedding(torch.zeros(1).long()), "do not divide among")
    for make in (
        lambda: tp.ColumnParallelLinear(2, 12 * team.size + 1, team),
        lambda: tp.RowParallelLinear(12 * team.size + 1, 2, team),
        lambda: tp.VocabularyParallelEmbedding(12 * team.size + 1, 2, team),
    ):
        with pytest.raises(ValueError, match=f"does not divide {12 * team.size + 1}"):
            make()


def test_names_and_settings_of_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NVTE_UB_SOCKET_IFNAME", "eth0")
    with caplog.at_level(logging.WARNING, "hvdlite"):
        grid = tp.initialize_userbuffers((4 * hvd.size(), 8), hvd.size(), torch.float32, bootstrap_backend="gloo")
        tp.gather_rows(torch.ones(1, 1), grid.tp)
    said = [text for text in caplog.messages if "tensor parallelism" in text]
    assert [("bootstrap" in text, "NVTE_UB_SOCKET_IFNAME" in text) for text in said] == (
        [(True, False), (False, True)] if hvd.rank() == 0 else []
    )
    with pytest.raises(ValueError, match="method is 'fast'"):
        tp.initialize_userbuffers((4, 8), hvd.size(), methods="fast")


class Adapted(nn.Linear):
    """Whose outputs are not those of weight and bias alone."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.adapter = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.adapter(x)


def test_a_plan_that_does_not_fit(team: tp.Team) -> None:
    model = nn.ModuleDict({"up": nn.Linear(2, 12), "down": nn.Linear(12, 2)})
    before = dict(model.named_modules())
    split = tp.ColumnParallelLinear.split
    for plan, text in (
        ({"left": split}, "no module of the model matches 'left'; there are up, down"),
        ({"up": split, "u*": split}, "module 'up' matches both 'up' and 'u\\*'"),
    ):
        with pytest.raises(ValueError, match=text):
            tp.parallelize(model, plan, team)
    with pytest.raises(ValueError, match="padding_idx, max_norm"):
        tp.VocabularyParallelEmbedding.split(nn.Embedding(12, 2, padding_idx=0), team)
    for layer in (weight_norm(nn.Linear(12, 12)), l1_unstructured(nn.Linear(12, 12), "weight", 0.5), Adapted(12, 12)):
        for kind in (tp.ColumnParallelLinear, tp.RowParallelLinear):
            with pytest.raises(ValueError, match=r"cannot be split: a (Column|Row)ParallelLinear has bias, weight\. "):
                kind.split(layer, team)
    with pytest.raises(ValueError, match="cannot be split: a VocabularyParallelEmbedding has weight"):
        tp.VocabularyParallelEmbedding.split(weight_norm(nn.Embedding(12, 2)), team)
    assert dict(model.named_modules()) == before
