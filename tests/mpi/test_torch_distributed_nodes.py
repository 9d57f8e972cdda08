"""DDP, FSDP2 and DTensor between nodes come to the same over hvdlite as over Gloo: some of what one node trains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import test_torch_distributed_training as one_node
from distributed_lab import NODES, process_group
from test_torch_distributed_training import Groups

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.skipif(len(NODES) == 1, reason="one node"),
]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with process_group(NODES[-1], is_small=False) as everybody:
        yield Groups(everybody, dist.new_group(backend="gloo"))


def test_ddp(groups: Groups) -> None:
    one_node.test_ddp(groups, one_node.DDPS["views in small buckets"])


def test_fsdp2(groups: Groups) -> None:
    one_node.test_fsdp2(groups, one_node.FSDPS["default"])


def test_tensor_parallel_by_dtensor(groups: Groups) -> None:
    one_node.test_tensor_parallel_by_dtensor(groups)


def test_dtensor_is_redistributed(groups: Groups) -> None:
    one_node.test_dtensor_is_redistributed(groups, one_node.Partial(), one_node.Shard(0))
    one_node.test_dtensor_is_redistributed(groups, one_node.Shard(0), one_node.Shard(1))
