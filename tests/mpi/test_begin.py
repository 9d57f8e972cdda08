"""Training that begins with different parameters: the first rank says which ones, and which ranks have others."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.errors import MismatchError
from scales_lab import Scales, needs_two, wrap

pytestmark = [pytest.mark.any_mpi, pytest.mark.usefixtures("running")]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Log lines of this rank."""
    handler = _Lines()
    logging.getLogger("hvdlite").addHandler(handler)
    yield handler.lines
    logging.getLogger("hvdlite").removeHandler(handler)


def model() -> torch.nn.Module:
    """Alike on all ranks; of odd sizes, and not contiguous."""
    made = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5), "b": torch.nn.Conv2d(3, 3, 3), "c": torch.nn.Linear(1, 1)})
    made["b"].to(memory_format=torch.channels_last)
    for i, parameter in enumerate(made.parameters()):
        torch.nn.init.constant_(parameter, i)
    return made


def steps(trained: torch.nn.Module, **arguments: Any) -> None:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, trained.named_parameters(), **arguments)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([parameter.sum() for parameter in trained.parameters()]).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_forgotten_broadcast(said: list[str], op: int) -> None:
    if hvd.size() == 1 or (op == hvd.Adasum and hvd.size() == 3):
        pytest.skip("with ranks that can differ")
    trained, last = model(), hvd.size() - 1
    with torch.no_grad():
        if hvd.rank() == last:
            trained["a"].weight[0, 0] += 1
        if hvd.rank():
            trained["b"].bias[2] += 1
    steps(trained, op=op)
    assert len(said) == (hvd.rank() == 0)
    if said:
        others = ", ".join(map(str, range(1, hvd.size())))
        assert f"'a.weight' of rank {last}; 'b.bias' of rank{'s' * (last > 1)} {others}, unlike rank 0's." in said[0]
        assert "hvd.broadcast_parameters" in said[0]


def test_optimizers_that_ranks_step_in_different_orders(said: list[str]) -> None:
    """They meet one another's gradients, of the same shapes."""
    if hvd.size() == 1:
        pytest.skip("with ranks that can differ")
    trained = [model(), model()]
    for parameter in trained[1].parameters():
        torch.nn.init.constant_(parameter, -1)
    for one in reversed(trained) if hvd.rank() == 1 else trained:
        steps(one)
    assert len(said) == (2 if hvd.rank() == 0 else 0)
    assert all("several optimizers, step them in the same order" in line for line in said)


def test_equal_models_that_ranks_step_in_different_orders() -> None:
    """Nothing but the order in which their optimizers were made tells them apart."""
    if hvd.size() == 1:
        pytest.skip("with ranks that can differ")
    models = [model(), model()]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(one.parameters(), lr=0.5)) for one in models]
    first = int(hvd.rank() == 1)
    others = "rank 0" if hvd.size() == 2 else "ranks 0" if hvd.size() > 3 else "ranks 0 and 2"
    for _ in range(2):  # the same again where a program goes on
        models[first]["a"].weight.sum().backward()
        with pytest.raises(MismatchError, match=rf"'group0\.0'.* number 1 on {others}.* but number 2 on rank 1,"):
            optimizers[first].step()
    assert torch.equal(models[first]["a"].weight, model()["a"].weight)


def test_a_copy_that_one_rank_has_of_an_optimizer_does_not_count() -> None:
    trained = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(trained.parameters(), lr=0.5))
    copied = copy.deepcopy(optimizer) if hvd.rank() == 0 else None
    trained["a"].weight.sum().backward()
    optimizer.step()
    assert torch.equal(trained["a"].weight, model()["a"].weight - 0.5)
    del copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_parameters_are_no_news(said: list[str], dtype: torch.dtype) -> None:
    steps(model().to(dtype))
    assert said == []


def test_only_ranks_of_the_set_are_compared(said: list[str]) -> None:
    if hvd.size() < 3:
        pytest.skip("with ranks outside the set")
    made = hvd.add_process_set([0, 2])
    trained = model()
    with torch.no_grad():
        if hvd.rank() == 1:
            trained["a"].weight[0, 0] += 1
    steps(trained, process_set=made)
    assert said == []
    hvd.remove_process_set(made)


def test_ranks_with_other_names_or_dtypes_in_the_middle_are_told() -> None:
    needs_two()
    odd = hvd.rank() == 1
    layers: dict[str, torch.nn.Module] = {"a": torch.nn.Linear(1, 1), "head" if odd else "fc": torch.nn.Linear(1, 1)}
    renamed = torch.nn.Sequential(OrderedDict([*layers.items(), ("z", torch.nn.Linear(1, 1))]))
    optimizer = wrap(renamed)
    renamed(torch.ones(1, 1)).sum().backward()
    with pytest.raises(MismatchError, match=r"number 3 of them is 'fc\.weight' on .* but 'head\.weight' on rank 1\. "):
        optimizer.step()
    scales = Scales([(3,), (5,), (7,)])
    scales.p[1].data = scales.p[1].data.to(torch.float64 if odd else torch.float32)
    optimizer = wrap(scales)
    scales.loss(1.0).backward()
    with pytest.raises(MismatchError, match=r"'p\.1' is of float32 on .* but float64 on rank 1\. Convert"):
        optimizer.step()
