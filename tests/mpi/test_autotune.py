"""Autotuning between real ranks: training is the same with it, all ranks choose the same, a choice can be loaded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import hvdlite
import hvdlite.torch as hvd
from backend_lab import RANK, SIZE, reduced
from hvdlite.autotune.log import Choice, TuningLog, Workload, read_choice
from hvdlite.config import Config, Tunable
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import ConfigError, MismatchError
from hvdlite.mpi import MpiRanks
from hvdlite.operations.configure import configure
from runtime_lab import LAYOUTS, TINY, Machines, Tensor, agree, allreduce, running

pytestmark = pytest.mark.up_to_three_ranks

WORLD = MPI.COMM_WORLD
LAYERS, WIDTH = 12, 24
BUCKET_BYTES = 4096  # a layer has 2400, so every other size makes other buckets
GRADIENT_BYTES = LAYERS * (WIDTH + 1) * WIDTH * 4


@pytest.fixture(autouse=True)
def _needs_two() -> None:
    if SIZE == 1:
        pytest.skip("one rank has nothing to tune")


@contextmanager
def started(**settings: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BUCKET_BYTES": BUCKET_BYTES, **settings}.items():
            patch.setenv(f"HVDLITE_{name}", str(value))
        hvd.init()
    yield
    hvd.shutdown()


def settings() -> Tunable:
    """Of this rank; the same on all."""
    own = Tunable.of(hvdlite.runtime().group.config)
    assert set(hvd.allgather_object(own)) == {own}
    return own


def is_tuning(optimizer: Any) -> bool:
    return optimizer._hvd_reducer._tuner is not None


def train(steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """(losses of this rank, parameters), the same every time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    torch.manual_seed(1 + RANK)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert not is_tuning(optimizer)
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.any_mpi
def test_training_is_the_same_and_all_ranks_choose_the_same(shared_path: Path) -> None:
    log = shared_path / "log.csv"
    with started():
        losses, parameters = train(100)
    with started(AUTOTUNE=1, AUTOTUNE_LOG=log if RANK == 0 else shared_path / "of another rank"):
        tuned_losses, tuned_parameters = train(100)
        assert tuned_losses == losses
        assert all(map(torch.equal, tuned_parameters, parameters))
        choice = read_choice(str(log))
        assert choice == Choice(Workload(SIZE, 1, GRADIENT_BYTES), settings())
        tried = {int(line.split(",")[5]) for line in log.read_text().splitlines()[1:]}
        assert {BUCKET_BYTES // 4, BUCKET_BYTES, 4 * BUCKET_BYTES} <= tried
    assert [path.name for path in shared_path.iterdir()] == ["log.csv"]


@pytest.mark.any_mpi
@pytest.mark.parametrize("autotune", [0, 1])
def test_a_choice_is_loaded(shared_path: Path, autotune: int) -> None:
    """Rank 0 alone has the file."""
    log = shared_path / "log.csv"
    found = Tunable.of(Config())._replace(bucket_bytes=1024)
    if RANK == 0:
        TuningLog(str(log), Workload(SIZE, 1, GRADIENT_BYTES)).choice(99, found)
    with started():
        losses, parameters = train(10)
    with started(AUTOTUNE=autotune, AUTOTUNE_LOAD=log if RANK == 0 else shared_path / "nowhere"):
        before = hvd.statistics()["submissions"]
        tuned_losses, tuned_parameters = train(10)
        assert hvd.statistics()["submissions"] - before > 9 * 2 * LAYERS  # a bucket each: no two share 1024 bytes
        assert settings() == found
        assert tuned_losses == losses
        assert all(map(torch.equal, tuned_parameters, parameters))


def test_layers_that_communicate_are_no_optimizers() -> None:
    """They have numbers as well, and the optimizer of a model with them is the first one all the same."""
    with started(AUTOTUNE=1):
        model = torch.nn.Sequential(hvd.SyncBatchNorm(WIDTH), *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        assert is_tuning(optimizer)


@pytest.mark.any_mpi
def test_what_rank_0_cannot_load_is_an_error_on_all(shared_path: Path) -> None:
    path = shared_path / "none.csv"
    with pytest.raises(ConfigError, match=f"HVDLITE_AUTOTUNE_LOAD={path}: there is no such file"):
        hvdlite.Runtime(MpiRanks(WORLD), Config(autotune_load=str(path) if RANK == 0 else ""))


@pytest.mark.any_mpi
def test_ranks_that_join_again_and_again() -> None:
    """In every epoch another rank is the first whose data end."""
    with started(AUTOTUNE=1):
        parameters = [torch.nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(LAYERS)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
        total = 0
        for epoch in range(8):
            steps = [15 + 3 * ((rank + epoch) % SIZE) for rank in range(SIZE)]
            for _ in range(steps[RANK]):
                optimizer.zero_grad()
                sum((RANK + 1) * parameter.sum() for parameter in parameters).backward()
                optimizer.step()
            last = hvd.join()
            assert last in [rank for rank in range(SIZE) if steps[rank] == max(steps)]
            hvd.broadcast_parameters(enumerate(parameters), root_rank=last)
            total += sum((rank + 1) * count for rank, count in enumerate(steps))
            assert all((parameter == -total).all() for parameter in parameters)
            settings()
        assert not is_tuning(optimizer)


@pytest.mark.parametrize("machine_of", LAYOUTS, ids=lambda machine_of: "".join(map(str, machine_of)))
def test_settings_change_between_the_same_two_operations(machine_of: Machines) -> None:
    """While others are in flight, which every rank submits in an order of its own."""
    names = [f"tensor {i}" for i in range(30)]
    rng = random.Random(RANK)
    with running(WORLD, TINY, machine_of) as runtime:
        default = Tunable.of(TINY)
        for change in [
            default._replace(segment_bytes=4096),
            default._replace(segment_bytes=64, small_bytes=0),
            default._replace(small_bytes=1 << 20, rails=1),
            default,
        ]:
            tensors = {name: Tensor.input(100 * i, DType.FLOAT32, i) for i, name in enumerate(names)}
            order = rng.sample(names, len(names))
            handles = [allreduce(runtime, tensors[name], name=name) for name in order[:15]]
            configure(runtime.group, change)
            assert Tunable.of(runtime.group.config) == change
            handles += [allreduce(runtime, tensors[name], name=name) for name in order[15:]]
            for handle in handles:
                handle.wait()
            expected = (reduced(ReduceOp.SUM, 100 * i, DType.FLOAT32, salt=i) for i in range(len(names)))
            agree(WORLD, *(tensors[name].problem(value, name) for name, value in zip(names, expected, strict=True)))
        with pytest.raises(MismatchError, match=r"configure 'configure.noname': settings is \(1, "):
            configure(runtime.group, default._replace(bucket_bytes=1 + RANK))
