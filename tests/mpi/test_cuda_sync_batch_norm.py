"""SyncBatchNorm on GPUs, against one process on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cuda_lab import simulated
from cuda_torch import TorchOnGpu
from test_sync_batch_norm import ROWS, compare

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.not_with_three_ranks,
    pytest.mark.up_to_three_ranks,
    pytest.mark.usefixtures("running"),
]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[TorchOnGpu]:
    with TorchOnGpu(simulated()).in_hvdlite() as found:
        yield found


@pytest.mark.parametrize("rest", [(), (3, 4)], ids=["2D", "4D"])
@pytest.mark.parametrize("rows", ROWS)
def test_is_batch_normalization_of_the_whole_batch(rows: str, rest: tuple[int, ...]) -> None:
    compare(ROWS[rows], rest, torch.float64, 1e-12, device="cuda")


@pytest.mark.parametrize("arguments", [{"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_arguments(arguments: dict[str, Any]) -> None:
    compare(ROWS["uneven"], (3, 4), torch.float64, 1e-12, device="cuda", **arguments)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=str)
def test_narrow_inputs(dtype: torch.dtype, tolerance: float) -> None:
    compare(ROWS["uneven"], (3, 4), dtype, tolerance, device="cuda")


def test_channels_last() -> None:
    compare(ROWS["uneven"], (3, 4), torch.float64, 1e-12, torch.channels_last, device="cuda")
