"""Random programs (program_lab.py) end in the right values or the right error on every rank, and never in a hang.

Every rank submits the operations of a program in an order of its own and waits for them in another. A failure names the
number of the program; HVDLITE_TEST_PROGRAMS=1234: runs that one alone, HVDLITE_TEST_PROGRAMS=10000 that many.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from mpi4py import MPI

import hvdlite
import hvdlite.torch as hvd
from hvdlite.config import Tunable
from hvdlite.errors import DuplicateNameError, HorovodInternalError, MismatchError
from hvdlite.operations.allocate import allocate
from hvdlite.operations.configure import configure
from program_lab import SETS, Call, Loop, Program, Step, draw, draw_loop
from runtime_lab import LAYOUTS, Machines, machines

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
WANTED = os.environ.get("HVDLITE_TEST_PROGRAMS", "")
COUNT = int(WANTED) if WANTED.isdigit() else {1: 150, 2: 400}.get(SIZE, 300)
TINY = {  # small, so that long paths run on little data, and slots of the cache are reused
    "CHUNK_BYTES": 2048, "STAGING_BYTES": 8192, "SEGMENT_BYTES": 512, "SMALL_BYTES": 768, "CACHE_CAPACITY": 16,
    "TREE_FANOUT": 1, "FUSION_THRESHOLD": 20_000, "SPIN_MICROSECONDS": 0,
}  # fmt: skip
SETTINGS = [(LAYOUTS[0], {}), *((machine_of, TINY) for machine_of in LAYOUTS)]
LONGEST_S = 30.0  # a program; it takes milliseconds
SLOT_BYTES = 32 << 10  # of any tensor
SLOTS = 32


def numbers(part: int) -> range:
    """Of the programs that one of `SETTINGS` runs."""
    if WANTED.endswith(":"):
        return range(int(WANTED[:-1]), int(WANTED[:-1]) + 1)
    return range(COUNT * part // len(SETTINGS), COUNT * (part + 1) // len(SETTINGS))


@pytest.mark.time_limit(100 + COUNT / 10)
@pytest.mark.parametrize("part", range(len(SETTINGS)))
def test_programs(
    part: int, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine_of, settings = SETTINGS[part]
    for name, value in {**settings, "STALL_SHUTDOWN_TIME_SECONDS": LONGEST_S}.items():
        monkeypatch.setenv(f"HVDLITE_{name}", str(value))
    problems: list[str] = []
    with started(machine_of) as sets:
        worker = Worker(sets)
        for number in numbers(part):
            program = draw(number, SIZE)
            with capfd.disabled(), told_when_late(program):
                problems += worker.run(program)
            if len(problems) > 3:
                break
    told = comm.allgather(problems[:2])
    assert not any(told), "\n\n".join(next(texts for texts in told if texts))


BY_PYTHON = {"PREPARED_OPERATIONS": "0"}
LOOPS = [(LAYOUTS[0], {}), (LAYOUTS[0], BY_PYTHON), (LAYOUTS[0], TINY), (LAYOUTS[-1], {}), (LAYOUTS[-1], BY_PYTHON)]


@pytest.mark.time_limit(100 + COUNT / 10)
@pytest.mark.parametrize("part", range(len(LOOPS)))
def test_loops(
    part: int, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What repeats is done by native code, or by Python alone, whatever comes between, or comes in another order."""
    machine_of, settings = LOOPS[part]
    for name, value in {**settings, "STALL_SHUTDOWN_TIME_SECONDS": LONGEST_S}.items():
        monkeypatch.setenv(f"HVDLITE_{name}", str(value))
    problems: list[str] = []
    with started(machine_of) as sets:
        worker = Worker(sets)
        for number in numbers(0)[part :: 4 * len(LOOPS)] if not WANTED.endswith(":") else numbers(0):
            loop = draw_loop(number, SIZE)
            expect_new_orders()
            with capfd.disabled(), told_when_late(loop):
                problems += worker.run(loop)
            if len(problems) > 3:
                break
    told = comm.allgather(problems[:2])
    assert not any(told), "\n\n".join(next(texts for texts in told if texts))


def expect_new_orders() -> None:
    """What was frozen in vain before makes nobody wait longer before the next."""
    runtime = hvdlite.runtime()
    configure(runtime.group, Tunable.of(runtime.config))


@contextmanager
def started(machine_of: Machines) -> Iterator[list[hvd.ProcessSet]]:
    """The process sets of all steps."""
    made = [hvd.ProcessSet(ranks) for ranks in SETS.get(SIZE, [])]
    with machines(machine_of):
        hvd.init(process_sets=made)
    yield [hvd.global_process_set, *made]
    hvd.barrier()
    hvd.shutdown()


@contextmanager
def told_when_late(program: Program | Loop) -> Iterator[None]:
    """A rank that waits for ever says where, before the time limit of the test ends it."""
    text = f"rank {RANK} has not ended this after {LONGEST_S / 2:g} s: {program}\n"
    timer = threading.Timer(LONGEST_S / 2, lambda: sys.stderr.write(text))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Worker:
    """Does this rank's part of programs."""

    def __init__(self, sets: list[hvd.ProcessSet]) -> None:
        self._sets = sets
        self._own = random.Random()
        self._repeats = False
        buffers = [
            allocate(process_set.group(), 2 * SLOTS * SLOT_BYTES) for process_set in sets if process_set.included()
        ]
        self._slots = [torch.from_numpy(buffer.memory) for buffer in buffers]

    def run(self, program: Program | Loop) -> list[str]:
        """What was wrong."""
        self._own.seed(f"{program.seed} {RANK}")
        self._repeats = isinstance(program, Loop)
        try:
            problems = self._problems(program) if isinstance(program, Program) else self._of_turns(program)
        except BaseException as error:
            raise AssertionError(f"rank {RANK}: {error!r}\nin {program}") from error
        return [f"rank {RANK}: {problem}\nin {program}" for problem in problems if problem]

    def _problems(self, program: Program) -> list[str | None]:
        started = [self._start(step) for step in self._ordered(program.steps)]
        if program.stops:
            started += [self._start(step) for step in self._ordered(program.last_steps[: program.stops[RANK]])]
            hvd.join()
        self._own.shuffle(started)
        return [finish() for finish in started]

    def _of_turns(self, loop: Loop) -> list[str | None]:
        found: list[str | None] = []
        for steps in loop.turns:
            if self._own.random() < 0.03:
                time.sleep(self._own.random() * 0.03)  # the others wait for this rank
            order = self._ordered(steps) if self._own.random() < 0.02 else steps
            started = [self._start(step) for step in order]
            self._own.shuffle(started)
            found += [finish() for finish in started]
        return found

    def _ordered(self, steps: Sequence[Step]) -> list[Step]:
        """Those of this rank, in an order of its own as far as that is legal."""
        left = [step for step in steps if RANK in step.members]
        order: list[Step] = []
        while left:
            free = [
                step for i, step in enumerate(left) if not any(orders(step) & orders(before) for before in left[:i])
            ]
            order.append(self._own.choice(free))
            left.remove(order[-1])
        return order

    def _start(self, step: Step) -> Callable[[], str | None]:
        """Submit; returns what waits, and says what was wrong."""
        call, process_set = step.call_of(RANK), self._sets[step.call.process_set]
        if call.operation == "barrier":
            hvd.barrier(process_set=process_set)
            return lambda: None
        if RANK in step.mistakes:
            self._err(step, step.mistakes[RANK])
        given = [self._placed(step, tensor) for tensor in step.inputs(RANK)]
        kept = [tensor.clone() for tensor in given]
        if step.early_rank not in (None, RANK):
            hvd.barrier(process_set=process_set)
        polls = self._own.random() < 0.1
        outcome = submit(call, given, step.splits(RANK), process_set, polls=polls)
        if step.early_rank == RANK:
            with pytest.raises(DuplicateNameError, match=f"'{call.name}' was submitted while"):
                hvd.allreduce_async(torch.ones(3), name=call.name, process_set=process_set)
            hvd.barrier(process_set=process_set)
        return lambda: verdict(step, given, kept, outcome())

    def _placed(self, step: Step, tensor: torch.Tensor) -> torch.Tensor:
        """In a fusion buffer, at a place that other ranks may choose too; or strided; or as it is.

        In a loop every third step has a place of its own there, mostly.
        """
        place = self._own.random()
        if self._repeats and step.number % 3 == 0 and self._own.random() < 0.98:
            place = 0.5
        elif place < 0.2:
            strided = tensor.new_zeros((*tensor.shape, 2))[..., 1]
            return strided.copy_(tensor)
        nbytes = tensor.numel() * tensor.element_size()
        if place > 0.6 or nbytes > SLOT_BYTES - 8 or not step.call.in_place or len(step.call.shapes) != 1:
            return tensor
        start = (2 * step.number + (place < 0.3)) * SLOT_BYTES + (8 if place > 0.55 else 0)
        slot = self._own.choice(self._slots)[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
        return slot.copy_(tensor)

    def _err(self, step: Step, mistake: str) -> None:
        """Call it wrongly: this rank alone hears of it, and the others notice nothing."""
        call, process_set = step.call, self._sets[step.call.process_set]
        tensors, splits = step.inputs(step.members[0]), step.splits(step.members[0])
        wrong = {
            "bool": torch.ones(2, dtype=torch.bool),
            "complex": torch.ones(2, dtype=torch.complex64),
            "sparse": torch.eye(2).to_sparse(),
            "meta": torch.ones(2, device="meta"),
            "scalar": torch.tensor(1.0),
        }
        if mistake in wrong:
            tensors = [*tensors[:-1], wrong[mistake]]
        elif mistake == "unregistered set":
            process_set = hvd.ProcessSet([RANK])
        elif mistake == "root":
            call = replace(call, root=SIZE)
        elif mistake == "splits":
            call, splits = replace(call, has_splits=True), [1000] * len(step.members)
        else:
            assert mistake == "op"
            call = replace(call, op=hvd.Min if call.kind == "reducescatter" else 17)
        with pytest.raises((ValueError, HorovodInternalError)):  # which one, test_misuse.py asks
            submit(replace(call, waits=False), tensors, splits, process_set)()


def orders(step: Step) -> set[object]:
    """In what it must keep its place: unnamed steps per kind and set, and what waits."""
    call = step.call
    waits = call.waits or step.early_rank is not None
    return ({"waits"} if waits else set()) | ({(call.kind, call.process_set)} if call.name is None else set())


Outcome = list[torch.Tensor] | str
"""What an operation returned, or how its error reads."""


def submit(
    call: Call, tensors: list[torch.Tensor], splits: list[int], process_set: hvd.ProcessSet, *, polls: bool = False
) -> Callable[[], Outcome]:
    """Returns what waits.

    Args:
        polls: until it need not wait.
    """
    door = getattr(hvd, call.operation + "_async" * (not call.waits) + "_" * call.in_place)
    given: list[Any] = [tensors if call.is_grouped else tensors[0]]
    options: dict[str, Any] = {"name": call.name, "process_set": process_set}
    if call.reduces:
        options |= {"op": call.op, "prescale_factor": call.prescale, "postscale_factor": call.postscale}
        if call.waits and not call.in_place:
            options["compression"] = call.compression
    elif call.kind == "broadcast":
        given.append(call.root)
    elif call.has_splits:
        given.append(torch.tensor(splits, dtype=torch.int32))
    if call.waits:
        outcome = outcome_of(lambda: door(*given, **options))
        return lambda: outcome
    handle = door(*given, **options)

    def wait() -> Outcome:
        while polls and not hvd.poll(handle):
            time.sleep(1e-4)
        return outcome_of(lambda: hvd.synchronize(handle))

    return wait


def outcome_of(wait: Callable[[], Any]) -> Outcome:
    try:
        result = wait()
    except MismatchError as error:
        return str(error)
    return [result] if isinstance(result, torch.Tensor) else list(result)


def verdict(step: Step, given: list[torch.Tensor], kept: list[torch.Tensor], outcome: Outcome) -> str | None:
    """What was wrong with ``outcome``, or with what became of the tensors that were ``given``."""
    fault = step.fault()
    expected: Outcome = step.results(RANK) if fault is None else fault
    if isinstance(expected, str) or isinstance(outcome, str):
        good = isinstance(expected, str) and isinstance(outcome, str) and outcome.startswith(expected)
    else:
        good = len(outcome) == len(expected) and all(map(step.accepts, outcome, expected))
        if step.call_of(RANK).in_place:
            kept = [tensor.clone() for tensor in outcome]
    if not good:
        return f"expected {expected}\ngot {outcome}\nof {step}"
    # Of a call in place the given tensors are the result, unless there was a fault; others do not change.
    if not all(map(torch.equal, given, kept)):
        return f"the given tensors have become {given} instead of {kept}\nby {step}"
    return None
