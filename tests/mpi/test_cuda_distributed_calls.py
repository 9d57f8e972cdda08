"""The tests of test_distributed.py and test_distributed_reductions.py, with every tensor on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import nccl_lab
from cuda_distributed import on_gpu
from distributed_lab import NODES, RANK, SIZE, process_group
from test_distributed import (
    test_contradictions_are_named_on_all_ranks,
    test_memory_that_is_not_contiguous,
    test_movements,
    test_several_calls_that_nobody_waits_for_do_not_block,
    test_several_tensors_at_once,
    test_uneven_shares,
)
from test_distributed_reductions import (
    test_bool_and_complex_in_every_reduction,
    test_other_reductions,
    test_reductions,
)

__all__ = [
    "test_bool_and_complex_in_every_reduction",
    "test_contradictions_are_named_on_all_ranks",
    "test_memory_that_is_not_contiguous",
    "test_movements",
    "test_other_reductions",
    "test_reductions",
    "test_several_calls_that_nobody_waits_for_do_not_block",
    "test_several_tensors_at_once",
    "test_uneven_shares",
]

if SIZE == 1:
    pytest.skip("test_cuda_distributed.py has calls of one rank", allow_module_level=True)

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.not_with_three_ranks,
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),
]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    by_nccl = "GPUSIM_NO_PEER" in os.environ  # tests/faults/test_gpu_kinds.py
    if by_nccl:
        nccl_lab.simulated()
    with on_gpu(RANK if by_nccl else 0, seed=RANK, late=0.05, everywhere=True):
        yield


# Three ranks of one node find nothing that two, and test_cuda_distributed.py with three, do not.
@pytest.fixture(scope="module", params=NODES[1:] if SIZE == 3 else NODES, ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    with process_group(request.param) as group:
        yield group
