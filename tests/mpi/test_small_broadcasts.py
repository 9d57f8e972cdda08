"""Broadcasts of few bytes: sums of one rank's and of zeros, in a node and across; what repeats is one native call."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

import hvdlite.torch as hvd
import machines_lab
from hvdlite.collectives.early import MOST_BYTES
from hvdlite.coordinator.at_once import AtOnce
from hvdlite.errors import MismatchError
from machines_lab import ONE_MACHINE, WORLD, Machines
from prepared_lab import freeze, left_to_python
from torch_lab import rank_input

SMALL = 8 << 10  # bytes that pass at once, in a node
REPEATS = 30
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]

machine_of = machines_lab.machine_of

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.skipif(WORLD.size == 1, reason="needs ranks that wait for one another"),
]


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that Python was asked to do at once."""
    return left_to_python(monkeypatch, AtOnce.run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_root_and_type(dtype: torch.dtype, by_python: list[str]) -> None:
    def step(number: int) -> None:
        for root in range(hvd.size()):
            wanted = rank_input(root + number, (3, 5), torch.float32).to(dtype)
            own = rank_input(hvd.rank() + number, (3, 5), torch.float32).to(dtype)
            kept = own.clone()
            assert torch.equal(hvd.broadcast(own, root, name=f"new {root}"), wanted)
            assert torch.equal(own, kept)
            assert hvd.broadcast_(own, root, name=f"in place {root}") is own
            assert torch.equal(own, wanted)

    for number in range(200):
        by_python.clear()
        step(number)
        if hvd.allreduce(torch.tensor([len(by_python)]), op=hvd.Max, name="by Python").item() <= 1:
            return  # the first one, after that question
    raise AssertionError(f"left to Python: {by_python}")


@pytest.mark.parametrize("nbytes", [0, 1, SMALL - 1, SMALL, SMALL + 1, MOST_BYTES, MOST_BYTES + 1, 1 << 20])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "new"])
def test_sizes_around_every_threshold(nbytes: int, in_place: bool) -> None:
    counts = (torch.arange(nbytes) % 250).to(torch.uint8)
    root = hvd.size() - 1
    for number in range(REPEATS):
        tensor = counts + (hvd.rank() + number) % 5
        result = (hvd.broadcast_ if in_place else hvd.broadcast)(tensor, root, name=f"{nbytes} {in_place}")
        assert torch.equal(result, counts + (root + number) % 5), number


def test_late_ranks_are_waited_for(by_python: list[str]) -> None:
    generator = random.Random(1)

    def step(number: int) -> None:
        for root in (0, hvd.size() - 1):
            assert hvd.broadcast(torch.tensor([hvd.rank() + number]), root).item() == root + number

    freeze(step)
    for number in range(20):
        pauses_s = [generator.choice([0.0, 0.0, 1e-3, 5e-3]) for _ in range(hvd.size())]
        time.sleep(pauses_s[hvd.rank()])
        step(number)


def test_who_waits_hears_of_other_things() -> None:
    """What a native call has begun is left to the coordinator, at the root and elsewhere, in place and not."""
    last = hvd.size() - 1
    for root in (0, last):
        for in_place in (True, False):
            function = hvd.broadcast_ if in_place else hvd.broadcast

            def step(number: int, root: int = root, function: Callable[..., torch.Tensor] = function) -> None:
                tensor = torch.full((7,), float(hvd.rank() + number))
                assert (function(tensor, root, name="heard") == root + number).all()

            freeze(step)
            other = threading.Thread(target=lambda: (time.sleep(0.01), hvd.barrier()))
            other.start()
            if hvd.rank() == last:
                time.sleep(0.03)
            step(3)
            other.join()


def test_another_root_is_a_mismatch_that_all_hear_of() -> None:
    def step(number: int) -> None:
        assert hvd.broadcast(torch.tensor([hvd.rank() + number]), 0, name="whose").item() == number

    freeze(step)
    with pytest.raises(MismatchError, match="root rank"):
        hvd.broadcast(torch.zeros(1), int(hvd.rank() == 0), name="whose")
    freeze(step)


def test_a_sum_is_not_taken_for_it() -> None:
    """Where a root has the number of an op."""

    def step(number: int) -> None:
        one = torch.tensor([float(hvd.rank() + 1)])
        assert hvd.broadcast(one, int(hvd.Sum), name="same").item() == int(hvd.Sum) + 1

    freeze(step)
    with pytest.raises(MismatchError):
        hvd.allreduce(torch.ones(1), op=hvd.Sum if hvd.rank() else hvd.Max, name="same")
    for number in range(3):
        step(number)


def test_what_is_refused_is_refused_here_too() -> None:
    def step(number: int) -> None:
        assert hvd.broadcast(torch.tensor([hvd.rank() + number]), 0).item() == number

    freeze(step)
    for function in (hvd.broadcast, hvd.broadcast_):
        with pytest.raises(ValueError, match="broadcast 'odd': .*complex64"):
            function(torch.zeros(2, dtype=torch.complex64), 0, name="odd")
        with pytest.raises(ValueError, match="root_rank"):
            function(torch.zeros(2), hvd.size(), name="odd")
    for number in range(3):
        step(number)


def test_gradients_go_through_it() -> None:
    for number in range(REPEATS):
        weight = torch.tensor([1.0 + hvd.rank()], requires_grad=True)
        out = hvd.broadcast(weight, 0, name="differentiable") * (number + 1)
        out.backward()
        assert out.item() == number + 1
        assert weight.grad is not None and weight.grad.item() == (number + 1) * (hvd.rank() == 0)


def test_a_process_set_has_its_own(machine_of: Machines) -> None:
    if hvd.size() < 3 or machine_of != ONE_MACHINE:
        pytest.skip("needs a set of several ranks")
    members = hvd.add_process_set([1, 2])
    if hvd.rank() in (1, 2):
        for number in range(REPEATS):
            value = torch.tensor([10 * hvd.rank() + number])
            assert hvd.broadcast_(value, 2, process_set=members).item() == 20 + number
    hvd.remove_process_set(members)
