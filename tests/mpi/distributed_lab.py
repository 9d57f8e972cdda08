"""Process groups over hvdlite in tests: ranks that meet without being told anything, on any grouping into nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvdlite.distributed
import hvdlite.torch as hvd
from conftest import WORLD
from hvdlite import mpi
from hvdlite.distributed import creation
from machines_lab import Machines, machines

assert hvdlite.distributed  # registers the backend
RANK, SIZE = WORLD.rank, WORLD.size
NODES: list[Machines] = [(0,) * SIZE]
if mpi.was_imported() and SIZE > 1:
    NODES += [tuple(rank * 2 // SIZE for rank in range(SIZE))]
CHUNK = 2048  # bytes; small, so that long paths run on little data
SIZES = [0, 1, 7, 63, 64, 65, 511, 512, 513, 1024, 2049, 5003]


@contextmanager
def process_group(
    machine_of: Machines = NODES[0],
    timeout_s: float = 60.0,
    backend: str = "hvdlite",
    *,
    is_small: bool = True,
    **options: Any,
) -> Iterator[dist.ProcessGroup]:
    """torch's default group; ``options`` of init_process_group."""
    with pytest.MonkeyPatch.context() as patch:
        if is_small:
            for name in ("CHUNK_BYTES", "STAGING_BYTES", "SEGMENT_BYTES"):
                patch.setenv(f"HVDLITE_{name}", str(CHUNK))
        patch.setattr(creation, "machine", lambda: (str(machine_of[RANK]), "", 0))
        with machines(machine_of):
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **options)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()
        if torch.__version__ < "2.7":  # it tells only NCCL's groups
            group.shutdown()


@contextmanager
def beside_hvdlite(*, hvdlite_first: bool) -> Iterator[None]:
    """A process group and hvdlite at work, of which that begins first; hvdlite ends first, and the group goes on."""
    if hvdlite_first:
        hvd.init()
    with process_group():
        if not hvdlite_first:
            hvd.init()
        try:
            yield
        finally:
            hvd.shutdown()
        dist.barrier()


def told(value: object) -> list[object]:
    """Every rank's ``value``, by other means than those that are tested."""
    return WORLD.allgather(value)


def of_rank(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What ``rank`` contributes: integers that are exact in every type, also added up."""
    return ((torch.arange(numel) + rank) % 7).to(dtype)


def total(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum((of_rank(rank, numel, torch.int64) for rank in range(SIZE)), torch.zeros(numel, dtype=torch.int64)).to(
        dtype
    )


def net() -> torch.nn.Sequential:
    """A small model, the same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.LayerNorm(40), torch.nn.GELU(), torch.nn.Linear(40, 8))


def trained(model: torch.nn.Module, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Three steps on a rank's own batches, which ``place`` puts where the model is."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + RANK)
        x, y = (place(torch.randn(4, width, generator=generator)) for width in (12, 8))
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
