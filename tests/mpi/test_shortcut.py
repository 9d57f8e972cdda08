"""From a call that repeats to the memory without Python: what it does, what it leaves to others, and that it counts."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

import exchange_lab
import hvdlite
import hvdlite.torch as hvd
import machines_lab
import shortcut_lab
from hvdlite.config import Tunable
from hvdlite.coordinator.messages import REMEMBERED_PLANS
from hvdlite.errors import DuplicateNameError, HorovodInternalError
from hvdlite.operations.allocate import allocate
from hvdlite.operations.configure import configure
from machines_lab import ONE_MACHINE, WORLD, Machines, machines
from shortcut_lab import blocking, most_by_python, total, until_taken

REPEATS = 30
PERIOD = 5

machine_of = machines_lab.machine_of
asked = exchange_lab.asked
by_python = shortcut_lab.by_python

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.skipif(WORLD.size == 1, reason="needs ranks that wait for one another"),
]


@pytest.mark.parametrize("numel", [0, 3, 5000, 100_000])
@pytest.mark.parametrize("are_named", [True, False], ids=["named", "unnamed"])
def test_what_repeats_comes_to_no_python(
    numel: int, are_named: bool, machine_of: Machines, by_python: list[str]
) -> None:
    if machine_of != ONE_MACHINE and numel in (0, 100_000):
        pytest.skip("across nodes a plan of nothing, or of so much, does not run free")
    names = [f"named {numel} {place}" if are_named else None for place in range(PERIOD)]
    until_taken(blocking(names, numel), by_python)


def test_every_operation_is_counted_once(machine_of: Machines, by_python: list[str]) -> None:
    step = blocking([f"counted {place}" if place % 2 else None for place in range(PERIOD)])
    until_taken(step, by_python)
    before = hvd.statistics()
    for _ in range(REPEATS):
        most_by_python(step, by_python)
    after = hvd.statistics()
    found = {name: after[name] - before[name] for name in ("submissions", "buckets")}
    assert found == dict.fromkeys(found, REPEATS * (PERIOD + 1))
    nbytes = 4 * sum(3 + place for place in range(PERIOD)) + 4
    assert after["reduced_bytes"] - before["reduced_bytes"] == REPEATS * nbytes
    sent = torch.tensor([after[name] - before[name] for name in ("ring_bytes_sent", "ring_bytes_received")])
    nodes = len(set(machine_of))
    assert hvd.allreduce(sent, op=hvd.Sum, name="sent").tolist() == [nodes * (nodes - 1) * REPEATS * nbytes] * 2


def test_nothing_is_uncounted_while_somebody_goes_to_work(by_python: list[str]) -> None:
    """As the coordinator's thread does when it was rung: it is at work before it has counted anything."""
    step = blocking(["counted", None])
    until_taken(step, by_python)
    before = hvd.statistics()["submissions"]
    most_by_python(step, by_python)
    at_work, is_at_work = hvdlite.runtime().group.world.coordinator._worker.at_work, threading.Event()

    def go_to_work() -> None:
        with at_work:
            is_at_work.set()
            time.sleep(0.002)

    other = threading.Thread(target=go_to_work)
    other.start()
    is_at_work.wait()
    found = hvd.statistics()["submissions"] - before
    other.join()
    assert found == 3


def change_settings() -> None:
    runtime = hvdlite.runtime()
    settings = Tunable.of(runtime.config)
    for segment_bytes in (64 << 10, settings.segment_bytes):
        configure(runtime.group, settings._replace(segment_bytes=segment_bytes))


def use_many_sizes() -> None:
    """Bound messages of each, across nodes; more than are kept."""
    for numel in range(1, 300):
        assert hvd.allreduce(torch.ones(numel), op=hvd.Sum, name="a size").sum().item() == numel * hvd.size()


@pytest.mark.parametrize("other", [change_settings, use_many_sizes])
def test_what_it_has_known_may_be_gone(other: Callable[[], None], by_python: list[str]) -> None:
    step = blocking([f"gone {place}" for place in range(PERIOD)])
    until_taken(step, by_python)
    for _ in range(3):
        other()
        until_taken(step, by_python)


def orders_that_are_frozen() -> list[Callable[[], None]]:
    orders = [blocking(["one", None, "more"]), blocking(["other", None]), blocking(["third"])]
    for order in orders * 3:
        for _ in range(200):  # until it is frozen
            order()
    return orders


def test_orders_in_turns_are_changed_without_a_claim(machine_of: Machines) -> None:
    """As long as no rank keeps another waiting for long, which a machine that is busy does."""
    if machine_of != ONE_MACHINE:
        pytest.skip("across nodes nobody sees what others want")
    orders = orders_that_are_frozen()

    def turns() -> int:
        before = hvd.statistics()
        for turn in range(12):
            for _ in range(3):
                orders[turn % 3]()
        after = hvd.statistics()
        assert after["plans"] >= before["plans"]
        return after["claims_sent"] + after["claims_heard"] - before["claims_sent"] - before["claims_heard"]

    claims = [turns() for _ in range(30)]
    most = torch.tensor([float(count) for count in claims])
    assert hvd.allreduce(most, op=hvd.Max, name="claims").min().item() == 0, claims


def test_the_log_goes_on_where_ranks_have_changed_without_it(machine_of: Machines) -> None:
    """Begun in the background, an order begins anew by the log, which names it by the number of its last plan."""
    if machine_of != ONE_MACHINE:
        pytest.skip("across nodes nobody sees what others want")
    orders = orders_that_are_frozen()
    for _ in range(4):
        plans = hvd.statistics()["plans"]
        for turn in range(3 * REMEMBERED_PLANS // 2):
            for _ in range(3):
                orders[turn % 2]()
        assert hvd.statistics()["plans"] - plans > REMEMBERED_PLANS
        for name, order in (("third", orders[2]), ("one", orders[0])):
            handle = hvd.allreduce_async(torch.full((3,), float(hvd.rank() + 1)), op=hvd.Sum, name=name)
            assert torch.equal(hvd.synchronize(handle), torch.full((3,), total()))
            order()


def with_history(x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    result = hvd.allreduce(x, op=hvd.Sum, name="case")
    assert result.requires_grad
    return result.detach()


CASES: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, float]]] = {
    "shape": lambda x: (hvd.allreduce(x.new_full((2, 3), x[0].item()), op=hvd.Sum, name="case"), total()),
    "size": lambda x: (hvd.allreduce(x.repeat(2), op=hvd.Sum, name="case")[6:], total()),
    "dtype": lambda x: (hvd.allreduce(x.double(), op=hvd.Sum, name="case").float(), total()),
    "op": lambda x: (hvd.allreduce(x, op=hvd.Max, name="case"), float(hvd.size())),
    "default op": lambda x: (hvd.allreduce(x, name="case"), total() / hvd.size()),
    "prescale": lambda x: (hvd.allreduce(x, op=hvd.Sum, name="case", prescale_factor=2.0), total(2)),
    "postscale": lambda x: (hvd.allreduce(x, op=hvd.Sum, name="case", postscale_factor=3.0), total(3)),
    "name": lambda x: (hvd.allreduce(x, op=hvd.Sum, name="another case"), total()),
    "no name": lambda x: (hvd.allreduce(x, op=hvd.Sum), total()),
    "average": lambda x: (hvd.allreduce(x, average=True, name="case"), total() / hvd.size()),
    "not contiguous": lambda x: (
        hvd.allreduce(torch.stack([x, -x], dim=1)[:, 0], op=hvd.Sum, name="case"),
        total(),
    ),
    "parameter": lambda x: (hvd.allreduce(torch.nn.Parameter(x), op=hvd.Sum, name="case").detach(), total()),
    "with a history": lambda x: (with_history(x), total()),
    "array": lambda x: (torch.from_numpy(hvd.allreduce(x.numpy(), op=hvd.Sum, name="case")), total()),
    "compressed": lambda x: (
        hvd.allreduce(x, op=hvd.Sum, name="case", compression=hvd.Compression.bf16),
        total(),
    ),
    "equal name": lambda x: (hvd.allreduce(x, op=hvd.Sum, name="".join(["ca", "se"])), total()),
    "another tensor": lambda x: (hvd.allreduce(x.clone(), op=hvd.Sum, name="case"), total()),
}


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("what", CASES)
def test_what_is_passed_otherwise_is_done_otherwise(what: str, by_python: list[str]) -> None:
    own = torch.full((6,), hvd.rank() + 1.0)

    def step() -> None:
        assert hvd.allreduce(own, op=hvd.Sum, name="case")[5].item() == total()

    until_taken(step, by_python)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        result, expected = CASES[what](own)
    assert result.flatten().tolist() == [expected] * 6
    step()


@pytest.mark.parametrize("place", range(PERIOD))
@pytest.mark.parametrize("how", ["another operation", "one more", "one less", "asynchronous", "late", "a broadcast"])
def test_what_deviates(how: str, place: int, by_python: list[str]) -> None:
    step = blocking([f"deviates {number}" for number in range(PERIOD)])
    until_taken(step, by_python)
    own = torch.full((4,), hvd.rank() + 1.0)
    for number in range(PERIOD):
        name = f"deviates {number}"
        tensor = torch.full((3 + number,), hvd.rank() + 1.0)
        if number == place:
            if how == "another operation":
                assert hvd.allreduce(own, op=hvd.Sum, name="deviation")[0].item() == total()
                continue
            if how == "one less":
                continue
            if how == "one more":
                assert hvd.allreduce(own, op=hvd.Sum, name="deviation")[0].item() == total()
            if how == "a broadcast":
                assert hvd.broadcast(own, root_rank=1, name="deviation")[0].item() == 2.0
            if how == "late" and hvd.rank() == place % hvd.size():
                time.sleep(0.03)
            if how == "asynchronous":
                handle = hvd.allreduce_async(tensor, op=hvd.Sum, name=name)
                assert hvd.synchronize(handle)[0].item() == total()
                continue
        assert hvd.allreduce(tensor, op=hvd.Sum, name=name)[0].item() == total(), number
    for _ in range(3):
        step()


def test_who_slept_needs_no_python_for_what_comes_next(by_python: list[str]) -> None:
    """Else that would take so long that the others sleep, and so on: once ranks were out of step, all was Python's."""

    def step(late_s: float = 0.0) -> None:
        for number in range(PERIOD):
            if number % hvd.size() == hvd.rank():
                time.sleep(late_s)
            tensor = torch.ones(3 + number)
            assert hvd.allreduce_(tensor, op=hvd.Sum, name=f"slept {number}")[2].item() == hvd.size()

    until_taken(step, by_python)
    by_python.clear()
    step(late_s=0.03)
    assert by_python == []


def test_while_a_timeline_is_recorded_all_is_seen(tmp_path: object, by_python: list[str]) -> None:
    step = blocking(["seen"])
    until_taken(step, by_python)
    recorder = hvdlite.runtime().group.recorder
    recorder.start()
    try:
        by_python.clear()
        step()
        assert by_python == ["seen"]
        assert any("seen" in event[2] for event in recorder.drain()[0])
    finally:
        recorder.stop()
    until_taken(step, by_python)


def test_what_was_submitted_before_is_not_passed_by(by_python: list[str]) -> None:
    step = blocking(["submitted"])
    until_taken(step, by_python)
    tensor = torch.full((3,), hvd.rank() + 1.0)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="submitted")
        with pytest.raises(DuplicateNameError):
            hvd.allreduce(tensor, op=hvd.Sum, name="submitted")
        WORLD.allgather(None)
    else:
        WORLD.allgather(None)
        handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="submitted")
    assert hvd.synchronize(handle)[2].item() == total()
    step()


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "Python"])
def test_the_name_of_what_another_thread_waits_for_is_taken(is_native: bool, by_python: list[str]) -> None:
    step = blocking(["waited for"])
    until_taken(step, by_python)
    coordinator = hvdlite.runtime().group.world.coordinator
    if not is_native:
        coordinator.at_once.shortcut.close()
    if hvd.rank() == 0:
        other = threading.Thread(target=step)
        other.start()
        while not coordinator.at_once.begun and not coordinator.has_in_flight("waited for"):
            time.sleep(0)
        with pytest.raises(DuplicateNameError):
            hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="waited for")
        WORLD.allgather(None)
        other.join()
    else:
        WORLD.allgather(None)
        step()
    step()


def test_several_threads(by_python: list[str]) -> None:
    """Of each its own operations, in an order that nobody knows."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(200):
                tensor = torch.full((number + 1,), float((hvd.rank() + 1) * turn))
                assert hvd.allreduce_(tensor, op=hvd.Sum, name=f"thread {number}")[0].item() == total(turn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_process_set_has_its_own(by_python: list[str]) -> None:
    if hvd.size() == 2:
        pytest.skip("needs a set whose ranks are not those of the job")
    members = hvd.add_process_set([0, 1])
    try:
        own = torch.full((3,), hvd.rank() + 1.0)
        for turn in range(100):
            if members.included():
                result = hvd.allreduce(own, op=hvd.Sum, name="of two", process_set=members)
                assert result[0].item() == 3.0, turn
            if turn % 2:
                assert hvd.allreduce(own, op=hvd.Sum, name="of all")[0].item() == total()
    finally:
        hvd.remove_process_set(members)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(own, op=hvd.Sum, name="of two", process_set=members)


def test_in_its_slot_it_is_the_same_slot(by_python: list[str]) -> None:
    """What lives elsewhere, or in memory that was given back, is no operation at home."""
    group = hvdlite.runtime().group
    for turn in range(3):
        buffer = allocate(group, 4096, f"shortcut {turn}")
        at_home = torch.from_numpy(buffer.memory[:256].view(np.float32))

        def step(at_home: torch.Tensor = at_home) -> None:
            at_home.fill_(hvd.rank() + 1.0)
            assert hvd.allreduce_(at_home, op=hvd.Sum, name="at home")[63].item() == total()

        until_taken(step, by_python)
        elsewhere = torch.full((64,), hvd.rank() + 1.0)
        assert hvd.allreduce_(elsewhere, op=hvd.Sum, name="at home")[63].item() == total()
        step()
        until_taken(step, by_python)
        del buffer, at_home, step
        gc.collect()
        elsewhere.fill_(hvd.rank() + 1.0)
        assert hvd.allreduce_(elsewhere, op=hvd.Sum, name="at home")[63].item() == total()


@pytest.mark.parametrize("name", ["large", None])
def test_what_lives_in_a_slot_is_left_alone_by_others(name: str | None) -> None:
    """Of so many bytes that an operation works in the slot: others would overwrite what is there."""
    numel = 16 << 10
    memory = allocate(hvdlite.runtime().group, 8 * numel, f"two of {name}").memory[: 8 * numel].view(np.float32)
    first, second = (torch.from_numpy(memory[start : start + numel]) for start in (0, numel))
    elsewhere = torch.empty(numel)
    for tensor in (first, second, elsewhere, first):
        for turn in range(4 * REPEATS):
            for kept in (first, second, elsewhere):
                kept.fill_(-1.0)
            tensor.fill_(hvd.rank() + turn)
            hvd.allreduce_(tensor, op=hvd.Sum, name=name)
            expected = total() + hvd.size() * (turn - 1)
            assert (tensor == expected).all(), turn
            for kept in (first, second, elsewhere):
                assert kept is tensor or (kept == -1.0).all(), turn


def test_another_generation_begins_anew(machine_of: Machines, by_python: list[str]) -> None:
    step = blocking(["generation", None])
    until_taken(step, by_python)
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"hvd\.init"):
        step()
    with machines(machine_of):
        hvd.init()
    until_taken(step, by_python)


def test_a_burst_that_is_left_open_takes_nothing_of_another_generation(machine_of: Machines) -> None:
    for turn in range(20):
        burst(turn)
    left = [hvd.allreduce_async_(torch.ones(i % 5 + 1), op=hvd.Sum, name=f"in burst {i}") for i in (0, 1, 2)]
    WORLD.allgather(None)  # an operation of hvdlite would end the burst
    hvd.shutdown()
    for handle in left:
        with suppress(HorovodInternalError):
            hvd.synchronize(handle)
    with machines(machine_of):
        hvd.init()
    for turn in range(20):
        burst(turn)


def test_in_a_forked_child_nothing_is_done(by_python: list[str]) -> None:
    step = blocking(["forked"])
    until_taken(step, by_python)
    tensor = torch.ones(3)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            hvd.allreduce_(tensor, op=hvd.Sum, name="forked")
        except HorovodInternalError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    step()


BURST = 40


def burst(turn: int, *, odd: int = -1) -> list[Any]:
    """Handles of operations that are done; that at ``odd`` is another one than ever."""
    inputs = [torch.full((i % 5 + 1,), float((hvd.rank() + 1) * (i + turn))) for i in range(BURST)]
    if odd >= 0:
        inputs[odd] = inputs[odd].repeat(2)
    handles = []
    for i, tensor in enumerate(inputs):
        begin = hvd.allreduce_async_ if i % 2 else hvd.allreduce_async
        handles.append(begin(tensor, op=hvd.Sum, name=None if i % 4 == 3 else f"in burst {i}"))
    for i, (handle, tensor) in enumerate(zip(handles, inputs, strict=True)):
        result = hvd.synchronize(handle)
        assert (result is tensor) == bool(i % 2)
        assert torch.equal(result, torch.full_like(tensor, total(i + turn))), (i, turn)
    return handles


def test_bursts_are_collected_without_python(machine_of: Machines, by_python: list[str]) -> None:
    """A machine that is busy while a plan is made divides it."""
    if machine_of != ONE_MACHINE:
        pytest.skip("across nodes nothing is collected")
    for attempt in range(20):
        for turn in range(20):
            left = most_by_python(lambda turn=turn: burst(turn), by_python)  # type: ignore[misc]
        before = hvd.statistics()["buckets"]
        burst(7)
        if not left and hvd.statistics()["buckets"] - before <= BURST // 4:
            break
        hvd.allreduce(torch.ones(1), name=f"attempt {attempt}")  # so that another plan is made
    else:
        raise AssertionError(f"left to Python: {by_python}")
    assert all(hvd.poll(handle) for handle in burst(7))


@pytest.mark.parametrize("odd", [0, 1, 17, 38, 39])
def test_bursts_that_deviate(odd: int) -> None:
    for turn in range(20):
        burst(turn)
    burst(4, odd=odd)
    burst(5)
