"""Tensor parallelism on several nodes: teams within nodes where they can be, else unfused; and after a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
from hvdlite.errors import UsageError
from hvdlite.tensor_parallel.shared_meeting import SharedMeeting
from hvdlite.tensor_parallel.unfused import OperationMeeting
from runtime_lab import LAYOUTS, SIZE, Machines, machines
from tensor_parallel_lab import Transformer, batch, close, integers

pytestmark = pytest.mark.any_mpi

SOME = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1)] if SIZE == 4 else LAYOUTS


@pytest.fixture(scope="module", params=SOME, ids=str)
def layout(request: pytest.FixtureRequest) -> Iterator[Machines]:
    with machines(request.param):
        hvd.init()
        yield request.param
        hvd.shutdown()


def works(team: tp.Team) -> None:
    x = integers(team.size, 4).requires_grad_()
    own = x[team.rank : team.rank + 1].detach().requires_grad_()
    weight = integers(4, 2, salt=1)
    y = tp.all_gather_matmul(own, weight, team)
    assert torch.equal(y, x @ weight)
    y.sum().backward()
    assert torch.equal(own.grad, team.size * weight.sum(1, keepdim=True).t())  # type: ignore[arg-type]


def test_one_team_of_all_ranks(layout: Machines, caplog: pytest.LogCaptureFixture) -> None:
    nodes = len(set(layout))
    with caplog.at_level(logging.WARNING, "hvdlite"):
        team = tp.init(SIZE).tp
        for _ in range(3):
            works(team)
    warnings = [record.getMessage() for record in caplog.records if "tensor parallelism" in record.getMessage()]
    assert len(warnings) == (1 if nodes > 1 and hvd.rank() == 0 else 0)
    if SIZE > 1:
        assert isinstance(team.meeting, OperationMeeting if nodes > 1 else SharedMeeting)
    if warnings:
        assert f"are on {nodes} nodes (" in warnings[0]
        assert "cannot map each other's memory" in warnings[0]


def test_windows_need_one_node(layout: Machines) -> None:
    if len(set(layout)) == 1:
        works(tp.init(SIZE, method="window").tp)
        return
    with pytest.raises(UsageError, match="method='window' needs them on one; pass method='auto' or") as caught:
        tp.init(SIZE, method="window")
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1


def test_teams_of_two_are_within_nodes_where_ranks_allow(layout: Machines) -> None:
    """And a model on a grid of two by two is that of one process."""
    if SIZE != 4:
        pytest.skip("four ranks make a grid of two by two")
    grid = tp.init(2)
    ranks = grid.tp.process_set.ranks
    if layout.count(0) == 2:
        assert len({layout[rank] for rank in ranks}) == 1
        assert isinstance(grid.tp.meeting, SharedMeeting)
    assert set(ranks) & set(grid.dp.ranks) == {hvd.rank()}

    torch.manual_seed(0)
    reference = Transformer().double()
    torch.manual_seed(0)
    model = Transformer().double().split(grid.tp, sequence_parallel=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        process_set=grid.dp,
    )
    own = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        losses = [reference(*batch(step, place)) for place in range(2)]
        own.zero_grad()
        torch.stack(losses).mean().backward()
        own.step()
        optimizer.zero_grad()
        loss = model(*batch(step, grid.dp.rank()))
        close(loss, losses[grid.dp.rank()])
        loss.backward()
        optimizer.step()
    for name, value in tp.unsplit_state_dict(model).items():
        close(value, reference.state_dict()[name])


def test_a_team_lives_through_a_restart() -> None:
    hvd.init()
    team = tp.Team()
    works(team)
    hvd.shutdown()
    with pytest.raises(RuntimeError, match="call hvd.init"):
        works(team)
    hvd.init()
    works(team)
    hvd.shutdown()
