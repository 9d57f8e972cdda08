"""What a Runtime computes: every operation, type, size and place, on every grouping of the ranks into nodes.

Chunks, segments and caches are tiny, so that all paths are taken; many operations are in flight at once.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from backend_lab import RANK, SIZE, reduced, values_of
from hvdlite.config import Config
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.job_runtime import Runtime
from hvdlite.memory.base import Home
from hvdlite.memory.layout import slot_offsets
from hvdlite.memory.views import TensorView
from hvdlite.operations.allgather import allgather_async
from hvdlite.operations.allocate import allocate
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.barrier import barrier_async
from hvdlite.operations.broadcast import broadcast_async
from machines_lab import nodes_of
from runtime_lab import CHUNK, LAYOUTS, REDUCING, SIZES, STAGING, Gathered, Tensor, agree, allreduce, running

OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
FLOATS = [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64]
LAST = SIZE - 1


@pytest.fixture(scope="module")
def world() -> Iterator[MPI.Intracomm]:
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda machine_of: "".join(map(str, machine_of)))
def runtime(world: MPI.Intracomm, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with running(world, machine_of=request.param) as made:
        assert made.topology.nodes == nodes_of(request.param)
        yield made


def test_it_knows_who_it_is(runtime: Runtime) -> None:
    nodes = runtime.topology.nodes
    mine = next(node for node in nodes if RANK in node)
    assert (runtime.rank, runtime.size) == (RANK, SIZE)
    assert (runtime.topology.local_rank, runtime.topology.local_size) == (mine.index(RANK), len(mine))
    peers = [node[runtime.topology.local_rank] for node in nodes if len(node) > runtime.topology.local_rank]
    assert (runtime.topology.cross_rank, runtime.topology.cross_size) == (peers.index(RANK), len(peers))
    assert runtime.topology.is_homogeneous == (len({len(node) for node in nodes}) == 1)


@pytest.mark.parametrize("dtype", REDUCING, ids=lambda dtype: dtype.label)
def test_sums_of_every_size_at_once(runtime: Runtime, world: MPI.Intracomm, dtype: DType) -> None:
    """In place and not, fused in whatever way the sizes allow."""
    work = []
    for salt, numel in enumerate(SIZES):
        tensor = Tensor.input(numel, dtype, salt)
        target = tensor if salt % 2 else Tensor.empty(numel, dtype)
        handle = allreduce_async(runtime.group, [tensor.view], [target.view], name=f"{dtype.label}.{numel}")
        work.append((handle, tensor, target, salt))
    problems = []
    for (handle, tensor, target, salt), numel in zip(work, SIZES, strict=True):
        assert handle.wait() is None
        problems.append(target.problem(reduced(ReduceOp.SUM, numel, dtype, salt=salt), "sum"))
        if target is not tensor:
            problems.append(tensor.problem(values_of(RANK, numel, salt), "input"))
    agree(world, *problems)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.label)
def test_operations_and_scales(runtime: Runtime, world: MPI.Intracomm, op: ReduceOp) -> None:
    work = []
    for dtype in REDUCING:
        if (dtype, op) == (DType.INT8, ReduceOp.PRODUCT) and SIZE > 3:
            continue  # 1.5 * 4 * 4 * 4 * 4 is out of range
        for numel in (5, 300):
            for prescale, postscale in [(1.0, 1.0), (0.5, 1.0), (1.0, 1.5), (0.5, 1.5)]:
                tensor = Tensor.input(numel, dtype)
                handle = allreduce(runtime, tensor, op=op, prescale=prescale, postscale=postscale)
                work.append((handle, tensor, reduced(op, numel, dtype, prescale, postscale), f"{prescale} {postscale}"))
    for handle, *_ in work:
        handle.wait()
    agree(world, *(tensor.problem(expected, what) for _, tensor, expected, what in work))


@pytest.mark.parametrize("numel", [3, 1000])
def test_averages(runtime: Runtime, world: MPI.Intracomm, numel: int) -> None:
    """Multiples of the number of ranks, which every type divides exactly; integers are cut, not rounded."""
    work = []
    for dtype in REDUCING:
        tensor = Tensor.of(values_of(RANK, numel) * SIZE, dtype)
        expected = sum(values_of(rank, numel) for rank in range(SIZE))
        work.append((allreduce(runtime, tensor, op=ReduceOp.AVERAGE), tensor, expected, "average"))
    for dtype in (DType.INT16, DType.INT64):
        tensor = Tensor.of(-values_of(RANK, numel), dtype)
        cut = -(sum(values_of(rank, numel) for rank in range(SIZE)) // SIZE)
        work.append((allreduce(runtime, tensor, op=ReduceOp.AVERAGE), tensor, cut, "negative average"))
    large = Tensor.of(np.full(numel, 57344.0), DType.FLOAT16)  # two of them pass the largest fp16, 65504
    work.append((allreduce(runtime, large, op=ReduceOp.AVERAGE), large, np.full(numel, 57344.0), "large average"))
    for handle, *_ in work:
        handle.wait()
    if SIZE & (SIZE - 1):  # 57344 / 3 is rounded, and so is the sum of three of them
        close = np.abs(large.memory.view(np.float16).astype(float) - 57344) <= 64
        assert close.all()
        work.pop()
    agree(world, *(tensor.problem(expected, what) for _, tensor, expected, what in work))


def test_a_group_of_all_types_goes_together(runtime: Runtime, world: MPI.Intracomm) -> None:
    for salt in range(3):
        sizes = [0, 1, 17, STAGING, 5, 0, 33, 1000, 2]
        tensors = [Tensor.input(n, dtype, salt) for n, dtype in zip(sizes, REDUCING, strict=True)]
        targets = [Tensor.empty(n, dtype) for n, dtype in zip(sizes, REDUCING, strict=True)]
        allreduce_async(runtime.group, [t.view for t in tensors], [t.view for t in targets], name="group").wait()
        expected = [reduced(ReduceOp.SUM, n, dtype, salt=salt) for n, dtype in zip(sizes, REDUCING, strict=True)]
        agree(world, *(t.problem(values) for t, values in zip(targets, expected, strict=True)))


def test_groups_of_nothing(runtime: Runtime) -> None:
    allreduce_async(runtime.group, [], []).wait()
    allgather_async(runtime.group, [], lambda index, shape: None).wait()  # type: ignore[arg-type, return-value]
    broadcast_async(runtime.group, [], root_rank=LAST).wait()


def test_scalars_and_shapes_of_many_dimensions(runtime: Runtime, world: MPI.Intracomm) -> None:
    shapes: list[tuple[int, ...]] = [(), (1, 1, 1, 1), (2, 3, 4, 5), (3, 0, 2)]
    tensors = [Tensor.of(values_of(RANK, int(np.prod(shape))), DType.FLOAT32, shape) for shape in shapes]
    tensors[0].view = TensorView(tensors[0].view.address, (), DType.FLOAT32, None)
    for handle in [allreduce(runtime, tensor) for tensor in tensors]:
        handle.wait()
    agree(world, *(t.problem(reduced(ReduceOp.SUM, t.view.numel, DType.FLOAT32)) for t in tensors))


@pytest.mark.parametrize("wire", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
def test_floats_travel_in_fewer_bytes_and_integers_as_they_are(
    runtime: Runtime, world: MPI.Intracomm, wire: DType
) -> None:
    work = []
    for dtype in REDUCING:
        for numel in (0, 1, CHUNK // 2 + 1, 3000):
            tensor, target = Tensor.input(numel, dtype), Tensor.empty(numel, dtype)
            handle = allreduce_async(
                runtime.group, [tensor.view], [target.view], reduction=Reduction(postscale=2.0), wire_dtype=wire
            )
            work.append((handle, target, reduced(ReduceOp.SUM, numel, dtype, 1.0, 2.0)))
    fine = Tensor.of(np.full(50, 1 + 2**-12), DType.FLOAT32)  # neither 16-bit type can hold this
    work.append((allreduce(runtime, fine, wire_dtype=wire), fine, np.full(50, float(SIZE))))
    for handle, *_ in work:
        handle.wait()
    agree(world, *(tensor.problem(expected) for _, tensor, expected in work))


def test_what_nobody_waits_for_is_done(runtime: Runtime, world: MPI.Intracomm) -> None:
    """The coordinator thread, asleep since the turn before, hears of each."""
    problems = []
    for turn in range(3):
        tensor = Tensor.input(100, DType.FLOAT32, turn)
        submission = allreduce(runtime, tensor, name=f"turn {turn}")
        deadline = time.monotonic() + 10
        while not submission.is_done and time.monotonic() < deadline:
            time.sleep(1e-3)
        problems.append(None if submission.is_done else f"turn {turn} is not done")
        world.barrier()
        time.sleep(5e-3)
    agree(world, *problems)


def test_hundreds_of_small_ones_in_a_different_order_on_every_rank(runtime: Runtime, world: MPI.Intracomm) -> None:
    generator = random.Random(RANK)
    problems = []
    for turn in range(2):  # of new names, then of names that are known
        tensors = {i: Tensor.input(i % 23, REDUCING[i % len(REDUCING)], i + turn) for i in range(300)}
        order = list(tensors)
        generator.shuffle(order)
        handles = {i: allreduce(runtime, tensors[i], name=f"small.{i}") for i in order}
        for i, handle in handles.items():
            handle.wait()
            expected = reduced(ReduceOp.SUM, i % 23, REDUCING[i % len(REDUCING)], salt=i + turn)
            problems.append(tensors[i].problem(expected, f"small.{i}"))
    agree(world, *problems)


# Tensors that live in a fusion buffer.


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT8], ids=lambda dtype: dtype.label)
def test_tensors_in_their_slots(runtime: Runtime, world: MPI.Intracomm, dtype: DType) -> None:
    buffer = allocate(runtime.group, 10_000)
    assert not buffer.memory.any()
    problems = []
    for salt, (start, numel) in enumerate([(0, 1), (64, 0), (128, 333), (2, 777), (5000, 5000 // dtype.itemsize)]):
        tensor = Tensor.at(buffer.memory[start:], values_of(RANK, numel, salt), dtype)
        around = buffer.memory.copy()
        allreduce(runtime, tensor, name="slot").wait()
        problems.append(tensor.problem(reduced(ReduceOp.SUM, numel, dtype, salt=salt), f"slot at {start}"))
        around[start : start + numel * dtype.itemsize] = tensor.memory
        if not np.array_equal(around, buffer.memory):
            problems.append(f"slot at {start}: something beside it has changed")
    agree(world, *problems)


def test_ranks_may_differ_in_place(runtime: Runtime, world: MPI.Intracomm) -> None:
    """In a slot here, at another offset or outside there: the tensors are copied, the result is the same."""
    buffers = [allocate(runtime.group, 4096) for _ in range(2)]
    problems = []
    for salt in range(8):
        chosen = (salt + RANK * (salt % 3)) % 4  # alike on all ranks in some turns
        values = values_of(RANK, 200, salt)
        if chosen == 0:
            tensor = Tensor.of(values, DType.FLOAT32)
        else:
            tensor = Tensor.at(buffers[chosen // 3].memory[64 * chosen :], values, DType.FLOAT32)
        allreduce(runtime, tensor, name="wandering").wait()
        problems.append(tensor.problem(reduced(ReduceOp.SUM, 200, DType.FLOAT32, salt=salt), f"turn {salt}"))
    agree(world, *problems)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16], ids=lambda dtype: dtype.label)
def test_a_group_with_a_home(runtime: Runtime, world: MPI.Intracomm, dtype: DType) -> None:
    """Members at their place, elsewhere, without memory (zeros), and targets elsewhere; on some ranks only."""
    sizes = [33, 0, 5, 64, 1, 700]
    offsets, total = slot_offsets(sizes, dtype.itemsize)
    buffer = allocate(runtime.group, 4096 + total * dtype.itemsize)
    home = Home(buffer, 4096)
    place = [buffer.memory[4096 + offset * dtype.itemsize :] for offset in offsets]
    problems = []
    for salt in range(12):
        generator = random.Random(salt * 100 + RANK)
        inputs, outputs = [], []
        zeros = salt % len(sizes)  # a tensor to which the last rank contributes nothing
        for i, numel in enumerate(sizes):
            values = values_of(RANK, numel, salt + i)
            own = Tensor.at(place[i], values, dtype)
            tensor = own if generator.random() < 0.5 else Tensor.of(values, dtype)
            if tensor is not own:
                own.memory[:] = 0x5A
            if i == zeros and RANK == LAST:
                tensor.view = TensorView(0, (numel,), dtype, None)
            inputs.append(tensor)
            outputs.append(own if generator.random() < 0.5 else Tensor.empty(numel, dtype))
        views = [[t.view for t in tensors] for tensors in (inputs, outputs)]
        allreduce_async(runtime.group, *views, Reduction(postscale=2.0), name="bucket", home=home).wait()
        for i, (numel, target) in enumerate(zip(sizes, outputs, strict=True)):
            expected = reduced(ReduceOp.SUM, numel, dtype, 1.0, 2.0, salt + i)
            if i == zeros:
                expected = expected - 2 * values_of(LAST, numel, salt + i)
            problems.append(target.problem(expected, f"turn {salt}, member {i}"))
    agree(world, *problems)


def test_a_fusion_buffer_goes_with_its_last_tensor(runtime: Runtime, world: MPI.Intracomm) -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:hvdlite" in line for line in maps)

    gc.collect()  # what tests before have left; from here on the last reference counts
    before = mapped()
    for salt in range(3):
        tensor = Tensor.at(allocate(runtime.group, 5000).memory, values_of(RANK, 1000, salt), DType.FLOAT32)
        allreduce(runtime, tensor).wait()
        agree(world, tensor.problem(reduced(ReduceOp.SUM, 1000, DType.FLOAT32, salt=salt)))
    assert mapped() == before + 1
    del tensor
    assert mapped() == before


# The other operations.


@pytest.mark.parametrize("dtype", [DType.BOOL, DType.BFLOAT16, DType.INT64], ids=lambda dtype: dtype.label)
def test_allgather_of_ragged_tensors(runtime: Runtime, world: MPI.Intracomm, dtype: DType) -> None:
    """Rows per rank: none, none anywhere, from one rank only, more than the staging buffer holds."""
    problems = []
    for turn, inner in enumerate([(), (1,), (7, 3), (0,), (40,)]):
        for rows_of in (
            [2] * SIZE,
            list(range(SIZE)),
            [0] * SIZE,
            [0] * LAST + [9],
            [40 + 3 * rank for rank in range(SIZE)],
        ):
            width = int(np.prod(inner))
            mine = Tensor.of(values_of(RANK, rows_of[RANK] * width, turn), dtype, (rows_of[RANK], *inner))
            result = Gathered([dtype])
            allgather_async(runtime.group, [mine.view], result.allocate, name="ragged").wait()
            expected = np.concatenate([values_of(rank, rows * width, turn) for rank, rows in enumerate(rows_of)])
            problems.append(result.problem(0, expected, (sum(rows_of), *inner), f"rows {rows_of} of {inner}"))
    agree(world, *problems)


def test_allgather_of_a_group(runtime: Runtime, world: MPI.Intracomm) -> None:
    dtypes = [DType.FLOAT64, DType.BOOL, DType.INT16]
    rows_of = [[rank + 1, 3 * (rank == 0), 100] for rank in range(SIZE)]
    mine = [Tensor.of(values_of(RANK, rows * 2, i), dtypes[i], (rows, 2)) for i, rows in enumerate(rows_of[RANK])]
    result = Gathered(dtypes)
    allgather_async(runtime.group, [t.view for t in mine], result.allocate).wait()
    problems = []
    for i in range(3):
        expected = np.concatenate([values_of(rank, rows[i] * 2, i) for rank, rows in enumerate(rows_of)])
        problems.append(result.problem(i, expected, (sum(rows[i] for rows in rows_of), 2), f"member {i}"))
    agree(world, *problems)


@pytest.mark.parametrize("root", range(SIZE))
def test_broadcast_of_everything_from_every_root(runtime: Runtime, world: MPI.Intracomm, root: int) -> None:
    work = []
    for numel in (0, 1, STAGING - 1, STAGING + 1):
        tensors = [Tensor.of(values_of(RANK, numel, dtype), dtype) for dtype in DType]
        for tensor in tensors:
            work.append((broadcast_async(runtime.group, [tensor.view], root_rank=root), [tensor]))
        group = [Tensor.of(values_of(RANK, numel, dtype), dtype) for dtype in DType]
        work.append((broadcast_async(runtime.group, [t.view for t in group], root_rank=root), group))
    problems = []
    for handle, tensors in work:
        handle.wait()
        problems += [t.problem(values_of(root, t.view.numel, t.view.dtype), f"root {root}") for t in tensors]
    agree(world, *problems)


def test_barrier_waits_for_the_last(runtime: Runtime, world: MPI.Intracomm) -> None:
    problems = []
    for late in range(SIZE):
        world.Barrier()
        if late == RANK:
            time.sleep(0.03)
        came = time.monotonic()  # one clock for the machine
        barrier_async(runtime.group).wait()
        left = time.monotonic()
        if left < max(world.allgather(came)):
            problems.append(f"left before rank {late} came")
    agree(world, *problems)


# In any order, from any thread.


def test_unnamed_operations_count_by_operation(runtime: Runtime, world: MPI.Intracomm) -> None:
    """Ranks that interleave different operations in different ways still mean the same ones."""
    generator = random.Random(RANK)
    steps = ["allreduce"] * 20 + ["allgather"] * 10 + ["broadcast"] * 10 + ["barrier"] * 5
    generator.shuffle(steps)
    counts = dict.fromkeys(steps, 0)
    work = []
    for step in steps:
        number = counts[step]
        counts[step] += 1
        tensor = Tensor.input(3 + number, DType.INT32, number)
        result = Gathered([DType.INT32])
        if step == "allreduce":
            handle = allreduce(runtime, tensor)
        elif step == "allgather":
            handle = allgather_async(runtime.group, [tensor.view], result.allocate)
        elif step == "broadcast":
            handle = broadcast_async(runtime.group, [tensor.view], root_rank=number % SIZE)
        else:
            handle = barrier_async(runtime.group)
        work.append((step, number, handle, tensor, result))
    problems = []
    for step, number, handle, tensor, result in work:
        handle.wait()
        if step == "allreduce":
            problems.append(tensor.problem(reduced(ReduceOp.SUM, 3 + number, DType.INT32, salt=number), step))
        elif step == "allgather":
            everything = np.concatenate([values_of(rank, 3 + number, number) for rank in range(SIZE)])
            problems.append(result.problem(0, everything, (SIZE * (3 + number),), step))
        elif step == "broadcast":
            problems.append(tensor.problem(values_of(number % SIZE, 3 + number, number), step))
    agree(world, *problems)


def test_several_threads_submit_and_wait(runtime: Runtime, world: MPI.Intracomm) -> None:
    problems: list[str | None] = []

    def work(thread: int) -> None:
        generator = random.Random(10 * RANK + thread)
        for turn in range(25):
            tensor = Tensor.input(thread + turn, DType.FLOAT32, turn)
            handle = allreduce(runtime, tensor, name=f"thread {thread}")
            if generator.random() < 0.2:
                time.sleep(generator.random() * 2e-3)
            handle.wait()
            problems.append(tensor.problem(reduced(ReduceOp.SUM, thread + turn, DType.FLOAT32, salt=turn), f"{thread}"))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
    for started in threads:
        started.start()
    for started in threads:
        started.join()
    assert len(problems) == 6 * 25
    agree(world, *problems)


def test_several_threads_wait_for_one_handle(runtime: Runtime, world: MPI.Intracomm) -> None:
    tensor = Tensor.input(3, DType.FLOAT32)
    if RANK == 0:
        time.sleep(0.02)
    handle = allreduce(runtime, tensor)
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(handle.wait() is None and handle.is_done)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 5
    assert handle.wait() is None  # once more
    agree(world, tensor.problem(reduced(ReduceOp.SUM, 3, DType.FLOAT32)))


def test_what_is_said_may_be_larger_than_every_stream(runtime: Runtime, world: MPI.Intracomm) -> None:
    """A name of 400 kB, and a group whose description has as much: both more than a mailbox and the log hold."""
    long = Tensor.input(5, DType.INT32)
    allreduce(runtime, long, name="n" * 400_000).wait()
    group = [Tensor.input(i % 5, DType.INT16, i) for i in range(1000)]
    names = [f"{'module.' * 40}{i}.weight" for i in range(1000)]
    views = [tensor.view for tensor in group]
    allreduce_async(runtime.group, views, views, name="group", names=names).wait()
    problems = [t.problem(reduced(ReduceOp.SUM, i % 5, DType.INT16, salt=i), names[i]) for i, t in enumerate(group)]
    agree(world, long.problem(reduced(ReduceOp.SUM, 5, DType.INT32)), *problems)


@pytest.mark.parametrize(
    "config",
    [
        Config(cache_capacity=0),
        Config(cache_capacity=1),
        Config(cache_capacity=2, fusion_threshold_bytes=0),
        Config(chunk_bytes=1, staging_bytes=1, segment_bytes=1, small_bytes=0),
        Config(chunk_bytes=1001, staging_bytes=4001, segment_bytes=77, small_bytes=33),
        Config(cycle_ms=2.0, staging_bytes=100, chunk_bytes=1 << 20),
    ],
    ids=["no cache", "cache of 1", "cache of 2, no fusion", "bytes of 1", "odd bytes", "cycles"],
)
@pytest.mark.parametrize("machine_of", LAYOUTS[::2], ids=lambda machine_of: "".join(map(str, machine_of)))
def test_settings_at_their_limits(world: MPI.Intracomm, config: Config, machine_of: tuple[int, ...]) -> None:
    generator = random.Random(RANK)
    with running(world, config, machine_of) as runtime:
        problems = []
        for turn in range(3):
            tensors = {i: Tensor.input(37 * i, FLOATS[i % 4], i + turn) for i in range(8)}
            order = list(tensors)
            generator.shuffle(order)
            handles = [allreduce(runtime, tensors[i], name=f"t{i}") for i in order]
            sent = Tensor.input(300, DType.INT8)
            handles.append(broadcast_async(runtime.group, [sent.view], root_rank=LAST))
            result = Gathered([DType.INT16])
            rows = Tensor.input(RANK * 50, DType.INT16).view
            handles.append(allgather_async(runtime.group, [rows], result.allocate))
            for handle in handles:
                handle.wait()
            problems += [
                t.problem(reduced(ReduceOp.SUM, 37 * i, FLOATS[i % 4], salt=i + turn)) for i, t in tensors.items()
            ]
            problems.append(sent.problem(values_of(LAST, 300)))
            everything = np.concatenate([values_of(rank, rank * 50) for rank in range(SIZE)])
            problems.append(result.problem(0, everything, (len(everything),)))
        agree(world, *problems)
