"""Blocking allreduces that repeat, as one call: the same results, whatever comes between, in a node and across."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hvdlite
import hvdlite.torch as hvd
import machines_lab
from hvdlite.collectives.early import MOST_BYTES  # and of two ranks, what passes at once from elsewhere
from hvdlite.config import Tunable
from hvdlite.operations.allocate import allocate
from hvdlite.operations.configure import configure
from machines_lab import ONE_MACHINE, WORLD, Machines
from prepared_lab import REPEATS, SMALL, early_bytes, freeze, runs, total
from torch_lab import REDUCING, rank_input

assert runs  # a fixture
WINDOW = 128 << 10
machine_of = machines_lab.machine_of

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.skipif(WORLD.size == 1, reason="needs ranks that wait for one another"),
]


@pytest.mark.parametrize("dtype", REDUCING, ids=str)
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Max, hvd.Average], ids=["sum", "max", "average"])
def test_what_repeats_has_the_same_result(runs: list[int], dtype: torch.dtype, op: int) -> None:
    shape = (5, 1, 3)
    tensor = rank_input(hvd.rank(), shape, dtype)
    expected = hvd.allreduce(tensor, op=op, name="once")
    for _ in range(REPEATS):
        assert torch.equal(hvd.allreduce(tensor, op=op, name="again"), expected)
    for _ in range(REPEATS):
        own = tensor.clone()
        assert hvd.allreduce_(own, op=op, name="again") is own
        assert torch.equal(own, expected)
    assert runs


@pytest.mark.parametrize(
    "nbytes",
    [
        0,
        4,
        SMALL - 4,
        SMALL,
        SMALL + 4,
        MOST_BYTES,
        MOST_BYTES + 4,
        WINDOW - 4,
        WINDOW,
        WINDOW + 4,
        3 * WINDOW + 4,
        1 << 20,
    ],
)
@pytest.mark.parametrize("place", ["elsewhere", "slot"])
def test_sizes_around_every_threshold(runs: list[int], nbytes: int, place: str, machine_of: Machines) -> None:
    numel = nbytes // 4
    if place == "slot":
        memory = allocate(hvdlite.runtime().group, max(nbytes, 4)).memory[:nbytes].view(np.float32)
        tensor = torch.from_numpy(memory)
    else:
        tensor = torch.empty(numel)
    counts = torch.arange(numel, dtype=torch.float32) % 7
    for number in range(REPEATS):
        tensor.copy_(counts + hvd.rank() + number)
        hvd.allreduce_(tensor, op=hvd.Sum, name=f"{place} {nbytes}")
        assert torch.equal(tensor, hvd.size() * (counts + number) + total(float)), number
    assert runs or not nbytes or (machine_of != ONE_MACHINE and nbytes > early_bytes())


def test_compressed(runs: list[int]) -> None:
    tensor = torch.full((2000,), 0.1)
    expected = hvd.allreduce(tensor, name="once", compression=hvd.Compression.bf16)
    for _ in range(REPEATS):
        assert torch.equal(hvd.allreduce(tensor, name="again", compression=hvd.Compression.bf16), expected)
    assert runs


@dataclass  # so that instances have no hash
class Halved:
    """A compressor of the user's."""

    factor: float = 0.5

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.factor * tensor, None

    def decompress(self, tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor / self.factor


def test_a_compressor_of_the_user_is_no_key() -> None:
    value = torch.empty(3)

    def step(number: int) -> None:
        value.fill_(hvd.rank() + number)
        expected = total(lambda rank: rank + number)
        assert hvd.allreduce(value, op=hvd.Sum, name="as it is")[2].item() == expected
        assert hvd.allreduce(value, op=hvd.Sum, name="halved", compression=Halved())[2].item() == expected  # type: ignore[arg-type]

    freeze(step)
    step(2)


@pytest.mark.parametrize("made", [torch.tensor, np.array], ids=["tensor", "array"])
def test_factors_are_what_they_are_now(made: Callable[[float], Any]) -> None:
    """Of a tensor, or an array, which is the same object with another number in it."""
    factor = made(1.0)

    def step(number: int) -> None:
        factor[...] = number % 3 + 1.0
        expected = hvd.size() * factor.item()
        for how in ("prescale_factor", "postscale_factor"):
            result = hvd.allreduce(torch.ones(2), op=hvd.Sum, name=how, **{how: factor})
            assert result[1].item() == expected, number
        begun = [hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name=f"{i}", prescale_factor=factor) for i in range(9)]
        assert {hvd.synchronize(handle)[1].item() for handle in begun} == {expected}, number

    for number in [0] * 5 * REPEATS + [*range(5)]:
        step(number)


def test_groups(runs: list[int], machine_of: Machines) -> None:
    """In place or not, large and small; of several types they go the usual way, and across nodes all with them."""
    for number in range(REPEATS):
        values = [torch.full((numel,), float(hvd.rank() + number)) for numel in (1, 3000, 17)]
        results = hvd.grouped_allreduce(values, op=hvd.Sum, name="group")
        for value, result in zip(values, results, strict=True):
            assert torch.equal(result, torch.full_like(value, total(lambda rank, number=number: rank + number)))  # type: ignore[misc]
        mixed = [torch.full((2,), float(number)), torch.full((2,), number, dtype=torch.int32)]
        hvd.grouped_allreduce_(mixed, op=hvd.Sum, name="mixed")
        assert all(value[1].item() == hvd.size() * number for value in mixed)
    assert runs or machine_of != ONE_MACHINE


def test_late_ranks_are_waited_for_asleep(runs: list[int]) -> None:
    """Longer than anybody spins; whoever comes last wakes the others."""
    generator = random.Random(1)
    value = torch.empty(1)

    def step(number: int) -> None:
        value.fill_(hvd.rank() + number)
        hvd.allreduce_(value, op=hvd.Sum, name="late")
        assert value.item() == total(lambda rank: rank + number)

    freeze(step)
    for number in range(30):
        pauses_s = [generator.choice([0.0, 0.0, 1e-3, 5e-3]) for _ in range(hvd.size())]
        time.sleep(pauses_s[hvd.rank()])
        step(number)
    assert runs


def test_one_rank_is_profiled(runs: list[int]) -> None:
    """It does step by step what the others do in one call."""
    value = torch.empty(3)

    def step(number: int) -> None:
        hvd.allreduce_(value.fill_(hvd.rank() + number), op=hvd.Sum, name="profiled")
        assert (value == total(lambda rank: rank + number)).all()

    freeze(step)
    with profile(activities=[ProfilerActivity.CPU]) if hvd.rank() == 0 else nullcontext():
        for number in range(REPEATS):
            step(number)
    assert runs


def test_what_is_little_may_be_so_no_longer(runs: list[int]) -> None:
    """Between nodes it goes another way then, on all ranks, whoever is late."""
    value = torch.empty(300)

    def reduce(numel: int, number: int) -> None:
        part = value[:numel].fill_(hvd.rank() + number)
        hvd.allreduce_(part, op=hvd.Sum, name=f"little {numel}")
        assert (part == total(lambda rank: rank + number)).all()

    def step(number: int) -> None:
        for numel in (1, 2, 300):  # most are little, so that the plan runs free
            reduce(numel, number)

    def disturbed(number: int) -> None:
        """Who waits for the last rank leaves it to the coordinator, as another thread has something else."""
        reduce(1, number)
        reduce(2, number)
        other = threading.Thread(target=lambda: (time.sleep(0.01), hvd.barrier()))
        other.start()
        if hvd.rank() == hvd.size() - 1:
            time.sleep(0.03)
        reduce(300, number)
        other.join()

    group = hvdlite.runtime().group
    tunable = Tunable.of(group.config)
    for small_bytes in (tunable.small_bytes, 64, tunable.small_bytes):
        configure(group, tunable._replace(small_bytes=small_bytes))
        for number in range(10):
            freeze(step)
            disturbed(number)
    assert runs


class Interrupted(Exception):
    pass


def interrupt_while_waiting(step: Callable[[int], object]) -> None:
    """Rank 0 leaves ``step`` by a signal while it waits for the others; all have done it when this returns."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        if hvd.rank() == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupted):
                step(1)
        else:
            time.sleep(0.3)
            step(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    hvd.barrier()


def test_an_interrupt_ends_the_wait_and_not_the_job(machine_of: Machines) -> None:
    """What was waited for is done when the others come, and keeps its memory as long."""
    if machine_of != ONE_MACHINE:
        pytest.skip("between machines it ends the job")
    value = torch.empty(4)

    def step(number: int) -> None:
        value.fill_(hvd.rank() + number)
        hvd.allreduce_(value, op=hvd.Sum, name="interrupted")

    freeze(step)
    interrupt_while_waiting(step)
    assert value[3].item() == total(lambda rank: rank + 1)
    step(2)
    assert value[0].item() == total(lambda rank: rank + 2)


@pytest.mark.parametrize("is_known", [True, False], ids=["native", "by Python"])
def test_what_is_left_by_an_interrupt_keeps_memory_that_is_taken_away(machine_of: Machines, is_known: bool) -> None:
    """So much that it would go back to the kernel."""
    if machine_of != ONE_MACHINE:
        pytest.skip("between machines it ends the job")
    value = torch.ones(16 << 20)

    def step(number: int) -> None:
        try:
            hvd.allreduce_(value, name="taken away")
        except Interrupted:
            value.set_()  # type: ignore[call-overload]
            raise

    freeze(step)
    if not is_known:
        hvdlite.runtime().group.world.coordinator.at_once.shortcut.close()
    interrupt_while_waiting(step)


@pytest.mark.parametrize("numel", [1, 2])
def test_the_imaginary_part_of_a_conjugate(numel: int) -> None:
    """It reads as minus what is in memory, where one element is contiguous."""

    def part(of: float) -> torch.Tensor:
        return torch.full((numel,), of * 1j).conj().imag

    usual = torch.ones(numel)
    freeze(lambda number: hvd.allreduce(usual, op=hvd.Sum, name="part"))
    freeze(lambda number: hvd.broadcast(usual, 0, name="part of 0"))
    for _ in range(2):
        assert hvd.allreduce(part(2.0), op=hvd.Sum, name="part").tolist() == [-2.0 * hvd.size()] * numel
        begun = [hvd.allreduce_async(part(3.0), op=hvd.Sum, name=f"{i}") for i in range(5)]
        assert all(hvd.synchronize(handle).tolist() == [-3.0 * hvd.size()] * numel for handle in begun)
        assert hvd.broadcast(part(4.0), 0, name="part of 0").tolist() == [-4.0] * numel
        assert hvd.allgather(part(5.0)).tolist() == [-5.0] * numel * hvd.size()
        own = part(6.0)
        assert hvd.allreduce_(own, op=hvd.Sum, name="in place") is own
        assert own.tolist() == [-6.0 * hvd.size()] * numel


def test_tensors_that_are_not_usual_go_the_usual_way() -> None:
    """Transposed, of a subclass, with a history, of bool; mistakes are told as ever."""
    plain = torch.arange(6.0).reshape(2, 3) + hvd.rank()
    freeze(lambda number: hvd.allreduce(plain, op=hvd.Sum, name="usual"))
    expected = hvd.size() * torch.arange(6.0).reshape(2, 3) + total(float)
    transposed = plain.t().contiguous().t()
    assert torch.equal(hvd.allreduce(transposed, op=hvd.Sum, name="usual"), expected)
    tracked = plain.clone().requires_grad_()
    result = hvd.allreduce(tracked, op=hvd.Sum, name="usual")
    result.sum().backward()
    assert torch.equal(result, expected) and torch.equal(tracked.grad, torch.full((2, 3), float(hvd.size())))
    freeze(lambda number: hvd.allreduce(plain, op=hvd.Sum, name="usual"))
    with pytest.raises(ValueError, match="bool"):
        hvd.allreduce(plain > 1, op=hvd.Sum, name="usual")
    with pytest.raises(ValueError, match=r"pass hvd\.global_process_set"):
        hvd.allreduce(plain, op=hvd.Sum, name="usual", process_set=3)  # type: ignore[arg-type]
    with pytest.raises(hvd.UsageError if hasattr(hvd, "UsageError") else Exception, match="op is"):
        hvd.allreduce(plain, op="sum", name="usual")  # type: ignore[arg-type]
    assert torch.equal(hvd.allreduce(plain, op=hvd.Sum, name="usual"), expected)
