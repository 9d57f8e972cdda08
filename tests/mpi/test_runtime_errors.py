"""Mistakes of the caller: the same error on every rank, with ranks and values, and the job goes on."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hvdlite
from backend_lab import RANK, SIZE, reduced
from hvdlite import bootstrap
from hvdlite.config import Config
from hvdlite.coordinator.submission import Submission
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.errors import DuplicateNameError, HorovodVersionMismatchError, MismatchError, ShutDownError, StartupError
from hvdlite.job_runtime import Runtime
from hvdlite.memory.views import TensorView
from hvdlite.mpi import MpiRanks
from hvdlite.operations.allgather import allgather_async
from hvdlite.operations.allocate import allocate
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.barrier import barrier_async
from hvdlite.operations.broadcast import broadcast_async
from runtime_lab import LAYOUTS, Gathered, Tensor, agree, allreduce, running

pytestmark = pytest.mark.any_mpi

LAST = SIZE - 1
several = pytest.mark.skipif(SIZE == 1, reason="one rank cannot contradict itself")


@pytest.fixture(scope="module")
def world() -> Iterator[MPI.Intracomm]:
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda machine_of: "".join(map(str, machine_of)))
def runtime(world: MPI.Intracomm, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with running(world, machine_of=request.param) as made:
        yield made


def goes_on(runtime: Runtime, world: MPI.Intracomm) -> None:
    """The job can go on with other tensors, and with the same name used rightly."""
    problems = []
    for name in ("layer3.weight", "another", None):
        tensor = Tensor.input(70, DType.FLOAT32)
        allreduce(runtime, tensor, name=name).wait()
        problems.append(tensor.problem(reduced(ReduceOp.SUM, 70, DType.FLOAT32)))
    agree(world, *problems)


def ones(*shape: int, dtype: DType = DType.FLOAT32) -> TensorView:
    return Tensor.of(np.ones(int(np.prod(shape))), dtype, shape).view


def reduce(runtime: Runtime, view: TensorView, *reduction: Any, wire_dtype: DType | None = None) -> Submission:
    """``reduction``: op, prescale, postscale."""
    views = [view]
    return allreduce_async(
        runtime.group, views, views, Reduction(*reduction), name="layer3.weight", wire_dtype=wire_dtype
    )


def gather(runtime: Runtime, view: TensorView) -> Submission:
    return allgather_async(runtime.group, [view], Gathered([view.dtype]).allocate, name="layer3.weight")


def send(runtime: Runtime, view: TensorView, root: int) -> Submission:
    return broadcast_async(runtime.group, [view], root_rank=root, name="layer3.weight")


Case = Callable[[Runtime, bool], Submission]
CASES: dict[str, tuple[Case, list[str]]] = {
    "shape": (lambda rt, odd: reduce(rt, ones(4, 3 if odd else 2)), ["shape", "(4, 2)", "(4, 3)", "allgather"]),
    "dimensions": (lambda rt, odd: reduce(rt, ones(8) if odd else ones(4, 2)), ["shape", "(4, 2)", "(8,)"]),
    "dtype": (
        lambda rt, odd: reduce(rt, ones(4, dtype=DType.INT32 if odd else DType.FLOAT32)),
        ["dtype", "float32", "int32"],
    ),
    "op": (lambda rt, odd: reduce(rt, ones(4), ReduceOp.MAX if odd else ReduceOp.SUM), ["op", "Sum", "Max"]),
    "average": (
        lambda rt, odd: reduce(rt, ones(4), ReduceOp.AVERAGE if odd else ReduceOp.SUM),
        ["op", "Sum", "Average"],
    ),
    "prescale": (lambda rt, odd: reduce(rt, ones(4), ReduceOp.SUM, 0.5 if odd else 1.0), ["prescale", "1.0", "0.5"]),
    "postscale": (
        lambda rt, odd: reduce(rt, ones(4), ReduceOp.SUM, 1.0, 0.5 if odd else 1.0),
        ["postscale", "1.0", "0.5"],
    ),
    "compression": (
        lambda rt, odd: reduce(rt, ones(4), wire_dtype=DType.FLOAT16 if odd else None),
        ["compression", "none", "float16"],
    ),
    "root": (lambda rt, odd: send(rt, ones(4), 1 if odd else 0), ["root rank", "is 0", "but 1"]),
    "broadcast shape": (lambda rt, odd: send(rt, ones(5 if odd else 4), 0), ["shape", "(4,)", "(5,)"]),
    "gathered shape": (lambda rt, odd: gather(rt, ones(4, 3 if odd else 2)), ["shape", "first dimension", "(2,)", "(3,)"]),  # noqa: E501
    "gathered dtype": (
        lambda rt, odd: gather(rt, ones(4, dtype=DType.BOOL if odd else DType.UINT8)),
        ["dtype", "uint8", "bool"],
    ),
    "operation": (
        lambda rt, odd: send(rt, ones(4), 0) if odd else reduce(rt, ones(4)),
        ["operation", "allreduce", "broadcast"],
    ),
    "members": (
        lambda rt, odd: allreduce_async(rt.group, *[[ones(4)] * (3 if odd else 2)] * 2, name="layer3.weight"),
        ["number of tensors", "is 2", "but 3"],
    ),
    "member": (
        lambda rt, odd: broadcast_async(
            rt.group, [ones(4), ones(7 if odd else 6)], root_rank=0, name="group", names=["layer3.b", "layer3.weight"]
        ),
        ["shape", "(6,)", "(7,)"],
    ),
}  # fmt: skip


@several
@pytest.mark.parametrize("odd_rank", sorted({0, LAST}))
@pytest.mark.parametrize("case", CASES)
def test_every_rank_hears_of_a_contradiction(runtime: Runtime, world: MPI.Intracomm, case: str, odd_rank: int) -> None:
    submit, words = CASES[case]
    handle = submit(runtime, odd_rank == RANK)
    try:
        handle.wait()
        text = "no error"
    except MismatchError as error:
        text = str(error)
    texts = world.allgather(text)
    assert len(set(texts)) == 1, texts
    for word in ["layer3.weight", f"rank {odd_rank}", *(words if odd_rank else [])]:
        assert word in text, text
    goes_on(runtime, world)


@several
def test_a_group_fails_as_a_whole(runtime: Runtime, world: MPI.Intracomm) -> None:
    """One member contradicts: no member is reduced."""
    tensors = [Tensor.input(5, DType.FLOAT32), Tensor.input(5 + (RANK == LAST), DType.FLOAT32)]
    before = [tensor.memory.copy() for tensor in tensors]
    with pytest.raises(MismatchError, match="'b'"):
        allreduce(runtime, *tensors, name="group", names=["a", "b"]).wait()
    assert all(np.array_equal(tensor.memory, old) for tensor, old in zip(tensors, before, strict=True))
    goes_on(runtime, world)


@several
def test_contradictions_in_a_crowd(runtime: Runtime, world: MPI.Intracomm) -> None:
    """Of 60 in flight, in different orders, every fifth contradicts; the others are complete."""
    generator = random.Random(RANK)
    sizes = {i: 30 + (i % 5 == 0 and i % SIZE == RANK) for i in range(60)}
    tensors = {i: Tensor.input(size, DType.FLOAT32, i) for i, size in sizes.items()}
    order = list(tensors)
    generator.shuffle(order)
    handles = {i: allreduce(runtime, tensors[i], name=f"crowd.{i}") for i in order}
    problems: list[str | None] = []
    for i, handle in handles.items():
        try:
            handle.wait()
            problems.append(
                "no error" if i % 5 == 0 else tensors[i].problem(reduced(ReduceOp.SUM, 30, DType.FLOAT32, salt=i))
            )
        except MismatchError as error:
            problems.append(None if i % 5 == 0 and f"crowd.{i}'" in str(error) else f"{i}: {error}")
    agree(world, *problems)


@several
def test_an_error_may_be_waited_for_again_and_by_many(runtime: Runtime) -> None:
    handle = reduce(runtime, ones(2 + RANK))
    texts: list[str] = []

    def wait() -> None:
        try:
            handle.wait()
        except MismatchError as error:
            texts.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait()
    assert handle.is_done
    assert len(texts) == 5
    assert len(set(texts)) == 1


@several
def test_allocate_of_different_sizes(runtime: Runtime, world: MPI.Intracomm) -> None:
    with pytest.raises(MismatchError, match="size in bytes is 4096 on rank"):
        allocate(runtime.group, 4096 if RANK == 0 else 8192, name="buffer")
    assert allocate(runtime.group, 64, name="buffer").memory.shape == (64,)
    goes_on(runtime, world)


def test_a_name_in_flight_is_refused(runtime: Runtime, world: MPI.Intracomm) -> None:
    """The first operation of that name is not disturbed. The last rank submits late: all others are in flight."""
    tensor = Tensor.input(9, DType.INT32)
    if RANK == LAST and SIZE > 1:
        world.Barrier()
        handle = allreduce(runtime, tensor, name="layer1.bias")
    else:
        handle = allreduce(runtime, tensor, name="layer1.bias")
        if SIZE > 1:
            for again in (
                lambda: allreduce(runtime, tensor, name="layer1.bias"),
                lambda: broadcast_async(runtime.group, [tensor.view], root_rank=0, name="layer1.bias"),
            ):
                with pytest.raises(DuplicateNameError, match="'layer1.bias' was submitted while"):
                    again()
            world.Barrier()
    handle.wait()
    agree(world, tensor.problem(reduced(ReduceOp.SUM, 9, DType.INT32)))
    goes_on(runtime, world)


def test_what_is_refused_at_once(runtime: Runtime, world: MPI.Intracomm) -> None:
    flag = ones(4, dtype=DType.BOOL)
    with pytest.raises(ValueError, match="bool"):
        allreduce_async(runtime.group, [flag], [flag])
    with pytest.raises(NotImplementedError, match="Adasum"):
        allreduce_async(runtime.group, [ones(4)], [ones(4)], Reduction(ReduceOp.ADASUM))
    for root in (-1, SIZE):
        with pytest.raises(ValueError, match=f"root_rank is {root}, but the ranks of this process set are"):
            broadcast_async(runtime.group, [ones(4)], root_rank=root)
    with pytest.raises(ValueError, match="C-contiguous"):
        TensorView.of_numpy(np.zeros((4, 4))[:, ::2])
    with pytest.raises(TypeError, match="complex128"):
        TensorView.of_numpy(np.zeros(3, np.complex128))
    goes_on(runtime, world)


def test_numbers_of_numpy_are_numbers(runtime: Runtime, world: MPI.Intracomm) -> None:
    """Factors, roots and sizes that a program computes with numpy."""
    tensor = Tensor.input(5, DType.FLOAT32)
    allreduce(runtime, tensor, prescale=np.float32(0.5), postscale=np.int64(4)).wait()
    problems = [tensor.problem(reduced(ReduceOp.SUM, 5, DType.FLOAT32, 0.5, 4.0))]
    sent = Tensor.input(5, DType.INT64)
    broadcast_async(runtime.group, [sent.view], root_rank=np.int64(LAST)).wait()
    assert allocate(runtime.group, np.int64(256)).memory.shape == (256,)
    agree(world, *problems)


@several
def test_scales_that_are_no_numbers_do_not_stop_the_job(runtime: Runtime, world: MPI.Intracomm) -> None:
    infinite = Tensor.of(np.ones(3), DType.FLOAT32)
    allreduce(runtime, infinite, postscale=float("inf")).wait()
    assert np.isinf(infinite.memory.view(np.float32)).all()
    goes_on(runtime, world)


# The end of a runtime.


def test_what_is_in_flight_at_the_end_fails_with_the_reason(world: MPI.Intracomm) -> None:
    """Rank 0 closes while the others wait for it; nobody waits for ever, and all may start again."""
    for machine_of in LAYOUTS:
        with running(world, machine_of=machine_of) as runtime:
            world.Barrier()
            if RANK == 0:
                handle = allreduce_async(runtime.group, [ones(3)], [ones(3)], name="of rank 0 only")
                time.sleep(0.05)
                runtime.close()
                if SIZE > 1:
                    with pytest.raises(ShutDownError, match="shut down in this process"):
                        handle.wait()
            else:
                with pytest.raises(ShutDownError, match="rank 0 has shut down hvdlite"):
                    allreduce_async(runtime.group, [ones(3)], [ones(3)], name="of all but rank 0").wait()
                with pytest.raises(ShutDownError, match="rank 0 has shut down"):
                    barrier_async(runtime.group)
            runtime.close()
            runtime.close()
            assert runtime.closed
            for later in (
                lambda runtime=runtime: barrier_async(runtime.group),
                lambda runtime=runtime: reduce(runtime, ones(3)),
                lambda runtime=runtime: allocate(runtime.group, 8),
            ):
                with pytest.raises(ShutDownError, match="shut down in this process"):
                    later()


@several
def test_different_versions_are_refused_on_every_rank(world: MPI.Intracomm) -> None:
    torch = "2.13.0" if RANK == LAST else "2.12.1"
    with pytest.raises(StartupError) as caught:
        Runtime(MpiRanks(world), Config(), versions={"torch": torch})
    for word in ["versions of torch", "2.12.1 on rank 0", f"2.13.0 on rank {LAST}", "same version"]:
        assert word in str(caught.value)
    with running(world) as runtime:
        goes_on(runtime, world)


class _OfAnotherVersion:
    """What a version of hvdlite sends that others cannot read."""

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return __import__, ("hvdlite.of_another_version",)


@several
def test_versions_are_compared_before_what_other_versions_cannot_read(
    world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if RANK == LAST:
        monkeypatch.setattr(bootstrap, "exact_version", lambda: "9.9")
        monkeypatch.setattr(bootstrap, "Card", lambda *_: _OfAnotherVersion())
    with pytest.raises(HorovodVersionMismatchError, match=rf"versions of hvdlite: .* 9\.9 on rank {LAST}"):
        Runtime(MpiRanks(world), Config())


@several
def test_a_package_that_only_some_ranks_have_is_refused(world: MPI.Intracomm) -> None:
    """Whichever rank it is that has it."""
    for rank in (0, LAST):
        with pytest.raises(StartupError, match="different versions of torch"):
            Runtime(MpiRanks(world), Config(), versions={"torch": "2.13.0"} if rank == RANK else {})


def test_operations_without_init_say_what_to_do() -> None:
    with pytest.raises(ShutDownError, match=r"call hvd\.init\(\) first"):
        hvdlite.runtime()
    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        hvdlite.rank()
    assert not hvdlite.is_initialized()
