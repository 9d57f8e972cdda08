"""Collectives of process groups inside what torch.compile makes, as whole graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from distributed_lab import RANK, SIZE, process_group

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.not_with_three_ranks,
    pytest.mark.skipif(SIZE == 1, reason="two find what one does, and to compile takes long"),
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning", "ignore::DeprecationWarning"),
]


def functional_ones(x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    assert group is not None
    total = functional.all_reduce(x, "sum", group)
    everything = functional.all_gather_tensor(total * x, 0, group)
    share = functional.reduce_scatter_tensor(everything, "avg", 0, group)
    return functional.all_to_all_single(share + x, [1] * SIZE, [1] * SIZE, group)


def in_place_ones(x: torch.Tensor) -> torch.Tensor:
    total = x * 2
    dist.all_reduce(total)
    everything = total.new_empty(SIZE * SIZE)
    dist.all_gather_into_tensor(everything, total * x)
    return everything + 1


@pytest.mark.parametrize("step", [functional_ones, in_place_ones])
def test_a_whole_graph_is_what_its_calls_are(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with process_group():
        x = torch.arange(float(SIZE)) + 10 * RANK
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert torch.equal(compiled(x), step(x))
        torch._dynamo.reset()
