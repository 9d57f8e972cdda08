"""Every backend keeps the contract of hvdlite/collectives/base.py; run with 1, 2, 3 and 4 ranks under mpirun."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hvdlite
from backend_lab import (
    KINDS,
    LAYOUTS,
    RANK,
    SEGMENT,
    SIZE,
    SMALL,
    Lab,
    Layout,
    allocate,
    assert_none,
    difference,
    encode,
    fill,
    memory,
    nothing_failed,
    reduced,
    values_of,
)
from device_backend_lab import DEVICE_KINDS, build as build_on_device
from hvdlite.collectives.algorithms import Algorithm
from hvdlite.collectives.base import Backend
from hvdlite.collectives.hierarchical import HierarchicalBackend
from hvdlite.collectives.ring import RingBackend
from hvdlite.collectives.select import build_backend, build_ring
from hvdlite.collectives.shm import ShmBackend
from hvdlite.collectives.thresholds import Limits
from hvdlite.config import Config
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.dtypes import SUM, DType, ReduceOp, Reduction
from hvdlite.memory.host import HostMemory
from hvdlite.memory.layout import Range, shard_bounds
from hvdlite.memory.views import Buffer
from hvdlite.recorder import Lane, Recorder
from hvdlite.topology import Topology

REDUCING = [dtype for dtype in DType if dtype is not DType.BOOL]
OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]


def on_any_mpi(kinds: Iterable[str]) -> list[Any]:
    return [pytest.param(kind, marks=[pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]) for kind in kinds]


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab()


@pytest.fixture(scope="module", params=[*KINDS, *on_any_mpi(DEVICE_KINDS)])
def backend(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Backend]:
    kind = request.param
    backend = build_on_device(lab, kind) if kind in DEVICE_KINDS else lab.build(kind)
    yield backend
    backend.close()


Take = Callable[[int, DType], Buffer]


@pytest.fixture(scope="module")
def take(backend: Backend) -> Take:
    """Buffers that all begin at the same place, so that every operation follows the one before it at once."""
    whole = allocate(backend, 1 << 16, DType.UINT8)
    return lambda numel, dtype: whole.narrow(0, numel * dtype.itemsize).as_dtype(dtype)


def sizes(dtype: DType) -> list[int]:
    """Element counts on both sides of every decision that depends on size."""
    edges = [SMALL // 2, SMALL, 4 * SMALL, 6 * SMALL, SEGMENT * SIZE, SEGMENT * SIZE * 3]
    counts = {0, 1, 7, 4099} | {edge // dtype.itemsize + shift for edge in edges for shift in (-1, 0, 1)}
    return sorted(counts)


def test_allocated_buffers_are_apart(backend: Backend, comm: MPI.Intracomm) -> None:
    buffers = [allocate(backend, numel, DType.INT16) for numel in (0, 1, 5000)]
    for number, buf in enumerate(buffers):
        assert buf.address % 64 == 0
        fill(buf, values_of(RANK, buf.numel, number))
    comm.Barrier()
    assert_none(*(difference(buf, values_of(RANK, buf.numel, number)) for number, buf in enumerate(buffers)))


def test_allreduce_sums_at_every_size(backend: Backend, take: Take) -> None:
    problems = []
    for dtype in REDUCING:
        for numel in sizes(dtype):
            buf = take(numel, dtype)
            fill(buf, values_of(RANK, numel))
            backend.allreduce(buf).wait()
            problems.append(difference(buf, reduced(ReduceOp.SUM, numel, dtype)))
    assert_none(*problems)


def test_operations_that_are_begun_complete_in_order(backend: Backend, take: Take) -> None:
    """Whoever waits for the last has waited for all; a wait may come again, and in any order."""
    numels = (3000, 5, 0, 700)
    whole, offsets = take(2 * sum(numels), DType.INT64), itertools.accumulate(numels, initial=0)
    buffers = [whole.narrow(start, start + numel) for start, numel in zip(offsets, numels, strict=False)]
    for salt, order in enumerate(itertools.permutations(range(len(numels)))):
        for buf in buffers:
            fill(buf, values_of(RANK, buf.numel, salt))
        begun = [backend.allreduce(buf) for buf in buffers]
        for number in (*order, 0) if salt % 2 else (-1,):
            begun[number].wait()
        problems = [difference(buf, reduced(ReduceOp.SUM, buf.numel, DType.INT64, salt=salt)) for buf in buffers]
        assert_none(*problems)
        backend.barrier()  # no rank fills what another one may still be reading


def test_allreduce_combines_with_every_operation(backend: Backend, take: Take) -> None:
    problems = []
    for numel, dtype, op in itertools.product([5, 1500], REDUCING, OPS):
        buf = take(numel, dtype)
        fill(buf, values_of(RANK, numel))
        backend.allreduce(buf, Reduction(op)).wait()
        problems.append(difference(buf, reduced(op, numel, dtype), op.label))
    assert_none(*problems)


@pytest.mark.parametrize("numel", [5, 1500])
def test_scales_apply_before_and_after(backend: Backend, take: Take, numel: int) -> None:
    problems = []
    for dtype in REDUCING:
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            # For integers 0.5 cuts every contribution, and 1.5 the result.
            for prescale, postscale in [(0.5, 1.0), (1.0, 1.5), (0.5, 1.5)]:
                buf = take(numel, dtype)
                fill(buf, values_of(RANK, numel))
                backend.allreduce(buf, Reduction(op, prescale, postscale)).wait()
                expected = reduced(op, numel, dtype, prescale, postscale)
                problems.append(difference(buf, expected, f"{op.label} {prescale} {postscale}"))
    assert_none(*problems)


@pytest.mark.parametrize("numel", [5, 1500])
def test_prescale_keeps_fp16_in_range(backend: Backend, take: Take, numel: int) -> None:
    buf = take(numel, DType.FLOAT16)
    fill(buf, np.full(numel, 57344.0))  # two of them pass the largest fp16, 65504
    backend.allreduce(buf, Reduction(prescale=0.25)).wait()
    assert_none(difference(buf, np.full(numel, 14336.0 * SIZE)))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN], ids=lambda op: op.label)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32], ids=lambda dtype: dtype.label)
def test_every_rank_gets_the_same_bits_every_time(
    backend: Backend, take: Take, comm: MPI.Intracomm, dtype: DType, op: ReduceOp
) -> None:
    """Rounding depends on the order of a sum, and the least of 0 and -0 on which comes first."""
    for numel in (200, 5000):
        generator = np.random.default_rng(RANK)
        values = np.where(generator.random(numel) < 0.5, generator.standard_normal(numel), 0.0)
        values = np.copysign(values, generator.standard_normal(numel)).astype(np.float32)
        results = []
        for _ in range(3):
            buf = take(numel, dtype)
            fill(buf, values)
            backend.allreduce(buf, Reduction(op, postscale=1 / SIZE)).wait()
            results.append(memory(buf).tobytes())
            time.sleep(random.random() * 1e-3)
        everybody = {result for row in comm.allgather(results) for result in row}
        assert len(everybody) == 1


def test_calls_that_come_again_on_the_same_memory(
    backend: Backend, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third time on they may go by what has been prepared; also after too many others in between."""
    monkeypatch.setattr("hvdlite.collectives.bound._MOST", 6)
    problems = []
    for number, (repetition, numel) in enumerate(itertools.product(range(4), [1, 5, 33, 130, 300, 1500])):
        for dtype, op in ((DType.BFLOAT16, ReduceOp.SUM), (DType.INT32, ReduceOp.MAX))[: 1 + (repetition == 3)]:
            buf = take(numel, dtype)
            fill(buf, values_of(RANK, numel, number))
            backend.allreduce(buf, Reduction(op, 2.0, 0.5)).wait()
            problems.append(difference(buf, reduced(op, numel, dtype, 2.0, 0.5, number), f"time {repetition}"))
    assert_none(*problems)


def test_rounding_stays_small(backend: Backend, take: Take) -> None:
    """Random fp32 inputs against a float64 sum: no contribution is lost or counted twice in the lower digits."""
    numel = 3000
    contributions = [np.random.default_rng(rank).standard_normal(numel).astype(np.float32) for rank in range(SIZE)]
    buf = take(numel, DType.FLOAT32)
    memory(buf)[:] = contributions[RANK].view(np.uint8)
    backend.allreduce(buf).wait()
    error = np.abs(memory(buf).view(np.float32) - np.sum(contributions, axis=0, dtype=np.float64)).max()
    assert_none(None if error < 2e-6 else f"error {error}")


def deal(numel: int, seed: int) -> list[list[Range]]:
    """Random blocks: ranges of random owners in random order, with gaps; some ranks have none, some several."""
    generator = random.Random(seed)
    cuts = sorted(generator.sample(range(numel + 1), min(numel + 1, 4 * SIZE)))
    blocks: list[list[Range]] = [[] for _ in range(SIZE)]
    for start, stop in itertools.pairwise(cuts):
        if generator.random() < 0.8:
            blocks[generator.randrange(SIZE)].append((start, stop))
    for ranges in blocks:
        generator.shuffle(ranges)
    return blocks


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX], ids=lambda op: op.label)
def test_reduce_scatter_leaves_every_block_with_its_rank(backend: Backend, take: Take, op: ReduceOp) -> None:
    problems = []
    for dtype in (DType.UINT8, DType.BFLOAT16, DType.FLOAT32, DType.INT64):
        for seed, numel in enumerate((0, 1, 33, 130, 1500, 1500, 60_000 // dtype.itemsize)):
            shards = [[shard_bounds(numel, SIZE, rank, dtype.itemsize)] for rank in range(SIZE)]
            for blocks in (shards, deal(numel, seed)):
                buf = take(numel, dtype)
                fill(buf, values_of(RANK, numel))
                backend.reduce_scatter(buf, blocks, Reduction(op, 2.0, 0.5)).wait()
                expected = reduced(op, numel, dtype, 2.0, 0.5)
                for start, stop in blocks[RANK]:
                    problems.append(difference(buf.narrow(start, stop), expected[start:stop], f"{blocks}"))
    assert_none(*problems)


def test_a_reduce_scatter_that_stays_open_and_the_allgather_that_closes_it(backend: Backend, take: Take) -> None:
    """Are an allreduce, in between which each rank may change its own ranges."""
    problems = []
    for seed, numel in enumerate((0, 1, 130, 1500, 15_000, 1500)):
        blocks = deal(numel, seed)
        buf = take(numel, DType.INT32)
        fill(buf, values_of(RANK, numel, seed))
        backend.reduce_scatter(buf, blocks, stays_open=True).wait()
        expected = reduced(ReduceOp.SUM, numel, DType.INT32, salt=seed)
        for start, stop in blocks[RANK]:
            problems.append(difference(buf.narrow(start, stop), expected[start:stop], "reduced"))
            fill(buf.narrow(start, stop), expected[start:stop] + 1)
        backend.allgather(buf, blocks, closes=True).wait()
        for start, stop in (elements for ranges in blocks for elements in ranges):
            problems.append(difference(buf.narrow(start, stop), expected[start:stop] + 1, "gathered"))
        memory(buf)[:] = 0  # the owner goes on at once
    assert_none(*problems)


@pytest.mark.skipif(SIZE == 1, reason="nobody helps")
def test_who_is_helped_waits_for_the_help(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large reduce-scatter that stays open, in which the first rank has everything, and the last one is late."""
    backend = lab.build("shm")
    numel = 100_000
    buf = allocate(backend, numel, DType.INT32)
    fill(buf, values_of(RANK, numel))
    if RANK == SIZE - 1:
        reduce = hvdlite._native.reduce
        monkeypatch.setattr("hvdlite._native.reduce", lambda *arguments: (time.sleep(0.2), reduce(*arguments)))
    backend.reduce_scatter(buf, [[(0, numel)] if rank == 0 else [] for rank in range(SIZE)], stays_open=True).wait()
    expected = reduced(ReduceOp.SUM, numel, DType.INT32)
    assert_none(difference(buf, expected) if RANK == 0 else None)
    backend.close()


def gathered(blocks: Sequence[Sequence[Range]], numel: int, salt: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What an allgather must leave, and where: (values, mask)."""
    values, mask = np.zeros(numel), np.zeros(numel, bool)
    for owner, ranges in enumerate(blocks):
        for start, stop in ranges:
            values[start:stop] = values_of(owner, numel, salt)[start:stop]
            mask[start:stop] = True
    return values, mask


def gather_problem(buf: Buffer, blocks: Sequence[Sequence[Range]], salt: int = 0) -> str | None:
    values, mask = gathered(blocks, buf.numel, salt)
    itemsize = buf.dtype.itemsize
    wrong = (memory(buf) != encode(values, buf.dtype)).reshape(-1, itemsize).any(axis=1) & mask
    return (
        f"allgather {buf.dtype.label}[{buf.numel}] of {blocks}: wrong at {np.flatnonzero(wrong)}"
        if wrong.any()
        else None
    )


@pytest.mark.parametrize("dtype", [DType.BOOL, DType.BFLOAT16, DType.FLOAT64], ids=lambda dtype: dtype.label)
def test_allgather_of_ragged_blocks(backend: Backend, take: Take, dtype: DType) -> None:
    numel = 3000
    empty: list[list[Range]] = [[] for _ in range(SIZE)]
    per_rank = [[shard_bounds(numel, SIZE, rank, dtype.itemsize)] for rank in range(SIZE)]
    all_from_last: list[list[Range]] = [[] for _ in range(SIZE - 1)] + [[(0, numel)]]
    problems = []
    for blocks in [empty, per_rank, all_from_last, *(deal(numel, seed) for seed in range(12))]:
        buf = take(numel, dtype)
        memory(buf)[:] = 0
        for start, stop in blocks[RANK]:
            fill(buf.narrow(start, stop), values_of(RANK, numel)[start:stop])
        backend.allgather(buf, blocks).wait()
        problems.append(gather_problem(buf, blocks))
    assert_none(*problems)


@pytest.mark.parametrize("root", range(SIZE))
def test_broadcast_from_every_root(backend: Backend, take: Take, root: int) -> None:
    problems = []
    for dtype in (DType.BOOL, DType.FLOAT16, DType.INT32):
        for numel in sizes(dtype):
            buf = take(numel, dtype)
            fill(buf, values_of(RANK, numel))
            backend.broadcast(buf, root).wait()
            problems.append(difference(buf, values_of(root, numel), f"broadcast from {root}"))
    assert_none(*problems)


def test_barrier_waits_for_the_last(backend: Backend, comm: MPI.Intracomm) -> None:
    """Each rank in turn is late; nobody may leave before it came."""
    problems = []
    for late in range(SIZE):
        comm.Barrier()
        if late == RANK:
            time.sleep(0.02)
        came = time.monotonic()  # one clock for the machine
        backend.barrier()
        left = time.monotonic()
        last = max(comm.allgather(came))
        if left < last:
            problems.append(f"left {last - left:.6f} s before rank {late} came")
    assert_none(*problems)


@dataclass
class Step:
    """One random operation, the same on every rank."""

    kind: str
    buffer: int
    start: int
    stop: int
    dtype: DType
    op: ReduceOp
    root: int
    seed: int


def random_step(generator: random.Random, numel: int) -> Step:
    length = generator.choice([1, 3, 40, 200, 700, numel])
    start = generator.randrange(numel - length + 1)
    return Step(
        generator.choice(["allreduce", "allreduce", "allgather", "broadcast", "reduce_scatter", "barrier"]),
        generator.randrange(3),
        start,
        start + length,
        generator.choice([DType.FLOAT32, DType.BFLOAT16, DType.INT8]),
        generator.choice(OPS),
        generator.randrange(SIZE),
        generator.randrange(1 << 30),
    )


def test_operations_back_to_back(backend: Backend) -> None:
    """Hundreds of random operations, each rank now and then late, on three buffers that are written again at once.

    A rank that leaves an operation too early, or touches a copy after its owner went on, spoils a result.
    """
    numel = 2000
    common, own = random.Random(1), random.Random(1000 + RANK)
    buffers = [allocate(backend, numel * 4, DType.UINT8) for _ in range(3)]
    problems: list[str | None] = []
    for number in range(300):
        step = random_step(common, numel)
        whole = buffers[step.buffer].narrow(0, numel * step.dtype.itemsize).as_dtype(step.dtype)
        buf = whole.narrow(step.start, step.stop)
        values = values_of(RANK, buf.numel, number)
        if own.random() < 0.1:
            time.sleep(own.random() * 2e-3)
        problem = None
        if step.kind == "allreduce":
            fill(buf, values)
            backend.allreduce(buf, Reduction(step.op)).wait()
            problem = difference(buf, reduced(step.op, buf.numel, buf.dtype, salt=number), step.op.label)
        elif step.kind == "reduce_scatter":
            fill(buf, values)
            blocks = deal(buf.numel, step.seed)
            backend.reduce_scatter(buf, blocks, Reduction(step.op)).wait()
            expected = reduced(step.op, buf.numel, buf.dtype, salt=number)
            found = [difference(buf.narrow(a, b), expected[a:b], "reduce_scatter") for a, b in blocks[RANK]]
            problem = next((text for text in found if text), None)
        elif step.kind == "allgather":
            blocks = deal(buf.numel, step.seed)
            memory(buf)[:] = 0
            for start, stop in blocks[RANK]:
                fill(buf.narrow(start, stop), values[start:stop])
            backend.allgather(buf, blocks).wait()
            problem = gather_problem(buf, blocks, number)
        elif step.kind == "broadcast":
            fill(buf, values)
            backend.broadcast(buf, step.root).wait()
            problem = difference(buf, values_of(step.root, buf.numel, number), "broadcast")
        else:
            backend.barrier()
        memory(buf)[:] = own.randrange(256)  # the owner goes on at once
        problems.append(problem and f"operation {number}: {problem}")
    assert_none(*problems)


@pytest.mark.parametrize("algorithm", Algorithm, ids=lambda algorithm: algorithm.value)
def test_memory_is_free_when_large_messages_are_gone(algorithm: Algorithm) -> None:
    """Messages that MPI does not buffer: a rank that returns before they have left sends what it writes next."""
    up_to = {Algorithm.DOUBLING: (1 << 30, 0), Algorithm.HALVING: (0, 1 << 30), Algorithm.RING: (0, 0)}[algorithm]
    backend = Lab(segment_bytes=1 << 17).ring(MPI.COMM_WORLD.Dup(), limits=Limits(*up_to, tree_bytes=1 << 18))
    whole = allocate(backend, 1 << 18, DType.FLOAT32)
    problems: list[str | None] = []
    for number in range(12):
        buf = whole.narrow(0, (1 << 16) - 3) if number % 2 else whole
        root = number // 3 % SIZE
        fill(buf, values_of(RANK, buf.numel, number))
        if (root + 1) % SIZE == RANK:
            time.sleep(3e-3)
        if number % 3:
            backend.allreduce(buf).wait()
            expected = reduced(ReduceOp.SUM, buf.numel, DType.FLOAT32, salt=number)
        else:
            backend.broadcast(buf, root).wait()
            if root == RANK:
                memory(buf)[:] = 0
                continue
            expected = values_of(root, buf.numel, number)
        problem = difference(buf, expected)
        problems.append(problem and f"operation {number}: {problem}")
    assert_none(*problems)
    backend.close()


@pytest.mark.up_to_three_ranks
@pytest.mark.not_with_three_ranks
def test_what_is_on_its_way_comes_to_its_end_first(lab: Lab) -> None:
    backend = lab.ring(MPI.COMM_WORLD.Dup())
    buf, few = allocate(backend, 5000, DType.INT32), allocate(backend, 5, DType.INT32)
    bound = backend.bound_allreduce(few, SUM)
    problems: list[str | None] = []
    for settle in (backend.barrier, partial(backend.bound_allreduce, few, SUM), partial(backend.configure, Config())):
        fill(buf, values_of(RANK, buf.numel))
        backend.allreduce(buf)
        settle()
        problems.append(difference(buf, reduced(ReduceOp.SUM, buf.numel, DType.INT32), f"number {len(problems)}"))
    problems += ["messages of other settings are bound"] * any(bound._requests.sends)
    bound = backend.bound_allreduce(few, SUM)
    backend.close()
    assert_none(*problems, "messages are bound" if any(bound._requests.sends) else None)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_the_table_of_backends(nodes: Layout) -> None:
    lab = Lab()
    node = lab.node(nodes)
    rail = lab.rail(nodes) if len(nodes) > 1 else None
    place = Topology(RANK, nodes), Config(), nothing_failed, lab.recorder
    host = HostMemory(node)
    cross = None if rail is None else build_ring(node, host, rail, *place)
    backend = build_backend(node, host, ControlPage(node).counts, cross, *place)
    buf = allocate(backend, 3, DType.FLOAT64)
    fill(buf, values_of(RANK, 3))
    backend.allreduce(buf).wait()
    wanted = ShmBackend if len(nodes) == 1 else RingBackend if len(nodes) == SIZE else HierarchicalBackend
    kind = None if type(backend) is wanted else f"{nodes} got {type(backend).__name__}"
    assert_none(kind, difference(buf, reduced(ReduceOp.SUM, 3, DType.FLOAT64)))
    backend.close()


def test_the_timeline_shows_the_stages() -> None:
    """Each stage with label, bytes and dtype."""
    nodes = next((nodes for nodes in LAYOUTS if nodes[0] == (0, 1) and len(nodes) > 1), None)
    recorder = Recorder(100)
    lab = Lab(recorder)
    backend: Backend = lab.build("shm") if nodes is None else lab.hierarchical(nodes, one_rail_bytes=0)
    buf = allocate(backend, 1000, DType.FLOAT32)
    fill(buf, values_of(RANK, 1000))
    recorder.start()
    backend.allreduce(buf, label="bucket 3").wait()
    events, _ = recorder.drain()
    spans = [
        (lane, nbytes) for _, lane, name, _, _, nbytes, dtype in events if (name, dtype) == ("bucket 3", "float32")
    ]
    if nodes is None:
        wanted = [(Lane.NODE_ALLREDUCE, 4000)]
    else:
        rails = min(len(ranks) for ranks in nodes)
        local_rank = next(ranks.index(RANK) for ranks in nodes if RANK in ranks)
        start, stop = shard_bounds(1000, rails, local_rank, 4) if local_rank < rails else (0, 0)
        ring = [(Lane.RING, (stop - start) * 4)] if local_rank < rails else []
        wanted = [(Lane.NODE_REDUCE_SCATTER, 4000), *ring, (Lane.NODE_ALLGATHER, 4000)]
    assert_none(None if spans == wanted else f"{spans} instead of {wanted}")
    backend.close()
